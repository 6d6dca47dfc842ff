"""Check that a source is still the one that the lake was built from: what its slot sends again must be what the lake has.

A slot confirmed before the lake's frontier sends transactions again that the lake has. After a crash they are the same. If the source was
set back to an older copy of itself and has written other WAL since, they are others: skipping them would lose them, and the lake would
keep changes that this source never had.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from pgwal_pipeline.decode.batch import Decoder
from pgwal_pipeline.lake.ledger import Ledger, Window
from pgwal_pipeline.messages.errors import SlotLost
from pgwal_pipeline.postgres.standbys import HeldBack
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.xid import TransactionMark

_READ_BYTES = 1 << 20
_IDLE = 0.25  # seconds that a read waits for the server


def to_be_sent_again(ledger: Ledger, confirmed_lsn: int, frontier: int) -> tuple[int, tuple[TransactionMark, ...]] | None:
    """Return an LSN and the marks of all transactions with a change that the slot must send again from there to the frontier.

    Returns None if there is nothing to compare: the slot is confirmed up to the frontier, or the windows there were written by a version
    that kept no marks.
    """
    if confirmed_lsn >= frontier:
        return None
    marks: tuple[TransactionMark, ...] = ()
    known_from = frontier
    for window in reversed(ledger.windows(confirmed_lsn)):
        if window.end_lsn != known_from or window.start_lsn == window.end_lsn or not _has_marks(window):
            break
        marks = window.marks + marks
        whole = len(window.marks) == window.transactions
        known_from = window.start_lsn if whole else window.marks[0].commit_lsn
        if marks or known_from <= confirmed_lsn:
            break
    start = max(confirmed_lsn, known_from)
    return None if start >= frontier else (start, tuple(mark for mark in marks if mark.commit_lsn >= start))


def _has_marks(window: Window) -> bool:
    return window.state == "complete" and (window.transactions == 0 or bool(window.marks))


def require_same(stream: ReplicationStream, start_lsn: int, frontier: int, expected: Sequence[TransactionMark], held: HeldBack) -> None:
    """Read `stream` from `start_lsn`, where it begins, to the frontier, and compare its transactions with `expected`.

    Raises SlotLost if they differ, SourceUnavailable if standbys hold the slot back (`held`).
    """
    decoder = Decoder(lambda _: None, start_lsn, frontier)
    found: list[TransactionMark] = []
    count = position = 0
    while True:
        messages = stream.read(_READ_BYTES, _IDLE)
        decoded = decoder.feed(messages.payloads, messages.positions)
        found += decoded.marks
        count += decoded.transactions
        position = max(position, stream.server_position, decoded.last_commit_end_lsn or 0)
        if decoded.passed_end or (not decoded.in_transaction and position >= frontier) or count > len(expected):
            break
        if messages:
            held.moved()
        else:
            stream.request_reply()
            held.stands()
    if count != len(expected) or tuple(found) != tuple(expected):
        raise SlotLost(
            f"The source was set back to an older copy of itself, and has written other changes since: the lake has its changes up to "
            f"{format_lsn(frontier)}, but slot {stream.slot} {_difference(expected, found)}. That is a gap: this source "
            f"never had some changes of the lake, and the lake may lack some of its changes. "
            f"Run `pgwal resnapshot --all` to read every table again."
        )


def _difference(expected: Sequence[TransactionMark], found: Sequence[TransactionMark]) -> str:
    missing = next((mark for mark in expected if mark not in found), None)
    if missing is not None:
        return f"does not send {_named(missing)} again"
    other = next((mark for mark in found if mark not in expected), None)
    return "sends other transactions as well" if other is None else f"sends {_named(other)}, which the lake does not have"


def _named(mark: TransactionMark) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=mark.committed_at)
    return f"transaction {mark.xid}, committed at {format_lsn(mark.commit_lsn)} on {moment:%Y-%m-%d at %H:%M:%S} UTC,"

"""Find the transaction and ordinal of each message in a batch, and whether the window includes it; all as vectors."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pgwal_pipeline.decode.frames import Frames
from pgwal_pipeline.decode.pgoutput import TruncateMessage, parse_truncate
from pgwal_pipeline.decode.vectors import Bytes, Ints, Mask
from pgwal_pipeline.values.xid import TransactionMark

BEGIN, COMMIT, INSERT, UPDATE, DELETE, TRUNCATE, RELATION, TYPE, ORIGIN, LOGICAL = b"BCIUDTRYOM"

MARKS: Final = 8
"""How many of a batch's last transactions are reported one by one."""

_KNOWN: Final = np.isin(np.arange(256), np.frombuffer(b"BCIUDTRYOM", np.uint8))
_OTHERS: Final = np.isin(np.arange(256), np.frombuffer(b"RYOM", np.uint8))
_ROWS: Final = np.isin(np.arange(256), np.frombuffer(b"IUD", np.uint8))
_EPOCH: Final = 946_684_800_000_000  # microseconds from 1970-01-01 to 2000-01-01, where Postgres's time starts
_LATEST: Final = (1 << 63) - 1 - _EPOCH  # microseconds since 2000; a later time, counted from 1970, exceeds 64 bits
_BEGIN_SIZE: Final = 21
_COMMIT_SIZE: Final = 26


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction whose Commit has not come yet. `changes` counts those that have; `committed_at` is in microseconds since 1970 UTC."""

    commit_lsn: int
    committed_at: int
    xid: int
    changes: int


@dataclass(frozen=True, slots=True)
class Transactions:
    """The transactions of a batch, one entry each. The first is the one left open by the batch before (zeros if there is none).

    `wanted`: whether the commit LSN is at or after the window's start.
    """

    commit_lsn: Ints
    committed_at: Ints
    xid: Ints
    wanted: Mask


@dataclass(frozen=True, slots=True)
class Route:
    """A batch of messages, up to the window's end.

    Per message: `kinds`, the byte that names its kind; `heads`, its first eight bytes as a number; `transaction`, the index of its
    transaction; `ordinals`, the ordinal of its first change, counting every change of the transaction from 0; `rows`, whether it changes
    one row and its transaction is wanted. `truncates`: the wanted Truncate messages by index. `committed` counts the wanted transactions
    that have a change and whose Commit is in the batch; `marks` are the last of them.
    """

    frames: Frames
    kinds: Bytes
    heads: Ints
    transaction: Ints
    ordinals: Ints
    rows: Mask
    truncates: dict[int, TruncateMessage]
    transactions: Transactions
    committed: int
    marks: tuple[TransactionMark, ...]
    last_commit_lsn: int
    last_commit_end_lsn: int | None
    opened: OpenTransaction | None
    passed_end: bool

    def others(self) -> list[int]:
        """Return the indices of messages that neither change rows nor begin or end a transaction."""
        return np.flatnonzero(_OTHERS[self.kinds]).tolist()

    def partitions(self, described: int | None) -> tuple[tuple[tuple[int, int], ...], int | None]:
        """Return pairs of a table and a partition (oids) whose rows are sent as the table's.

        The server describes a partition right before its first such row. `described` is the oid in the Relation message that the batch
        before ended with, None if it ended otherwise; the second result is the same for this batch.
        """
        if not len(self.kinds):
            return (), described
        is_relation, is_row = self.kinds == RELATION, _ROWS[self.kinds]
        at = np.flatnonzero(is_relation[:-1] & is_row[1:])
        pairs = list(zip(self._oids(at + 1), self._oids(at), strict=True))
        if described is not None and is_row[0]:
            pairs += [(self._oids(np.zeros(1, np.int64))[0], described)]
        last = self._oids(np.flatnonzero(is_relation[-1:]) + len(self.kinds) - 1)
        return tuple((table, partition) for table, partition in pairs if table != partition), last[0] if last else None

    def _oids(self, messages: Ints) -> list[int]:
        """Return the table's oid of each message, which must describe a table or change a row."""
        return (self.heads[messages] >> 24 & 0xFFFFFFFF).tolist()

    def is_wanted(self, message: int) -> bool:
        """Return whether a message belongs to a wanted transaction."""
        return bool(self.transactions.wanted[self.transaction[message]])

    def tables(self) -> list[int]:
        """Return the oids of the tables that have a wanted change in the batch."""
        emptied = {oid for message in self.truncates.values() for oid in message.relations}
        return sorted({*self._oids(np.flatnonzero(self.rows)), *emptied})

    def only(self, oid: int) -> "Route":
        """Return the same batch with only the changes of table `oid` wanted."""
        emptying = {index: message for index, message in self.truncates.items() if oid in message.relations}
        return replace(self, rows=self.rows & ((self.heads >> 24 & 0xFFFFFFFF) == oid), truncates=emptying)

    def xids(self) -> tuple[int | None, int | None]:
        """Return the smallest and the largest xid of the transactions with a wanted change in the batch; None if there are none."""
        changing = self.rows.copy()
        changing[list(self.truncates)] = True
        xids = self.transactions.xid[self.transaction[changing]]
        return (int(xids.min()), int(xids.max())) if len(xids) else (None, None)


def route(frames: Frames, opened: OpenTransaction | None, last_commit_lsn: int, start_lsn: int, end_lsn: int) -> Route:
    """Assign the messages of a batch to their transactions, dropping all from the first Begin with a commit LSN of at least `end_lsn`.

    `opened` is the transaction left open by the batch before, `last_commit_lsn` the commit LSN of the last Begin before. Raises DecodeError
    for messages that are not pgoutput's, or that do not follow each other as transactions do.
    """
    heads = frames.word(frames.starts)
    kinds = (heads >> 56).astype(np.uint8)
    end = _first_past(frames, kinds, end_lsn)
    _check_framing(frames, kinds, len(frames) if end is None else end + 1)
    beyond = frames
    if end is not None:
        frames, heads, kinds = frames.first(end), heads[:end], kinds[:end]

    is_begin, is_commit = kinds == BEGIN, kinds == COMMIT
    begins, commits = np.flatnonzero(is_begin), np.flatnonzero(is_commit)
    transaction = np.cumsum(is_begin)
    depth = transaction - np.cumsum(is_commit) + (opened is not None)
    _check_order(frames, kinds, opened is not None)
    still_open = bool(depth[-1]) if len(depth) else opened is not None
    if end is not None and still_open:
        raise beyond.message_error(end, "a transaction begins before the previous one has ended")
    transactions = _transactions(frames, begins, opened, start_lsn)
    _check_increasing(frames, begins, transactions, last_commit_lsn)
    commit_end_lsns = _check_commits(frames, commits, transactions, transaction[commits])

    rows = _ROWS[kinds]
    truncates = _truncates(frames, kinds)
    weights = rows.astype(np.int64)
    for index, message in truncates.items():
        weights[index] = len(message.relations)
    outside = (rows | (kinds == TRUNCATE)) & (depth == 0)
    if outside.any():
        raise frames.message_error(int(outside.argmax()), "it changes rows outside of a transaction")
    through = np.cumsum(weights)
    before = through - weights
    base = np.concatenate([[-opened.changes if opened else 0], before[begins]])
    wanted = transactions.wanted[transaction]
    changed = through[commits] > base[transaction[commits]]
    changes = int(through[-1] if len(through) else 0) - int(base[-1])
    return Route(
        frames=frames,
        kinds=kinds,
        heads=heads,
        transaction=transaction,
        ordinals=before - base[transaction],
        rows=rows & wanted,
        truncates={index: message for index, message in truncates.items() if wanted[index]},
        transactions=transactions,
        committed=int((changed & wanted[commits]).sum()),
        marks=_marks(transactions, transaction[commits][changed & wanted[commits]][-MARKS:]),
        last_commit_lsn=max(last_commit_lsn, int(transactions.commit_lsn[-1])),
        last_commit_end_lsn=int(commit_end_lsns[-1]) if len(commits) else None,
        opened=_last(transactions, changes) if still_open else None,
        passed_end=end is not None,
    )


def _marks(transactions: Transactions, chosen: Ints) -> tuple[TransactionMark, ...]:
    columns = (transactions.commit_lsn, transactions.xid, transactions.committed_at)
    return tuple(TransactionMark(*values) for values in zip(*(column[chosen].tolist() for column in columns), strict=True))


def _first_past(frames: Frames, kinds: Bytes, end_lsn: int) -> int | None:
    """Return the index of the first Begin of a transaction past the window's end; None if there is none."""
    begins = np.flatnonzero(kinds == BEGIN)
    past = frames.word(frames.starts[begins] + 1) >= end_lsn
    return int(begins[past.argmax()]) if past.any() else None


def _check_framing(frames: Frames, kinds: Bytes, count: int) -> None:
    """Check that the first `count` messages are of known kinds, and that Begin and Commit have the right size. Raises DecodeError."""
    sizes = (frames.ends - frames.starts)[:count]
    kinds = kinds[:count]
    wrong = (sizes == 0) | ~_KNOWN[kinds] | ((kinds == BEGIN) & (sizes != _BEGIN_SIZE)) | ((kinds == COMMIT) & (sizes != _COMMIT_SIZE))
    if not wrong.any():
        return
    index = int(wrong.argmax())
    if not sizes[index]:
        raise frames.message_error(index, "it has no payload")
    if not _KNOWN[kinds[index]]:
        raise frames.message_error(index, "pgoutput sends no message of this kind with our options")
    raise frames.message_error(index, "its size is wrong for its kind")


def _check_order(frames: Frames, kinds: Bytes, in_transaction: bool) -> None:
    """Check that Begin and Commit alternate. Raises DecodeError."""
    ends = np.flatnonzero((kinds == BEGIN) | (kinds == COMMIT))
    wrong = (kinds[ends] == BEGIN) != ((np.arange(len(ends)) + in_transaction) % 2 == 0)
    if wrong.any():
        index = int(ends[wrong.argmax()])
        begins = kinds[index] == BEGIN
        reason = "a transaction begins before the previous one has ended" if begins else "it ends a transaction that did not begin"
        raise frames.message_error(index, reason)


def _transactions(frames: Frames, begins: Ints, opened: OpenTransaction | None, start_lsn: int) -> Transactions:
    at = frames.starts[begins] + 1
    times = frames.word(at + 8)
    beyond = times > _LATEST
    if beyond.any():
        raise frames.message_error(int(begins[beyond.argmax()]), "its commit time is out of range")
    before = (opened.commit_lsn, opened.committed_at, opened.xid) if opened else (0, 0, 0)
    commit_lsn = np.concatenate([before[:1], frames.word(at)])
    committed_at = np.concatenate([before[1:2], times + _EPOCH])
    xid = np.concatenate([before[2:], frames.word(at + 16) >> 32 & 0xFFFFFFFF])
    return Transactions(commit_lsn, committed_at, xid, commit_lsn >= start_lsn)


def _check_increasing(frames: Frames, begins: Ints, transactions: Transactions, last_commit_lsn: int) -> None:
    """Check that transactions come in the order of their commits, each once. Raises DecodeError."""
    earlier = transactions.commit_lsn[:-1].copy()
    earlier[:1] = np.maximum(earlier[:1], last_commit_lsn)
    wrong = transactions.commit_lsn[1:] <= earlier
    if wrong.any():
        raise frames.message_error(int(begins[wrong.argmax()]), "its transaction is not in commit order")


def _check_commits(frames: Frames, commits: Ints, transactions: Transactions, transaction: Ints) -> Ints:
    """Check that each Commit matches its Begin, and return the end LSN of each commit record. Raises DecodeError."""
    at = frames.starts[commits] + 2
    lsn, end_lsn = frames.word(at), frames.word(at + 8)
    wrong = lsn != transactions.commit_lsn[transaction]
    wrong |= frames.word(at + 16) + _EPOCH != transactions.committed_at[transaction]
    wrong |= end_lsn <= lsn
    if wrong.any():
        raise frames.message_error(int(commits[wrong.argmax()]), "it does not match the Begin of its transaction")
    return end_lsn


def _truncates(frames: Frames, kinds: Bytes) -> dict[int, TruncateMessage]:
    truncates = {}
    for index in np.flatnonzero(kinds == TRUNCATE).tolist():
        try:
            truncates[index] = parse_truncate(frames.bytes_of(index))
        except ValueError as error:
            raise frames.message_error(index, str(error)) from None
    return truncates


def _last(transactions: Transactions, changes: int) -> OpenTransaction:
    return OpenTransaction(int(transactions.commit_lsn[-1]), int(transactions.committed_at[-1]), int(transactions.xid[-1]), changes)

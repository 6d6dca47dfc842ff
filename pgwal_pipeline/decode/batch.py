"""The decoder's face: replication messages, or a COPY's blocks, in; typed Arrow tables out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pgwal_pipeline.decode.changes import OPS, LargeRow, TableChanges, decode_changes
from pgwal_pipeline.decode.copy import decode_copy
from pgwal_pipeline.decode.frames import Frames, join
from pgwal_pipeline.decode.pgoutput import RelationMessage, parse_logical, parse_origin, parse_relation, parse_type
from pgwal_pipeline.decode.ragged import UnreadableError
from pgwal_pipeline.decode.relations import Describe, KnownRelations, Layout
from pgwal_pipeline.decode.route import LOGICAL, MARKS, ORIGIN, RELATION, TYPE, OpenTransaction, Route, route
from pgwal_pipeline.messages.errors import DecodeError, TableWorkFailed, row_too_large
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline.values.xid import TransactionMark

__all__ = ["OPS", "Decoded", "Decoder", "TableChanges", "decode_copy"]

_PARSERS: dict[int, Callable[[bytes], object]] = {TYPE: parse_type, ORIGIN: parse_origin, LOGICAL: parse_logical}


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one feed of messages held for the window.

    `changes`: the tables' rows; a table comes twice only when its definition changed in between. `transactions`: how many commits of the
    window's transactions with a change came. `changes_count`: changes of rows and tables emptied; a changed key counts once.
    `last_commit_end_lsn`: where the last commit record seen ends, of a skipped transaction too; None without any. `in_transaction`: a
    transaction is still open. `passed_end`: one with a commit LSN past the window came, so that the window has been seen whole.
    `relations`: definitions that the window's transactions showed new or changed, in order. `partitions`: tables and their partitions
    (oids) of which rows came as the table's. `min_xid`, `max_xid`: of the transactions with a row in `changes`. `marks`: the last of those
    that `transactions` counts.
    """

    changes: tuple[TableChanges, ...] = ()
    transactions: int = 0
    changes_count: int = 0
    last_commit_end_lsn: int | None = None
    in_transaction: bool = False
    passed_end: bool = False
    relations: tuple[Relation, ...] = ()
    partitions: tuple[tuple[int, int], ...] = ()
    max_xid: int | None = None
    min_xid: int | None = None
    marks: tuple[TransactionMark, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a decoder stands: what it goes on from when messages are fed again."""

    opened: OpenTransaction | None
    described: int | None
    last_commit_lsn: int
    passed_end: bool
    latest: Mapping[int, Layout | None]


class Decoder:
    """Decodes the messages of one replication connection for one window: transactions with `start_lsn <= commit LSN < end_lsn`.

    `describe` turns a Relation message into the table's definition, whose columns are the message's in the same order; None leaves the
    table's changes out (they keep their ordinals). Messages are the payloads of replication messages, in the order of the
    connection; how they are cut into feeds changes nothing in the rows. A feed that raised has changed nothing: it may be fed again,
    after `leave_out` where the error is about one table.
    """

    def __init__(self, describe: Describe, start_lsn: int, end_lsn: int, *, largest_row: int = 0) -> None:
        """`largest_row` is what a row may have that is said to be larger: see `feed`."""
        self._largest_row = largest_row
        self._start_lsn = start_lsn
        self._end_lsn = end_lsn
        self._known = KnownRelations(describe)
        self._opened: OpenTransaction | None = None
        self._described: int | None = None
        self._last_commit_lsn = 0
        self._passed_end = False

    def feed(self, messages: Sequence[bytes], positions: Sequence[int] = (), heads: Mapping[int, int] | None = None) -> Decoded:
        """Decode the next messages. Once the window's end was passed, whatever comes is ignored.

        `positions` are where they stand in the WAL, 0 for those that have no place; errors tell them. `heads` are those that were too
        large, of which only the head is here (`frames.heads_of_large`): the fault of their tables.

        Raises DecodeError, naming the position and where it can the table and column, for a message that cannot be read; TableWorkFailed
        for anything else that goes wrong with one table.
        """
        decoded: Decoded | None = None
        before = self.checkpoint()
        try:
            for frames in join(messages, positions, heads):
                if not self._passed_end:
                    part = self._decode(frames)
                    decoded = part if decoded is None else _together(decoded, part)
        except BaseException:
            self._return_to(before)
            raise
        return Decoded(in_transaction=self._opened is not None, passed_end=self._passed_end) if decoded is None else decoded

    @property
    def last_commit_lsn(self) -> int:
        """The commit LSN of the last transaction that began; 0 before the first."""
        return self._last_commit_lsn

    def end_after_this_transaction(self) -> int:
        """Have the window end behind the last transaction that began; its new end."""
        self._end_lsn = min(self._end_lsn, self._last_commit_lsn + 1)
        return self._end_lsn

    def checkpoint(self) -> Checkpoint:
        """Where the decoder stands between two feeds."""
        return Checkpoint(self._opened, self._described, self._last_commit_lsn, self._passed_end, self._known.latest())

    def next_window(self, end_lsn: int, checkpoint: Checkpoint | None = None) -> None:
        """Go on with the window that begins where this one ends.

        With `checkpoint`, which is from before the feed that passed the end, that feed is to be fed again; without, all of it was wanted.
        """
        if checkpoint is not None:
            self._return_to(checkpoint)
        self._start_lsn, self._end_lsn, self._passed_end = self._end_lsn, end_lsn, False

    def _return_to(self, checkpoint: Checkpoint) -> None:
        self._opened = checkpoint.opened
        self._described = checkpoint.described
        self._last_commit_lsn = checkpoint.last_commit_lsn
        self._passed_end = checkpoint.passed_end
        self._known.restore(dict(checkpoint.latest))

    def leave_out(self, oid: int) -> None:
        """Leave the changes of a table out from here on (they keep their ordinals)."""
        self._known.leave_out(oid)

    def relation(self, oid: int) -> Relation | None:
        """The table's definition as the stream described it last; None where it has not, or the table is left out."""
        return self._known.relation(oid)

    def _decode(self, frames: Frames) -> Decoded:
        routed = route(frames, self._opened, self._last_commit_lsn, self._start_lsn, self._end_lsn)
        relations = self._learn(routed)
        changes = self._changes(routed)
        partitions, self._described = routed.partitions(self._described)
        self._opened = routed.opened
        self._last_commit_lsn = routed.last_commit_lsn
        self._passed_end = routed.passed_end
        low, high = routed.xids()
        return Decoded(
            changes=changes,
            transactions=routed.committed,
            changes_count=sum(table.rows.num_rows - table.key_changes for table in changes),
            last_commit_end_lsn=routed.last_commit_end_lsn,
            in_transaction=routed.opened is not None,
            passed_end=routed.passed_end,
            relations=relations,
            partitions=partitions,
            max_xid=high,
            min_xid=low,
            marks=routed.marks,
        )

    def _changes(self, routed: Route) -> tuple[TableChanges, ...]:
        try:
            return decode_changes(routed, self._known)
        except (DecodeError, MemoryError):
            raise
        except LargeRow as large:
            relation = large.relation
            failure = row_too_large(relation.table, large.size, self._largest_row, relation.oid, "decode")
            raise TableWorkFailed(relation.oid, str(relation.table), "decode") from failure
        except Exception as error:
            relation = self._failing(routed)
            if relation is None:
                raise
            raise TableWorkFailed(relation.oid, str(relation.table), "decode") from error

    def _failing(self, routed: Route) -> Relation | None:
        """The first table whose changes alone cannot be decoded either."""
        for oid in routed.tables():
            try:
                decode_changes(routed.only(oid), self._known)
            except Exception:  # noqa: BLE001 - what it is was raised before, for all tables together
                return self._known.relation(oid)
        return None

    def _learn(self, routed: Route) -> tuple[Relation, ...]:
        """Read the messages that change no rows: definitions, and such as only need to be whole."""
        described: dict[int, RelationMessage] = {}
        for index in routed.others():
            payload = routed.frames.bytes_of(index)
            try:
                if payload[0] == RELATION:
                    described[index] = parse_relation(payload)
                else:
                    _PARSERS[payload[0]](payload)
            except ValueError as error:
                of_table = payload[0] == RELATION
                failed = routed.frames.table_error if of_table else routed.frames.message_error
                raise failed(index, str(error)) from None
        try:
            # One that came with a transaction before the window was told of there.
            return tuple(relation for index, relation in self._known.learn(described).items() if routed.is_wanted(index))
        except UnreadableError as error:
            raise routed.frames.table_error(error.index, error.reason) from None


def _together(one: Decoded, other: Decoded) -> Decoded:
    """What two feeds held that follow each other."""
    changes = list(one.changes)
    latest = {table.relation.oid: number for number, table in enumerate(changes)}
    for table in other.changes:
        number = latest.setdefault(table.relation.oid, len(changes))
        if number < len(changes) and changes[number].relation == table.relation:
            changes[number] = _sum(changes[number], table)
        else:
            latest[table.relation.oid] = len(changes)
            changes.append(table)
    return Decoded(
        changes=tuple(changes),
        transactions=one.transactions + other.transactions,
        changes_count=one.changes_count + other.changes_count,
        last_commit_end_lsn=one.last_commit_end_lsn if other.last_commit_end_lsn is None else other.last_commit_end_lsn,
        in_transaction=other.in_transaction,
        passed_end=other.passed_end,
        relations=one.relations + other.relations,
        partitions=one.partitions + other.partitions,
        max_xid=max((xid for xid in (one.max_xid, other.max_xid) if xid is not None), default=None),
        min_xid=min((xid for xid in (one.min_xid, other.min_xid) if xid is not None), default=None),
        marks=(one.marks + other.marks)[-MARKS:],
    )


def _sum(one: TableChanges, other: TableChanges) -> TableChanges:
    return replace(
        one,
        rows=pa.concat_tables([one.rows, other.rows]),
        inserts=one.inserts + other.inserts,
        updates=one.updates + other.updates,
        deletes=one.deletes + other.deletes,
        truncates=one.truncates + other.truncates,
        key_changes=one.key_changes + other.key_changes,
        unchanged=one.unchanged or other.unchanged,
    )

"""Decode batches of replication messages into typed Arrow tables; the decoder's interface, with `decode_copy` for blocks of a COPY."""

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
from pgwal_pipeline.values.protection import NO_PROTECTION, Protection
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline.values.xid import TransactionMark

__all__ = ["OPS", "Decoded", "Decoder", "TableChanges", "decode_copy"]

_PARSERS: dict[int, Callable[[bytes], object]] = {TYPE: parse_type, ORIGIN: parse_origin, LOGICAL: parse_logical}


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one batch of messages held for the window.

    `changes`: the tables' rows; a table comes twice only if its definition changed in between. `transactions`: how many transactions of the
    window that have a change were committed. `changes_count`: changed rows and truncated tables; a changed key counts once.
    `last_commit_end_lsn`: the end of the last commit record, also of a skipped transaction; None if there was no commit. `in_transaction`:
    whether a transaction is still open. `passed_end`: whether a transaction past the window's end came, so that the window is complete.
    `relations`: new or changed definitions from the window's transactions, in order. `partitions`: pairs of a table and a partition (oids)
    whose rows came as the table's. `min_xid`, `max_xid`: of the transactions with a row in `changes`. `marks`: the last of the transactions
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
    """A decoder's state between two batches, from which it can go on when messages are fed again."""

    opened: OpenTransaction | None
    described: int | None
    last_commit_lsn: int
    passed_end: bool
    latest: Mapping[int, Layout | None]


class Decoder:
    """Decodes the messages of one replication connection for one window: transactions with `start_lsn <= commit LSN < end_lsn`.

    `describe` turns a Relation message into the table's definition, whose columns are the message's in the same order, without those that
    `protection` leaves out. If it returns None, the table's changes are left out (they still count for ordinals). Messages are the payloads
    of replication messages, in the order of the connection; how they are cut into batches does not affect the rows. A call of `feed` that
    raised has changed nothing: the batch may be fed again, after `leave_out` if the error is about one table. An error shows no value of a
    table with protected columns.
    """

    def __init__(
        self, describe: Describe, start_lsn: int, end_lsn: int, *, largest_row: int = 0, protection: Protection = NO_PROTECTION
    ) -> None:
        """`largest_row` is the limit in bytes that the error for a message in `heads` names; see `feed`."""
        self._largest_row = largest_row
        self._start_lsn = start_lsn
        self._end_lsn = end_lsn
        self._known = KnownRelations(describe, protection)
        self._opened: OpenTransaction | None = None
        self._described: int | None = None
        self._last_commit_lsn = 0
        self._passed_end = False

    def feed(self, messages: Sequence[bytes], positions: Sequence[int] = (), heads: Mapping[int, int] | None = None) -> Decoded:
        """Decode the next batch of messages. Once the window's end has been passed, messages are ignored.

        `positions` are the messages' WAL positions, 0 for a message that has none; errors name them. `heads` are the messages that were too
        large and were cut to their heads (`frames.heads_of_large`): an error of their tables.

        Raises DecodeError for a message that cannot be read, naming the position and, if possible, the table and column; TableWorkFailed
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
        """End the window after the last transaction that began, and return the new end LSN."""
        self._end_lsn = min(self._end_lsn, self._last_commit_lsn + 1)
        return self._end_lsn

    def checkpoint(self) -> Checkpoint:
        """Return the decoder's state between two batches."""
        return Checkpoint(self._opened, self._described, self._last_commit_lsn, self._passed_end, self._known.latest())

    def next_window(self, end_lsn: int, checkpoint: Checkpoint | None = None) -> None:
        """Go on with the window that begins where this one ends, up to `end_lsn`.

        `checkpoint` is from before the batch that passed the old end, which must then be fed again. Omit it if the whole batch was wanted.
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
        """Leave the changes of a table out from here on (they still count for ordinals)."""
        self._known.leave_out(oid)

    def relation(self, oid: int) -> Relation | None:
        """Return the table's definition as the stream last described it; None if it has not, or if the table is left out."""
        return self._known.relation(oid)

    def _decode(self, frames: Frames) -> Decoded:
        frames = replace(frames, guards=self._known.guards)
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
        """Return the first table whose changes fail to decode on their own too; None if there is none."""
        for oid in routed.tables():
            try:
                decode_changes(routed.only(oid), self._known)
            except Exception:  # noqa: BLE001 - the caller has this error already, from decoding all tables together
                return self._known.relation(oid)
        return None

    def _learn(self, routed: Route) -> tuple[Relation, ...]:
        """Read the messages that change no rows: keep the definitions, and check that the others are well-formed."""
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
            # A definition from a transaction before the window belongs to an earlier window, which reported it.
            return tuple(relation for index, relation in self._known.learn(described).items() if routed.is_wanted(index))
        except UnreadableError as error:
            raise routed.frames.table_error(error.index, error.reason) from None


def _together(one: Decoded, other: Decoded) -> Decoded:
    """Combine the results of two consecutive batches."""
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

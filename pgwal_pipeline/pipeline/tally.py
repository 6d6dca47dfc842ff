"""Gather what a window's stream says besides the rows: numbers of transactions and bytes, marks, and stream facts."""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow.compute as pc

from pgwal_pipeline.decode.batch import Decoded, TableChanges
from pgwal_pipeline.decode.route import MARKS
from pgwal_pipeline.lake.records import TableWrite
from pgwal_pipeline.lake.stream_facts import Refusal, StreamFacts
from pgwal_pipeline.values.own_columns import OP, UNCHANGED, XID
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline.values.xid import TransactionMark


@dataclass(frozen=True)
class WindowRead:
    """A window that has been read: its files, which no commit names yet, and what they contain.

    `writes` has no change of the tables in `facts.refused`. `min_xid` and `max_xid` are the range of the 32-bit transaction ids of the
    changes, None if there are none. `marks` are the last transactions with a change. `seconds` has `drain`, `decode` and `write`.
    """

    start_lsn: int
    end_lsn: int
    writes: tuple[TableWrite, ...]
    facts: StreamFacts
    transactions: int
    bytes: int
    min_xid: int | None
    max_xid: int | None
    marks: tuple[TransactionMark, ...]
    seconds: dict[str, float]

    @property
    def changes(self) -> int:
        """The number of changes in `writes`; a key change, which has two rows, is one."""
        return changes_in(self.writes)


def changes_in(writes: Collection[TableWrite]) -> int:
    """Return the number of changes in the writes of a window; a key change, which has two rows, is one."""
    return sum(write.rows - write.key_changes for write in writes)


@dataclass
class Tally:
    """Gathers what the feeds of one window contain, besides the rows."""

    transactions: int = 0
    bytes: int = 0
    xids: list[int] = field(default_factory=list)
    marks: tuple[TransactionMark, ...] = ()
    relations: dict[Relation, None] = field(default_factory=dict)
    truncated: dict[int, set[int]] = field(default_factory=dict)
    refilled: set[int] = field(default_factory=set)
    partitions: dict[int, set[int]] = field(default_factory=dict)
    lacking: set[int] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=lambda: {"decode": 0.0, "write": 0.0})

    def add(self, decoded: Decoded) -> None:
        """Add one decoded feed."""
        self.transactions += decoded.transactions
        self.marks = (self.marks + decoded.marks)[-MARKS:]
        self.xids += [xid for xid in (decoded.min_xid, decoded.max_xid) if xid is not None]
        for relation in decoded.relations:
            self.relations.pop(relation, None)
            self.relations[relation] = None
        # The server describes a table once in a session, so perhaps in an earlier window.
        described = {changes.relation: None for changes in decoded.changes if changes.relation not in self.relations}
        self.relations = described | self.relations
        for table, partition in decoded.partitions:
            self.partitions.setdefault(table, set()).add(partition)
        for changes in decoded.changes:
            self._note(changes)

    def _note(self, changes: TableChanges) -> None:
        oid, op = changes.relation.oid, pc.field(OP)
        rows = changes.rows.select([OP, XID, UNCHANGED])
        if changes.truncates:
            self.truncated.setdefault(oid, set()).update(rows.filter(op == "T")[XID].to_pylist())
        if oid in self.truncated and oid not in self.refilled:
            written = rows.filter(op.isin(["I", "U"]))[XID].unique().to_pylist()
            self.refilled |= set() if self.truncated[oid].isdisjoint(written) else {oid}
        if changes.unchanged and changes.inserts and oid not in self.lacking:
            lacking = rows.filter((op == "I") & pc.field(UNCHANGED).is_valid())
            self.lacking |= {oid} if lacking.num_rows else set()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to `seconds` of `stage`."""
        started = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - started

    def read(
        self, start_lsn: int, end_lsn: int, writes: tuple[TableWrite, ...], refused: Mapping[str, Refusal], seconds: float
    ) -> WindowRead:
        """Return the window from `start_lsn` to `end_lsn` with what was gathered; reading it took `seconds`."""
        return WindowRead(
            start_lsn=start_lsn,
            end_lsn=end_lsn,
            writes=writes,
            facts=self._facts(refused),
            transactions=self.transactions,
            bytes=self.bytes,
            min_xid=min(self.xids, default=None),
            max_xid=max(self.xids, default=None),
            marks=self.marks,
            seconds={"drain": seconds, **self.seconds},
        )

    def _facts(self, refused: Mapping[str, Refusal]) -> StreamFacts:
        relations: dict[int, tuple[Relation, ...]] = {}
        for relation in self.relations:
            relations[relation.oid] = (*relations.get(relation.oid, ()), relation)
        return StreamFacts(
            relations=relations,
            truncated={oid: frozenset(xids) for oid, xids in self.truncated.items()},
            refilled=frozenset(self.refilled),
            partitions={oid: frozenset(oids) for oid, oids in self.partitions.items()},
            lacking=frozenset(self.lacking),
            refused=refused,
        )

"""What the ledger writes down, as plain frozen records.

LSNs are integers, times are aware datetimes in UTC, paths are absolute or full URIs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal

from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.xid import TransactionMark

WindowState = Literal["prepared", "complete", "pruned"]
State = Literal["pending", "snapshotting", "ready", "skipped", "gone", "error", "renamed"]


_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 3600.0  # seconds


def pause_after(failures: int) -> timedelta:
    """How long work for a table that failed `failures` times one after another is left alone: not at all at first, an hour at most."""
    return timedelta(seconds=0 if failures < 2 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures - 2, 20)))


@dataclass(frozen=True, slots=True)
class FileWrite:
    """A Parquet file that is written but that no Delta commit names yet.

    `path` is given from its Delta table's folder, `size` is in bytes, `stats` is what Delta keeps of a file: JSON with its rows, and the
    smallest and the largest values.
    """

    path: str
    size: int
    rows: int
    stats: str


@dataclass(frozen=True, slots=True)
class TableWrite:
    """What a window brings to one raw table: all that is needed to commit it, making or widening the Delta table included.

    `table` is the quoted name by then, `path` the raw table's address, `schema_json` the Delta schema its files have together. `rows` are
    those of raw; a key change is two of them, one `K` and one `U`. `unchanged` says whether any row left an unchanged TOAST value out.
    """

    table: str
    path: str
    schema_json: str
    files: tuple[FileWrite, ...] = ()
    rows: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    key_changes: int = 0
    unchanged: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """The changes of the transactions with `start_lsn <= commit LSN < end_lsn`, drained on one slot.

    `prepared`: the files are durable and named here, the raw tables may lack them still. `complete`: every raw table has them, and `tables`
    names no files any more. `pruned`: raw has them no longer; one such record may stand for several windows that follow one another. An
    empty window (`start_lsn == end_lsn`) is where a slot began. `bytes` is what the server sent, `seconds` is by stage, xids have 32 bits.
    `marks` are its last transactions with a change, in the order of their commits: a source that sends others there is not the same.
    """

    key: str
    slot: str
    start_lsn: int
    end_lsn: int
    state: WindowState
    transactions: int = 0
    changes: int = 0
    bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    min_xid: int | None = None
    max_xid: int | None = None
    marks: tuple[TransactionMark, ...] = ()
    tables: tuple[TableWrite, ...] = ()
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A backlog cut into windows that are read side by side and count together, once all of them have been read.

    They follow one another from `start_lsn` on and end at `ends`; a plan without any was given up. `ended` is what
    `pg_current_snapshot()` said when the last end was chosen.
    """

    start_lsn: int
    ends: tuple[int, ...]
    ended: str
    at: datetime | None = None

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each window."""
        return tuple(zip((self.start_lsn, *self.ends[:-1]), self.ends, strict=True))


@dataclass(frozen=True, slots=True)
class TableState:
    """Where one table stands. In the ledger a name that a table had before stands as `renamed`.

    `generation` is the snapshot in force, `reading` the one under way, `published` the one that `current` is built on. The table may be
    read once every transaction older than `joined_xid` (64 bits) has ended, and published once the frontier has passed `required_lsn`.
    `storage` is how the table was stored at the last look, `dropped` the columns that are gone since.
    `kept_as` is its location in the lake, None where that is its name, and `earlier` are the oids of tables that stood there before it.

    Of a table in `error`, `stage` is the work that failed (`lake.faults.STAGES`), `gap_lsn` where its changes begin to be missing from raw,
    None where raw has them all, `failures` how often the work failed one after another, and `retry_at` from when on it may be tried again
    by itself. `rereads` counts how often it was read again by itself for an error (PGWAL_ON_TABLE_ERROR). `raw_from` is
    the LSN from which on raw has the table's changes whole; 0 where it always had.
    """

    table: TableName
    oid: int
    state: State
    reason: str | None = None
    key: tuple[str, ...] = ()
    relation: Relation | None = None
    generation: str | None = None
    reading: str | None = None
    published: str | None = None
    joined_xid: int | None = None
    required_lsn: int | None = None
    storage: Storage | None = None
    dropped: tuple[str, ...] = ()
    kept_as: TableName | None = None
    earlier: tuple[int, ...] = ()
    stage: str | None = None
    gap_lsn: int | None = None
    failures: int = 0
    retry_at: datetime | None = None
    rereads: int = 0
    raw_from: int = 0
    at: datetime | None = None

    def __post_init__(self) -> None:
        if self.kept_as == self.table:
            object.__setattr__(self, "kept_as", None)

    @property
    def location(self) -> TableName:
        """What its Delta tables are called in the lake: the name under which it was first met, as a rule."""
        return self.kept_as or self.table

    @property
    def followed(self) -> bool:
        """Whether the table's changes are wanted: it is published, and nothing speaks against it."""
        return self.state not in ("skipped", "gone")

    @property
    def left_out(self) -> bool:
        """Whether the drain leaves the table's changes out: it could not take them once, and the table has a gap since."""
        return self.state == "error" and self.gap_lsn is not None

    @property
    def barred(self) -> bool:
        """Whether the role may not read the table, as far as the last attempt found; raw has its changes."""
        return self.state == "error" and self.stage == "access" and not self.left_out

    def due(self, now: datetime) -> bool:
        """Whether work that failed may be tried again by now."""
        return self.retry_at is not None and self.retry_at <= now

    def failed(self, stage: str, reason: str, now: datetime) -> "TableState":
        """The table in `error`. What is tried again by itself is so at once the next time, then with pauses that grow."""
        failures = self.failures + 1
        return replace(self, state="error", stage=stage, reason=reason, failures=failures, retry_at=now + pause_after(failures))

    def with_gap(self, stage: str, reason: str, lsn: int) -> "TableState":
        """The table in `error`, its changes left out of raw from `lsn` on: it has to be read again before it can be published."""
        gap = lsn if self.gap_lsn is None else min(lsn, self.gap_lsn)
        unread = replace(self, generation=None, reading=None, published=None, gap_lsn=gap)
        return unread.failed(stage, reason, datetime.now(UTC))

    def mended(self) -> "TableState":
        """The same without any trace of an error; its state is for the caller to set."""
        return replace(self, reason=None, stage=None, gap_lsn=None, failures=0, retry_at=None)

    @property
    def is_read(self) -> bool:
        """Whether some of the table's rows have been read already."""
        return self.generation is not None or self.reading is not None

    def called(self, name: TableName) -> "TableState":
        """The same table under another name; where it stands in the lake stays."""
        relation = None if self.relation is None else replace(self.relation, table=name)
        return replace(self, table=name, kept_as=self.location, relation=relation)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One range of a table's key in a snapshot, `lower < key <= upper`; a bound has the key's columns as Postgres's text, or is None.

    `table` is the table's location in the lake, which its name was as a rule.

    Two equal bounds are a key that is read again by itself (`single`). Of a table without a key it is a range of row addresses.

    `attempt` is None until the range has been read; only the snapshot rows of that attempt count. `snapshot` is what
    `pg_current_snapshot()` said in the reading transaction, `insert_lsn` the WAL's end after it; `bytes` came from the server.
    """

    table: TableName
    generation: str
    chunk: int
    lower: tuple[str, ...] | None = None
    upper: tuple[str, ...] | None = None
    attempt: str | None = None
    rows: int = 0
    bytes: int = 0
    snapshot: str | None = None
    insert_lsn: int | None = None
    at: datetime | None = None

    @property
    def single(self) -> bool:
        """Whether it is one key."""
        return self.lower is not None and self.lower == self.upper


@dataclass(frozen=True, slots=True)
class TablePointer:
    """A version of a Delta table."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Publish:
    """The LSN at which all of `current` stands, with the Delta version of each table."""

    lsn: int
    published_at: datetime
    tables: Mapping[TableName, TablePointer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """The database that a lake is built from, and by which publication and slot.

    `publication_oid` is 0 while it is not known.
    """

    system_identifier: int
    timeline: int
    database_oid: int
    database: str
    publication: str
    slot: str
    publication_oid: int = 0


def relation_to_json(relation: Relation) -> str:
    """`relation` as JSON text that `relation_from_json` reads back equal."""
    return json.dumps(asdict(relation), ensure_ascii=False)


@lru_cache(maxsize=4096)  # each write of the ledger reads those of all tables
def relation_from_json(text: str) -> Relation:
    """The relation that `relation_to_json` wrote, with the defaults for fields it did not know yet and without those it knew alone."""
    found = json.loads(text)
    columns = tuple(Column(**_known(Column, column, type=_type_from(column["type"]))) for column in found["columns"])
    return Relation(**_known(Relation, found, table=TableName(**found["table"]), columns=columns, key=tuple(found["key"])))


def _type_from(found: Mapping[str, Any]) -> PgType:
    element = found.get("element")
    return PgType(**_known(PgType, found, element=None if element is None else _type_from(element)))


def _known(record: type, found: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    return {name.name: found[name.name] for name in fields(record) if name.name in found} | changed

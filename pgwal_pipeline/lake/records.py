"""The ledger's records, as frozen dataclasses.

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
from pgwal_pipeline.values.table_options import PROPAGATE
from pgwal_pipeline.values.xid import TransactionMark

WindowState = Literal["prepared", "complete", "pruned"]
State = Literal["pending", "snapshotting", "ready", "skipped", "gone", "error", "renamed"]


_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 3600.0  # seconds


def pause_after(failures: int) -> timedelta:
    """Return the pause before work for a table is tried again after `failures` failures in a row: none after the first, at most an hour."""
    return timedelta(seconds=0 if failures < 2 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures - 2, 20)))


FORMAT = 2
"""The form of the ledger that this version writes. A version refuses a lake of a later form, which may hold what it would overlook."""


@dataclass(frozen=True, slots=True)
class FileWrite:
    """A Parquet file that is written but not yet named by a Delta commit.

    `path` is relative to its Delta table's folder, `size` is in bytes. `stats` are Delta's file statistics: JSON with the number of rows
    and the smallest and largest values.
    """

    path: str
    size: int
    rows: int
    stats: str


@dataclass(frozen=True, slots=True)
class TableWrite:
    """One table's part of a window: all that is needed to commit it to raw, and to create the raw table or add columns to it.

    `table` is the quoted name at that time, `path` the raw table's path, `schema_json` the Delta schema that its files have together.
    `rows` counts rows of raw: a key change is two, one `K` and one `U`. `unchanged`: whether any row leaves out an unchanged TOAST value.
    `newest_lsn` and `newest_at` are the newest commit LSN and commit time (microseconds since 1970 UTC) of its rows; 0 if not known.
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
    newest_lsn: int = 0
    newest_at: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The changes of the transactions with `start_lsn <= commit LSN < end_lsn`, drained on one slot.

    `prepared`: the files are durable and named here; the raw tables may still lack them. `complete`: every raw table has them, and `tables`
    names no files any more. `pruned`: raw no longer has them; one such record may stand for several windows that follow one another. An
    empty window (`start_lsn == end_lsn`) is where a slot began. `bytes` is what the server sent, `seconds` are by stage, xids have 32 bits.
    `marks` are its last transactions with a change, in commit order: a source that sends other transactions there is not the same source.
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
    """A backlog cut into windows that are read side by side. They count together, once all of them have been read.

    They follow one another from `start_lsn` on and end at `ends`; a plan with no `ends` was given up. `ended` is the result of
    `pg_current_snapshot()` when the last end was chosen.
    """

    start_lsn: int
    ends: tuple[int, ...]
    ended: str
    at: datetime | None = None

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Start and end LSN of each window."""
        return tuple(zip((self.start_lsn, *self.ends[:-1]), self.ends, strict=True))


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """What the ledger knows of a table's history, which is in the lake from LSN `since` on.

    `stopped` is the LSN at which it stands since the option was taken away. `gaps`, pairs of LSNs, are such times of which raw did not have
    every change later. `reason` says why it is behind its table, `failures` how often its work failed in a row, and `retry_at` when it is
    tried again.
    """

    since: int
    stopped: int | None = None
    gaps: tuple[tuple[int, int], ...] = ()
    reason: str | None = None
    failures: int = 0
    retry_at: datetime | None = None

    def to_json(self) -> str:
        """Return it as JSON text, which `from_json` turns back into an equal record."""
        return json.dumps(asdict(self) | {"retry_at": None if self.retry_at is None else self.retry_at.isoformat()})

    @classmethod
    def from_json(cls, text: str) -> "KeptHistory":
        """Return what any version of `to_json` wrote."""
        found = json.loads(text)
        at = found.get("retry_at")
        gaps = tuple((start, end) for start, end in found.get("gaps", ()))
        return cls(**_known(cls, found, gaps=gaps, retry_at=None if at is None else datetime.fromisoformat(at)))

    def failed(self, reason: str, now: datetime) -> "KeptHistory":
        """Return it after its work failed."""
        failures = self.failures + 1
        return replace(self, reason=reason, failures=failures, retry_at=now + pause_after(failures))

    def due(self, now: datetime) -> bool:
        """Return whether work that failed may be tried again at `now`."""
        return self.retry_at is None or self.retry_at <= now

    def going_on(self, lsn: int, *, compared: bool) -> "KeptHistory":
        """Return it after it was brought to `lsn`. What happened while it was stopped is a gap if it was `compared` with a reading."""
        gap = self.stopped is not None and compared
        return KeptHistory(self.since, gaps=(*self.gaps, (self.stopped or 0, lsn)) if gap else self.gaps)


@dataclass(frozen=True, slots=True)
class TableState:
    """The state of one table. A name that a table had before has a record of its own in the ledger, with state `renamed`.

    `generation` is the snapshot in force, `reading` the one being read, `published` the one that `current` is built on. The table may be
    read once every transaction older than `joined_xid` (64 bits) has ended, and published once the frontier has passed `required_lsn`.
    `storage` is how the table was stored in its last catalog entry, `dropped` are the columns dropped since. `kept_as` is its location in
    the lake, None if that is its name; `earlier` are the oids of tables that had that location before it.

    For a table in `error`: `stage` is the work that failed (`lake.faults.STAGES`), `gap_lsn` is where its changes begin to be missing from
    raw (None if raw has them all), `failures` is how often the work failed in a row, and `retry_at` is when it may be tried again
    automatically. `rereads` counts how often it was read again automatically for an error (PGWAL_ON_TABLE_ERROR). From LSN `raw_from` on
    raw has all of the table's changes; 0 if it always had. `unclean` are the layers that may still have values from before the options of
    tables protected them. `options` are the table's options in force, as JSON, None if it has none.
    `history` is what is known of its history, None if it has none.

    `accepted` is the definition that a table keeps whose option `on_schema_change` is `freeze` or `stop`, None if it takes each change.
    `held` says why such a table is left out of publishes, and what to do; None if it is not. Its changes go to raw meanwhile.
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
    unclean: tuple[str, ...] = ()
    options: str | None = None
    history: KeptHistory | None = None
    accepted: Relation | None = None
    held: str | None = None
    at: datetime | None = None

    def __post_init__(self) -> None:
        if self.kept_as == self.table:
            object.__setattr__(self, "kept_as", None)

    @property
    def location(self) -> TableName:
        """The table's location in the lake, as a name: usually the name that the table had first."""
        return self.kept_as or self.table

    @property
    def followed(self) -> bool:
        """Whether the pipeline takes the table's changes: it is in the publication and not skipped."""
        return self.state not in ("skipped", "gone")

    @property
    def left_out(self) -> bool:
        """Whether the drain leaves out the table's changes: it is in `error` and has a gap."""
        return self.state == "error" and self.gap_lsn is not None

    def option(self, name: str) -> Any:
        """Return one of the table's options in force, None if it is not set."""
        return None if self.options is None else json.loads(self.options).get(name)

    @property
    def policy(self) -> str:
        """What a change of the table's columns leads to, by its options in force (`on_schema_change`)."""
        return self.option("on_schema_change") or PROPAGATE

    @property
    def trouble(self) -> str | None:
        """Why the table is left out of publishes, for it is in `error` or held back; None if it is neither."""
        failed = (self.reason or "No reason was given.") if self.state == "error" else None
        return " ".join(filter(None, (failed, f"Table {self.table}: {self.held}." if self.held else None))) or None

    @property
    def barred(self) -> bool:
        """Whether the role was not allowed to read the table at the last attempt; raw has its changes."""
        return self.state == "error" and self.stage == "access" and not self.left_out

    def due(self, now: datetime) -> bool:
        """Return whether work that failed may be tried again at `now`."""
        return self.retry_at is not None and self.retry_at <= now

    def failed(self, stage: str, reason: str, now: datetime) -> "TableState":
        """Return the table in `error`. The first automatic retry may come at once, later ones after pauses that grow."""
        failures = self.failures + 1
        return replace(self, state="error", stage=stage, reason=reason, failures=failures, retry_at=now + pause_after(failures))

    def with_gap(self, stage: str, reason: str, lsn: int) -> "TableState":
        """Return the table in `error` with a gap in raw from `lsn` on: it has to be read again before it can be published."""
        gap = lsn if self.gap_lsn is None else min(lsn, self.gap_lsn)
        unread = replace(self, generation=None, reading=None, published=None, gap_lsn=gap)
        return unread.failed(stage, reason, datetime.now(UTC))

    def without_error(self) -> "TableState":
        """Return the table without any trace of an error. The caller has to set its state."""
        return replace(self, reason=None, stage=None, gap_lsn=None, failures=0, retry_at=None)

    def cleaned(self, layer: str) -> "TableState":
        """Return the table without `layer` among those that are unclean."""
        return replace(self, unclean=tuple(other for other in self.unclean if other != layer))

    @property
    def is_read(self) -> bool:
        """Whether a snapshot of the table has been read or is being read."""
        return self.generation is not None or self.reading is not None

    def called(self, name: TableName) -> "TableState":
        """Return the same table under another name; its location in the lake does not change."""
        relation = None if self.relation is None else replace(self.relation, table=name)
        accepted = None if self.accepted is None else replace(self.accepted, table=name)
        return replace(self, table=name, kept_as=self.location, relation=relation, accepted=accepted)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One range of a table's key in a snapshot, `lower < key <= upper`; a bound has the key's columns as Postgres's text, or is None.

    `table` is the table's location in the lake. Two equal bounds mean one key that is read again by itself (`single`). For a table without
    a key the range is one of row addresses (`ctid`).

    `attempt` is None until the range has been read; only the snapshot rows of that attempt count. `snapshot` is the result of
    `pg_current_snapshot()` in the reading transaction, `insert_lsn` the WAL insert LSN after it, `bytes` is what the server sent.
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
        """Whether the range is one key."""
        return self.lower is not None and self.lower == self.upper


@dataclass(frozen=True, slots=True)
class TablePointer:
    """A version of a Delta table."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Publish:
    """The LSN that all `current` tables stand at, with the Delta version of each, and of the histories of those that have one."""

    lsn: int
    published_at: datetime
    tables: Mapping[TableName, TablePointer] = field(default_factory=dict)
    histories: Mapping[TableName, TablePointer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Registration:
    """What the catalog of PGWAL_SPARK_CATALOG has of the table at `location`.

    `name` is its entry there, None if there is none. `target` tells that catalog from any other, `tried` what was wanted when it was last
    tried (the name and what the table was built on), and `comments` which comments; all three are digests. `error` says why the last try
    failed, `failures` how often it did in a row, and `retry_at` when it is tried again.
    """

    location: TableName
    name: str | None
    target: str
    tried: str
    comments: str | None = None
    error: str | None = None
    failures: int = 0
    retry_at: datetime | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """How far the `current` table at `location` is proven to equal its source.

    Every transaction with a commit LSN below `verified_through` is (None before the whole table was compared once), and at `proven_at` the
    last round was done in which every row was compared. A table that is compared in parts is in a round: `round_lsn` is where that began,
    and keys up to `cursor` have been compared (Postgres's texts, None at the round's beginning). All that is of the table as it was built
    on the snapshot `generation`. `rows` were compared in `seconds` last.
    """

    location: TableName
    generation: str | None = None
    verified_through: int | None = None
    proven_at: datetime | None = None
    round_lsn: int | None = None
    cursor: tuple[str, ...] | None = None
    rows: int = 0
    seconds: float = 0.0
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The database that a lake is built from, with the publication and the slot.

    `publication_oid` is 0 while it is unknown. `format` is the FORMAT of the newest version of the pipeline that has worked on the lake.
    """

    system_identifier: int
    timeline: int
    database_oid: int
    database: str
    publication: str
    slot: str
    publication_oid: int = 0
    format: int = 1


def relation_to_json(relation: Relation) -> str:
    """Return `relation` as JSON text, which `relation_from_json` turns back into an equal relation."""
    return json.dumps(asdict(relation), ensure_ascii=False)


@lru_cache(maxsize=4096)  # each write of the ledger reads those of all tables
def relation_from_json(text: str) -> Relation:
    """Return the relation that any version of `relation_to_json` wrote: missing fields get their defaults, unknown ones are ignored."""
    found = json.loads(text)
    columns = tuple(Column(**_known(Column, column, type=_type_from(column["type"]))) for column in found["columns"])
    return Relation(**_known(Relation, found, table=TableName(**found["table"]), columns=columns, key=tuple(found["key"])))


def _type_from(found: Mapping[str, Any]) -> PgType:
    element = found.get("element")
    return PgType(**_known(PgType, found, element=None if element is None else _type_from(element)))


def _known(record: type, found: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    return {name.name: found[name.name] for name in fields(record) if name.name in found} | changed

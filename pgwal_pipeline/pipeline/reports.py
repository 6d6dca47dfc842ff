"""What a drain, a snapshot, a publish and a verification did, as numbers.

Each report turns into JSON that a Dagster run carries as metadata; `RunReport` joins those of one command into the object that
`pgwal … --json` prints. LSNs stand as `X/Y` text in JSON and as plain integers here; sizes are bytes, times are seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName

STAGES: tuple[str, ...] = ("drain", "decode", "write", "snapshot", "session", "publish")
"""The stages that are timed, in the order in which they stand in JSON."""


def _rounded(seconds: float) -> float:
    return round(float(seconds), 3)


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()


@dataclass(frozen=True, slots=True)
class TableCounts:
    """What one table got in a drain. `rows` are those written to raw: a key change writes two, its `K` and its `U`, and counts in both."""

    rows: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    key_changes: int = 0

    def __add__(self, other: "TableCounts") -> "TableCounts":
        return TableCounts(
            self.rows + other.rows,
            self.inserts + other.inserts,
            self.updates + other.updates,
            self.deletes + other.deletes,
            self.truncates + other.truncates,
            self.key_changes + other.key_changes,
        )

    def to_json(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One window: commit LSNs `start_lsn <= x < end_lsn`, drained.

    `transactions` are those that held a change, `changes` counts a key change once, `bytes` is what the walsender sent. `seconds` has a
    number for each of `drain`, `decode` and `write`. `tables` has the counts of the tables that changed in this window.
    """

    key: str
    start_lsn: int
    end_lsn: int
    transactions: int
    changes: int
    bytes: int
    seconds: Mapping[str, float]
    tables: Mapping[TableName, TableCounts] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The window as `--json` shows it; `seconds` is the time of the whole drain."""
        return {
            "key": self.key,
            "start_lsn": format_lsn(self.start_lsn),
            "end_lsn": format_lsn(self.end_lsn),
            "transactions": self.transactions,
            "changes": self.changes,
            "bytes": self.bytes,
            "seconds": _rounded(self.seconds.get("drain", 0.0)),
        }


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What one drain did: the windows in the order of their LSNs, none when there was nothing to read.

    `tables` has every published table, idle ones with zeros. `lag_before` and `lag_after` are bytes between the slot's confirmed position
    and the source's last flushed one.
    """

    windows: tuple[WindowReport, ...]
    tables: Mapping[TableName, TableCounts]
    warnings: tuple[str, ...] = ()
    lag_before: int = 0
    lag_after: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        """Changes of all windows; a key change counts once."""
        return sum(window.changes for window in self.windows)

    def to_json(self) -> dict[str, Any]:
        """The drain as its run carries it: what `--json` shows, and besides it the lag and the counts of the tables that have rows."""
        return {
            "windows": [window.to_json() for window in self.windows],
            "changes": self.changes,
            "tables": {str(name): counts.to_json() for name, counts in sorted(self.tables.items()) if counts.rows},
            "lag_before": self.lag_before,
            "lag_after": self.lag_after,
            "warnings": list(self.warnings),
            "seconds": {stage: _rounded(self.seconds.get(stage, 0.0)) for stage in ("drain", "decode", "write")},
        }


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One table, read whole. `seconds` from its first chunk's read to its last one's write; `started` is that read's Unix time."""

    table: TableName
    rows: int
    bytes: int
    chunks: int
    seconds: float
    started: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The snapshot as `--json` shows it."""
        return {"table": str(self.table), "rows": self.rows, "chunks": self.chunks, "seconds": _rounded(self.seconds)}


@dataclass(frozen=True, slots=True)
class SnapshotsReport:
    """The tables that were read, and those that could not be begun: `blocked` says for each which old transactions it waits for."""

    tables: tuple[SnapshotReport, ...]
    warnings: tuple[str, ...] = ()
    blocked: Mapping[TableName, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first read to the last write of them all."""
        if not self.tables:
            return 0.0
        return max(table.started + table.seconds for table in self.tables) - min(table.started for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """The part that a snapshot run adds to a command's JSON."""
        return {
            "snapshots": [table.to_json() for table in self.tables],
            "warnings": list(self.warnings),
            "unread": {str(table): reason for table, reason in self.blocked.items()},
            "seconds": {"snapshot": _rounded(self.seconds)},
        }


@dataclass(frozen=True, slots=True)
class TablePublish:
    """Where a table's `current` stands: the Delta table and the version that belongs to the publish.

    `version` is None for a table that was never published; `rows_changed` is None where Spark does not tell. `errors` says why the table
    was left where it is; empty for one that was published.
    """

    path: str
    version: int | None
    rows_changed: int | None = None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishReport:
    """All of `current` at one LSN. `lsn` and `published_at` are None where nothing has ever been published.

    `seconds` has `session`, the start of Spark, and `publish`, everything else.
    """

    lsn: int | None
    published_at: datetime | None
    tables: Mapping[TableName, TablePublish]
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any] | None:
        """The publish as `pgwal as-of --json` shows it; None before the first one."""
        if self.lsn is None:
            return None
        return {
            "lsn": format_lsn(self.lsn),
            "published_at": _iso(self.published_at),
            "tables": {
                str(name): {"path": table.path, "version": table.version}
                for name, table in sorted(self.tables.items())
                if table.version is not None
            },
        }

    @property
    def errors(self) -> dict[str, str]:
        """The tables that could not be published, by quoted name, each with its reason."""
        return {str(name): "; ".join(table.errors) for name, table in sorted(self.tables.items()) if table.errors}


def publish_json(report: PublishReport) -> dict[str, Any]:
    """The part that a publish run adds to the JSON of a command."""
    return {
        "publish": report.to_json(),
        "errors": report.errors,
        "warnings": list(report.warnings),
        "seconds": {stage: _rounded(report.seconds.get(stage, 0.0)) for stage in ("session", "publish")},
    }


@dataclass(frozen=True, slots=True)
class TableComparison:
    """A table of the source against its `current`. `rows` is the source's count; a row with another value counts in `different` alone."""

    equal: bool
    rows: int
    missing: int
    extra: int
    different: int

    def to_json(self) -> dict[str, Any]:
        """The numbers as `--json` shows them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Source and `current` compared at `lsn`. `drain` and `publish` are what had to be done to bring `current` there.

    `errors` says of tables that could not be compared why.
    """

    lsn: int
    equal: bool
    tables: Mapping[TableName, TableComparison]
    drain: DrainReport | None = None
    publish: PublishReport | None = None
    errors: Mapping[TableName, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The comparison as `--json` shows it."""
        return {
            "lsn": format_lsn(self.lsn),
            "equal": self.equal,
            "tables": {str(name): comparison.to_json() for name, comparison in sorted(self.tables.items())},
        }


@dataclass(frozen=True, slots=True)
class LagReading:
    """How far the slot stands behind its source: one cheap reading, nothing decoded.

    `lag_bytes` is `flush_lsn - confirmed_flush_lsn`, and 0 without a slot. `snapshot` is `pg_current_snapshot()` as text and `insert_lsn`
    the insert position (the replay position on a standby) read *after* it. So once the slot is confirmed at or past `insert_lsn`, and for
    as long as the text stays the same, no transaction that wrote anything can be unread: checkpoints and our own reading move the LSN, but
    not the snapshot. `publish_due`: raw or a snapshot holds something that the newest publish does not.
    """

    slot_exists: bool
    lag_bytes: int
    confirmed_flush_lsn: int | None
    flush_lsn: int
    insert_lsn: int
    snapshot: str
    publish_due: bool = False
    active_pid: int | None = None
    wal_status: str | None = None
    safe_wal_size: int | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """One command's outcome, joined from the JSON that its steps left.

    `errors` maps the quoted name of a table that could not be published to its reason, `unread` that of a table that still waits for old
    transactions to end; they stand beside what `to_json` prints.
    """

    windows: tuple[Mapping[str, Any], ...] = ()
    snapshots: tuple[Mapping[str, Any], ...] = ()
    publish: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Iterable[Mapping[str, Any]]) -> "RunReport":
        """Put the steps' JSON together, in the order in which they ran: seconds add up, the last publish stands."""
        windows: list[Mapping[str, Any]] = []
        snapshots: list[Mapping[str, Any]] = []
        warnings: dict[str, None] = {}
        seconds = dict.fromkeys(STAGES, 0.0)
        publish: Mapping[str, Any] | None = None
        errors: Mapping[str, str] = {}
        unread: dict[str, str] = {}
        for part in parts:
            for snapshot in part.get("snapshots", ()):
                unread.pop(snapshot["table"], None)  # it waited, and has been read since
            unread.update(part.get("unread", {}))
            windows.extend(part.get("windows", ()))
            snapshots.extend(part.get("snapshots", ()))
            warnings.update(dict.fromkeys(part.get("warnings", ())))
            if "publish" in part:
                publish, errors = part["publish"] or publish, part.get("errors", {})
            for stage, spent in part.get("seconds", {}).items():
                seconds[stage] = seconds.get(stage, 0.0) + spent
        return cls(tuple(windows), tuple(snapshots), publish, tuple(warnings), errors, seconds, unread)

    def to_json(self, total_seconds: float) -> dict[str, Any]:
        """The object that `sync`, `drain`, `publish` and `resnapshot` print with `--json`; `total_seconds` is the whole command's time."""
        return {
            "windows": [dict(window) for window in self.windows],
            "changes": sum(window["changes"] for window in self.windows),
            "snapshots": [dict(snapshot) for snapshot in self.snapshots],
            "publish": self.publish,
            "warnings": list(self.warnings),
            "seconds": {stage: _rounded(self.seconds.get(stage, 0.0)) for stage in STAGES} | {"total": _rounded(total_seconds)},
        }

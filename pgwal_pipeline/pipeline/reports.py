"""Reports of what a drain, a snapshot, a publish and a verification did.

Each report has a JSON form that becomes metadata of a Dagster run. `RunReport` joins those of one command into the object that
`pgwal … --json` prints. LSNs are integers here and `X/Y` text in JSON; sizes are bytes, times are seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pgwal_pipeline.lake.records import TableWrite

STAGES: tuple[str, ...] = ("drain", "decode", "write", "snapshot", "session", "publish")
"""The stages that are timed, in the order that they have in JSON."""


def _rounded(seconds: float) -> float:
    return round(float(seconds), 3)


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()


@dataclass(frozen=True, slots=True)
class TableCounts:
    """One table's changes in a drain. `rows` are those written to raw: two for a key change, its `K` and its `U`."""

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
        """Return the counts by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NewestCommit:
    """A table's newest commit among some changes: its LSN, and its time by the source's clock, None if not known."""

    lsn: int
    at: datetime | None

    @classmethod
    def of(cls, writes: "Iterable[TableWrite]") -> "NewestCommit | None":
        """Return the newest commit of the table whose changes are in `writes`; None if none is known."""
        found = [(write.newest_lsn, write.newest_at) for write in writes if write.newest_lsn]
        if not found:
            return None
        at = max(at for _, at in found)
        return cls(max(lsn for lsn, _ in found), datetime.fromtimestamp(0, UTC) + timedelta(microseconds=at) if at else None)


@dataclass(frozen=True, slots=True)
class WindowReport:
    """A window that was drained: the transactions with `start_lsn <= commit LSN < end_lsn`.

    `transactions` is how many had a change, `changes` how many changes there were (a key change is one), `bytes` how much the walsender
    sent. `seconds` is by stage: `drain`, `decode` and `write`. `tables` has only the tables with changes in this window, `newest` their
    newest commits. `at` is when the window was committed to raw, None if not known.
    """

    key: str
    start_lsn: int
    end_lsn: int
    transactions: int
    changes: int
    bytes: int
    seconds: Mapping[str, float]
    tables: Mapping[TableName, TableCounts] = field(default_factory=dict)
    newest: Mapping[TableName, NewestCommit] = field(default_factory=dict)
    at: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the window as `--json` shows it; its `seconds` is the time of the stage `drain`."""
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
    """What one drain did: the windows in the order of their LSNs, none if there was nothing to read.

    `tables` has every published table, also those without changes. `lag_before` and `lag_after` are bytes between the slot's confirmed
    LSN and the source's flush LSN.
    """

    windows: tuple[WindowReport, ...]
    tables: Mapping[TableName, TableCounts]
    warnings: tuple[str, ...] = ()
    lag_before: int = 0
    lag_after: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        """The number of changes in all windows; a key change is one."""
        return sum(window.changes for window in self.windows)

    def to_json(self) -> dict[str, Any]:
        """Return the report as metadata of a run: what `--json` shows, the lag, and the counts of the tables that have rows."""
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
    """A table that was read whole. `started` is the Unix time when the reading began, `seconds` how long it took until the last write."""

    table: TableName
    rows: int
    bytes: int
    chunks: int
    seconds: float
    started: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as `--json` shows it."""
        return {"table": str(self.table), "rows": self.rows, "chunks": self.chunks, "seconds": _rounded(self.seconds)}


@dataclass(frozen=True, slots=True)
class SnapshotsReport:
    """The tables that were read. `blocked` has those that could not be read yet, with the old transactions that each waits for."""

    tables: tuple[SnapshotReport, ...]
    warnings: tuple[str, ...] = ()
    blocked: Mapping[TableName, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time from the first read of any table to the last write."""
        if not self.tables:
            return 0.0
        return max(table.started + table.seconds for table in self.tables) - min(table.started for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return the report as metadata of a Dagster run."""
        return {
            "snapshots": [table.to_json() for table in self.tables],
            "warnings": list(self.warnings),
            "unread": {str(table): reason for table, reason in self.blocked.items()},
            "seconds": {"snapshot": _rounded(self.seconds)},
        }


@dataclass(frozen=True, slots=True)
class TablePublish:
    """A table's part of a publish: the path of its `current`, and its Delta version.

    `version` is None for a table that was never published; `rows_changed` is None if Spark does not report it. `errors` says why the table
    could not be published; it is empty otherwise. `newest` is the newest commit of what was merged, None if nothing was.
    """

    path: str
    version: int | None
    rows_changed: int | None = None
    errors: tuple[str, ...] = ()
    newest: NewestCommit | None = None


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The `current` tables at one LSN. `lsn` and `published_at` are None before the first publish.

    `seconds` is by stage: `session` (the start of Spark) and `publish` (everything else). `unregistered` are the tables that are not in the
    catalog of PGWAL_SPARK_CATALOG as they should be, with the reasons.
    """

    lsn: int | None
    published_at: datetime | None
    tables: Mapping[TableName, TablePublish]
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    unregistered: Mapping[TableName, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any] | None:
        """Return the publish as `pgwal as-of --json` shows it; None before the first one."""
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
        """The reasons of the tables that could not be published, by the table's quoted name."""
        return {str(name): "; ".join(table.errors) for name, table in sorted(self.tables.items()) if table.errors}


def publish_json(report: PublishReport) -> dict[str, Any]:
    """Return the report as metadata of a Dagster run."""
    return {
        "publish": report.to_json(),
        "errors": report.errors,
        "warnings": list(report.warnings),
        "seconds": {stage: _rounded(report.seconds.get(stage, 0.0)) for stage in ("session", "publish")},
    }


@dataclass(frozen=True, slots=True)
class TableComparison:
    """A comparison of a table with its `current`, in rows: in the source, missing, extra, and `different` (same key, other values).

    Without a key `different` is 0: such a row is one missing and one extra.
    """

    equal: bool
    rows: int
    missing: int
    extra: int
    different: int

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as `--json` shows it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TableProof:
    """How a table was compared, and how far it is proven to equal its source.

    `whole` is False if a part of it was compared. `differences` name some of the rows that differ, by their keys, and the columns.
    """

    whole: bool
    seconds: float
    verified_through: int | None
    proven_at: datetime | None
    differences: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as `--json` shows it."""
        return {
            "whole": self.whole,
            "seconds": _rounded(self.seconds),
            "verified_through": None if self.verified_through is None else format_lsn(self.verified_through),
            "proven_at": _iso(self.proven_at),
            "differences": [dict(one) for one in self.differences],
        }


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A comparison of source and `current` at `lsn`. `drain` and `publish` report how `current` was brought there.

    `errors` has the tables that could not be compared, each with the reason. `left` are those for which the time was not enough. `proofs`
    say how each of `tables` was compared.
    """

    lsn: int
    equal: bool
    tables: Mapping[TableName, TableComparison]
    drain: DrainReport | None = None
    publish: PublishReport | None = None
    errors: Mapping[TableName, str] = field(default_factory=dict)
    left: tuple[TableName, ...] = ()
    proofs: Mapping[TableName, TableProof] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as `--json` shows it."""
        return {
            "lsn": format_lsn(self.lsn),
            "equal": self.equal,
            "tables": {str(name): comparison.to_json() for name, comparison in sorted(self.tables.items())},
            "proofs": {str(name): proof.to_json() for name, proof in sorted(self.proofs.items())},
            "left": [str(name) for name in self.left],
        }


@dataclass(frozen=True, slots=True)
class LagReading:
    """How far the slot is behind its source. The reading is cheap; no WAL is decoded for it.

    `lag_bytes` is `flush_lsn - confirmed_flush_lsn`, 0 without a slot. `snapshot` is `pg_current_snapshot()` as text; `insert_lsn` is the
    insert position (on a standby the replay position), read *after* it. If the slot is confirmed at or past `insert_lsn`, every transaction
    that wrote has been read, for as long as `snapshot` stays the same: checkpoints and our own reading move the LSN, but not the snapshot.
    `publish_due`: whether raw or a snapshot has something that the newest publish lacks. `drain_due`: whether a table that has been read
    whole is published only after a drain, since it was read at a later LSN than the frontier.
    """

    slot_exists: bool
    lag_bytes: int
    confirmed_flush_lsn: int | None
    flush_lsn: int
    insert_lsn: int
    snapshot: str
    publish_due: bool = False
    drain_due: bool = False
    active_pid: int | None = None
    wal_status: str | None = None
    safe_wal_size: int | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """The outcome of one command, joined from the JSON of its steps.

    By the tables' quoted names, `errors` has the reasons of tables that could not be published, and `unread` those of tables that still
    wait for old transactions to end. `to_json` leaves both out.
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
        """Join the JSON of the steps, given in the order in which they ran. Seconds are added; of several publishes the last is taken."""
        windows: list[Mapping[str, Any]] = []
        snapshots: list[Mapping[str, Any]] = []
        warnings: dict[str, None] = {}
        seconds = dict.fromkeys(STAGES, 0.0)
        publish: Mapping[str, Any] | None = None
        errors: Mapping[str, str] = {}
        unread: dict[str, str] = {}
        for part in parts:
            for snapshot in part.get("snapshots", ()):
                unread.pop(snapshot["table"], None)  # it was blocked before, and has been read since
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
        """Return what `sync`, `drain`, `publish` and `resnapshot` print with `--json`; `total_seconds` is the time of the whole command."""
        return {
            "windows": [dict(window) for window in self.windows],
            "changes": sum(window["changes"] for window in self.windows),
            "snapshots": [dict(snapshot) for snapshot in self.snapshots],
            "publish": self.publish,
            "warnings": list(self.warnings),
            "seconds": {stage: _rounded(self.seconds.get(stage, 0.0)) for stage in STAGES} | {"total": _rounded(total_seconds)},
        }

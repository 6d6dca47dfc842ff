"""Maintenance: prune raw windows that nothing needs any more, join small files, and remove unused files."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pgwal_pipeline.lake import current
from pgwal_pipeline.lake import maintenance as lakes
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.retention import shorten_logs
from pgwal_pipeline.messages.amounts import size
from pgwal_pipeline.messages.errors import LakeError, PgwalError, SlotBusy, TableError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.publish import alone
from pgwal_pipeline.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHORTEST_HISTORY = timedelta(days=1)  # so that a reader of an older version can finish


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What one maintenance did. `removed_keys` are the windows that were pruned from raw, `oldest_key` is the oldest that raw still has.

    `files` says how many files each step (`pruned`, `joined`, `removed`) saved, `seconds` how long each step and `current` took.
    `optimized` is the number of `current` tables whose files were maintained. `kept_bytes` is what the files of `current` take that only
    earlier publishes need (PGWAL_AS_OF_RETENTION).
    """

    removed_keys: tuple[str, ...]
    oldest_key: str | None
    files: dict[str, int]
    optimized: int
    kept_bytes: int = 0
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as metadata of a Dagster run."""
        return {
            "maintenance": {
                "removed_keys": list(self.removed_keys),
                "files": self.files,
                "optimized": self.optimized,
                "kept_bytes": self.kept_bytes,
            },
            "warnings": list(self.warnings),
        }


def maintain(settings: Settings, spark_factory: Callable[[], "SparkSession"], *, progress: Progress) -> MaintenanceReport:
    """Prune raw windows that are older than PGWAL_RAW_RETENTION, published, and needed by no table; then maintain every table's files.

    The versions of `current` that a publish names can be read for PGWAL_AS_OF_RETENTION, and for a day at least. A table whose maintenance
    fails is left as it is, with a warning. `current` is left out, with a warning, if a publish runs for longer than PGWAL_BUSY_TIMEOUT.
    Raises LakeError.
    """
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    history = max(timedelta(seconds=settings.as_of_retention), _SHORTEST_HISTORY)
    retained_from = datetime.now(UTC) - timedelta(seconds=settings.raw_retention)
    publish = ledger.publish()
    seconds: dict[str, float] = {}
    failed: dict[str, None] = {}

    def refused(error: TableError) -> None:
        if str(error) not in failed:
            failed[str(error)] = None
            progress.warn(str(error))

    started = time.perf_counter()
    pruned = lakes.Pruned((), 0) if publish is None else lakes.prune_raw(lake, ledger, retained_from, publish.lsn, refused)
    lakes.forget(lake, ledger, datetime.now(UTC) - history, refused)
    seconds["pruned"] = time.perf_counter() - started
    progress.say(f"Pruned {len(pruned.keys)} windows.")

    started = time.perf_counter()
    joined = lakes.compact(lake, lakes.locations(lake), refused)
    seconds["joined"] = time.perf_counter() - started
    started = time.perf_counter()
    removed = lakes.vacuum(lake, ledger, refused=refused)
    shorten_logs(lake, refused)
    seconds["removed"] = time.perf_counter() - started
    progress.say(f"Joined small files: {joined} fewer. Removed {removed} files that nothing needs any more.")

    started = time.perf_counter()
    optimized, warnings = _maintain_alone(settings, spark_factory, ledger, history, progress) if publish and publish.tables else (0, [])
    seconds["current"] = time.perf_counter() - started
    kept_bytes = _kept_bytes(lake, ledger, refused)
    progress.say(f"Files that only earlier publishes need take {size(kept_bytes)} (PGWAL_AS_OF_RETENTION).")
    kept = [window.key for window in ledger.windows() if window.state != "pruned"]
    return MaintenanceReport(
        removed_keys=pruned.keys,
        oldest_key=min(kept, default=None),
        files={"pruned": pruned.files, "joined": joined, "removed": removed},
        optimized=optimized,
        kept_bytes=kept_bytes,
        warnings=(*failed, *warnings),
        seconds=seconds,
    )


def _maintain_alone(
    settings: Settings, spark_factory: Callable[[], "SparkSession"], ledger: Ledger, history: timedelta, progress: Progress
) -> tuple[int, list[str]]:
    """Do `_maintain_current` under the lock that publishes take; do nothing if a publish holds it for longer than PGWAL_BUSY_TIMEOUT.

    The newest publish is recorded again with the new versions, which hold the same rows: a later vacuum removes files of the old ones.
    """
    try:
        with alone(settings):
            publish = ledger.publish()
            assert publish is not None
            paths = sorted(pointer.path for pointer in publish.tables.values())
            newest = {path: _newest(path) for path in paths}
            done = _maintain_current(ledger.lake, spark_factory(), _oldest_named(ledger, paths), history, progress)
            maintained = {
                table: replace(pointer, version=after)
                if newest[pointer.path] == pointer.version and (after := _newest(pointer.path)) is not None
                else pointer
                for table, pointer in publish.tables.items()
            }
            if maintained != publish.tables:
                ledger.record_publish(replace(publish, tables=maintained))
            return done
    except SlotBusy as error:
        progress.warn(str(error))
        return 0, [str(error)]


def _kept_bytes(lake: Lake, ledger: Ledger, refused: Callable[[TableError], None]) -> int:
    """Return how many bytes the files of `current` have that the newest version of their table does not need."""
    publish = ledger.publish()
    total = 0
    for path in sorted({pointer.path for pointer in publish.tables.values()} if publish is not None else ()):
        try:
            with table_work(lake, path, "maintain"):
                total += lakes.bytes_of_older_versions(lake, path)
        except TableError as error:
            refused(error)
    return total


def _newest(path: str) -> int | None:
    """Return the newest version of a `current` table; None if it is damaged or gone."""
    try:
        return current.version(path)
    except LakeError:
        return None


def _oldest_named(ledger: Ledger, paths: list[str]) -> dict[str, int]:
    """Return the oldest version that a publish names of each `current` table."""
    oldest: dict[str, int] = {}
    for publish in ledger.publishes():
        for pointer in publish.tables.values():
            oldest[pointer.path] = min(pointer.version, oldest.get(pointer.path, pointer.version))
    return {path: oldest[path] for path in paths}


def _maintain_current(
    lake: Lake, spark: "SparkSession", oldest: Mapping[str, int], history: timedelta, progress: Progress
) -> tuple[int, list[str]]:
    """Optimize and vacuum `current` tables; return for how many that worked, and a warning for each of the others.

    `oldest` has their paths, each with the oldest version that has to stay readable.
    """
    warnings = []
    for done, (path, version) in enumerate(oldest.items(), 1):
        try:
            with table_work(lake, path, "maintain", answers=lambda: spark.sql("SELECT 1").collect()):
                current.optimize(spark, path)
                current.vacuum(spark, path, math.ceil(history.total_seconds() / 3600), version)
        except PgwalError as error:
            warnings.append(str(error))
            progress.warn(str(error))
        progress.stage("maintenance of current", done, len(oldest), "tables")
    return len(oldest) - len(warnings), warnings

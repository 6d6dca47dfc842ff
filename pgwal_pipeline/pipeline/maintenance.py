"""Maintenance: prune raw windows that nothing needs any more, join small files, and remove unused files."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pgwal_pipeline.lake import maintenance as lakes
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.retention import shorten_logs
from pgwal_pipeline.messages.amounts import size
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.upkeep import Upkeep, keep_up
from pgwal_pipeline.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHORTEST_HISTORY = timedelta(days=1)  # so that a reader of an older version can finish


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What one maintenance did. `removed_keys` are the windows that were pruned from raw, `oldest_key` is the oldest that raw still has.

    `files` says how many files each step (`pruned`, `joined`, `removed`) saved, `seconds` how long each step and `current` took.
    `upkeep` is what was done for `current`. `kept_bytes` is what the files of `current` take that only
    earlier publishes need (PGWAL_AS_OF_RETENTION).
    """

    removed_keys: tuple[str, ...]
    oldest_key: str | None
    files: dict[str, int]
    upkeep: Upkeep
    kept_bytes: int = 0
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as metadata of a Dagster run."""
        return {
            "maintenance": {
                "removed_keys": list(self.removed_keys),
                "files": self.files,
                "optimized": self.upkeep.tables,
                "rewritten": {"tables": self.upkeep.rewritten, "files": self.upkeep.files, "bytes": self.upkeep.bytes},
                "left": self.upkeep.left,
                "kept_bytes": self.kept_bytes,
            },
            "warnings": list(self.warnings),
        }


def maintain_tables(
    settings: Settings, spark_factory: Callable[[], "SparkSession"], tables: Collection[str], *, progress: Progress
) -> MaintenanceReport:
    """Rewrite the files of the `current` tables with these names that need it, and do nothing else. Raises LakeError."""
    started = time.perf_counter()
    ledger = Ledger(Lake(settings.lake))
    done = keep_up(settings, spark_factory, ledger, _history(settings), progress, tables=tables, vacuum=False)
    progress.say(f"Rewrote {done.files} files ({size(done.bytes)}) of {done.rewritten} current tables.")
    return MaintenanceReport((), None, {}, done, warnings=done.warnings, seconds={"current": time.perf_counter() - started})


def _history(settings: Settings) -> timedelta:
    return max(timedelta(seconds=settings.as_of_retention), _SHORTEST_HISTORY)


def maintain(settings: Settings, spark_factory: Callable[[], "SparkSession"], *, progress: Progress) -> MaintenanceReport:
    """Prune raw windows that are older than PGWAL_RAW_RETENTION, published, and needed by no table; then maintain every table's files.

    The versions of `current` that a publish names can be read for PGWAL_AS_OF_RETENTION, and for a day at least. A table whose maintenance
    fails is left as it is, with a warning. So are those of `current` that are left when a publish runs for longer than PGWAL_BUSY_TIMEOUT.
    Raises LakeError.
    """
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    history = _history(settings)
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
    done = keep_up(settings, spark_factory, ledger, history, progress)
    seconds["current"] = time.perf_counter() - started
    progress.say(f"Rewrote {done.files} files ({size(done.bytes)}) of {done.rewritten} current tables.")
    kept_bytes = _kept_bytes(lake, ledger, refused)
    progress.say(f"Files that only earlier publishes need take {size(kept_bytes)} (PGWAL_AS_OF_RETENTION).")
    kept = [window.key for window in ledger.windows() if window.state != "pruned"]
    return MaintenanceReport(
        removed_keys=pruned.keys,
        oldest_key=min(kept, default=None),
        files={"pruned": pruned.files, "joined": joined, "removed": removed},
        upkeep=done,
        kept_bytes=kept_bytes,
        warnings=(*failed, *done.warnings),
        seconds=seconds,
    )


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

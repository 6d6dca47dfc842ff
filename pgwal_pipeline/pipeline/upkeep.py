"""Keep the files of the `current` tables and of histories in order, a table at a time, beside publishes.

What takes long is done without the lock that publishes take: a publish waits at most for a commit.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from pgwal_pipeline.lake import current, upkeep
from pgwal_pipeline.lake.delta import side_by_side
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import TablePointer
from pgwal_pipeline.lake.upkeep import Unit
from pgwal_pipeline.messages.errors import PgwalError, SlotBusy
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.publish import alone
from pgwal_pipeline.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BUDGET_SECONDS = 600.0
"""After that no more files are rewritten in a run; the next one goes on."""

_TRIES = 3  # for a table, if publishes change the files that are rewritten


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was done: for how many tables it worked, in how many of them files were rewritten, how many of these, and their bytes.

    `left` is how many tables still have files to be rewritten: time was up, or publishes were faster.
    """

    tables: int = 0
    rewritten: int = 0
    files: int = 0
    bytes: int = 0
    left: int = 0
    warnings: tuple[str, ...] = ()


def keep_up(
    settings: Settings,
    spark_factory: "Callable[[], SparkSession]",
    ledger: Ledger,
    history: timedelta,
    progress: Progress,
    *,
    tables: Collection[str] | None = None,
    vacuum: bool = True,
    budget: float = BUDGET_SECONDS,
) -> Upkeep:
    """Rewrite the files of `current` tables that need it, those of these names or all; with `vacuum` remove the files that nothing needs.

    Versions that a publish names stay readable for `history`. A table whose upkeep fails stays as it is, with a warning. Spark is started
    only for a table that needs it. Nothing is rewritten while the source is away and the lake is on an object store: a publish might
    commit at the same time there.
    """
    publish = ledger.publish()
    if publish is None:
        return Upkeep()
    pointers = [*publish.tables.items(), *publish.histories.items()]
    oldest = _oldest_named(ledger, sorted({pointer.path for _, pointer in pointers}))
    wanted = {pointer.path for table, pointer in pointers if tables is None or str(table) in tables}
    chosen = [path for path in oldest if path in wanted]
    known = [(state.location, state.relation.key) for state in ledger.tables().values() if state.relation is not None]
    keys = {path: key for location, key in known for path in (ledger.lake.current(location), ledger.lake.history(location))}
    work = _Work(settings, ledger, cache(spark_factory), time.monotonic() + budget)
    done = Upkeep()
    plans = side_by_side(lambda path: work.planned(path, keys.get(path, ())), chosen)
    for number, (path, planned) in enumerate(zip(chosen, plans, strict=True), 1):
        try:
            with table_work(ledger.lake, path, "maintain", answers=lambda: work.spark().sql("SELECT 1").collect()):
                if isinstance(planned, PgwalError):
                    raise planned
                units, lost = work.rewrite(path, keys.get(path, ()), planned)
                files = [file for unit in units for file in unit.files]
                size = sum(file["size"] for file in files)
                done = replace(
                    done,
                    rewritten=done.rewritten + bool(units),
                    files=done.files + len(files),
                    bytes=done.bytes + size,
                    left=done.left + bool(lost),
                )
                if vacuum:
                    work.vacuum(path, history, oldest[path])
            done = replace(done, tables=done.tables + 1)
        except PgwalError as error:
            progress.warn(str(error))
            done = replace(done, warnings=(*done.warnings, str(error)))
            if isinstance(error, SlotBusy):
                break
        progress.stage("maintenance of current", number, len(chosen), "tables")
    upkeep.clear(ledger.lake)
    return done


@dataclass(frozen=True)
class _Work:
    """Upkeep until the time `deadline` of the monotonic clock."""

    settings: Settings
    ledger: Ledger
    spark: "Callable[[], SparkSession]"
    deadline: float

    def planned(self, path: str, key: Sequence[str]) -> list[Unit] | PgwalError:
        """What is to be rewritten of a table, or why that cannot be told."""
        try:
            with table_work(self.ledger.lake, path, "maintain"):
                return upkeep.due(path, key)
        except PgwalError as error:
            return error

    def rewrite(self, path: str, key: Sequence[str], units: Sequence[Unit]) -> tuple[list[Unit], bool]:
        """Rewrite `units` of the table at `path`; return those that are done, and whether some are left."""
        done: list[Unit] = []
        for _ in range(_TRIES):
            lost = 0
            for unit in units:
                if not self.is_over() and self._one(unit):
                    done.append(unit)
                else:
                    lost += 1
            units = upkeep.due(path, key) if lost else []
            if not units or self.is_over():
                break
        if done:
            self._name_new_version(path)
        return done, bool(units)

    def is_over(self) -> bool:
        """Whether time is up."""
        return time.monotonic() > self.deadline

    def _one(self, unit: Unit) -> bool:
        """Rewrite `unit`; return False if a publish has changed its files meanwhile."""
        lake = self.ledger.lake
        written = upkeep.rewrite(self.spark(), lake, unit)
        try:
            with alone(self.settings) as held:
                return (held or lake.is_local) and upkeep.commit(lake, written)
        finally:
            upkeep.clear(lake, written.folder)

    def _name_new_version(self, path: str) -> None:
        """Record the newest publish again with the new version of the table, which has the same rows: the old one's files are removed once.

        If the table has gone past that publish meanwhile, the next one names its version.
        """
        with alone(self.settings):
            publish, now = self.ledger.publish(), current.standing(path)
            if publish is None or now is None:
                return
            renewed = {
                version: now.version
                for version in {at.version for at in (*publish.tables.values(), *publish.histories.values()) if at.path == path}
                if now.watermark == current.watermark(path, version)
            }

            def moved(at: TablePointer) -> TablePointer:
                return replace(at, version=renewed.get(at.version, at.version)) if at.path == path else at

            tables = {table: moved(at) for table, at in publish.tables.items()}
            histories = {table: moved(at) for table, at in publish.histories.items()}
            if tables != publish.tables or histories != publish.histories:
                self.ledger.record_publish(replace(publish, tables=tables, histories=histories))

    def vacuum(self, path: str, history: timedelta, oldest: int) -> None:
        """Remove the files of a table that no version of the last `history` needs."""
        hours = math.ceil(history.total_seconds() / 3600)
        wanted = upkeep.properties_for(path, hours, oldest)
        if upkeep.needs_properties(path, wanted):
            with alone(self.settings):
                upkeep.set_properties(self.spark(), path, wanted)
        upkeep.vacuum(self.spark(), path, hours)
        self._name_new_version(path)  # what a vacuum says of itself in the log makes versions too


def _oldest_named(ledger: Ledger, paths: list[str]) -> dict[str, int]:
    """Return the oldest version that a publish names of each table."""
    oldest: dict[str, int] = {}
    for publish in ledger.publishes():
        for pointer in (*publish.tables.values(), *publish.histories.values()):
            oldest[pointer.path] = min(pointer.version, oldest.get(pointer.path, pointer.version))
    return {path: oldest[path] for path in paths}


@dataclass(frozen=True, slots=True)
class Seen:
    """What was known when maintenance was asked for last: how many versions each table has, by name, and when, in Unix seconds."""

    versions: Mapping[str, int]
    whole_at: float
    raw_at: float


_COMMITS = 20
"""Since the last look at a table, from which on it is looked at again."""
_WINDOWS = 500
"""Of raw that may be pruned."""
_DAY, _HOUR = 86_400.0, 3_600.0


@dataclass(frozen=True, slots=True)
class Need:
    """Maintenance that is due: of everything, or of the `tables` of these names; the reason as a sentence, and what is known now."""

    reason: str
    whole: bool
    tables: tuple[str, ...]
    seen: Seen

    def __bool__(self) -> bool:
        return self.whole or bool(self.tables)


def what_is_needed(settings: Settings, ledger: Ledger, seen: Seen | None, now: float) -> Need:
    """Return what maintenance is needed. It reads only the ledger: tables without a commit cost nothing."""
    publish = ledger.publish()
    versions: dict[str, int] = {}
    for table, pointer in () if publish is None else (*publish.tables.items(), *publish.histories.items()):
        versions[str(table)] = versions.get(str(table), 0) + pointer.version
    if seen is None or publish is None:
        return Need("Nothing is known yet of the time before.", False, (), Seen(versions, now, now))
    known = {name: min(seen.versions.get(name, version), version) for name, version in versions.items()}
    if not 0 <= now - seen.whole_at < _DAY:
        return Need("A day has passed since the last one.", True, (), Seen(versions, now, now))
    raw_at = seen.raw_at
    if not 0 <= now - raw_at < _HOUR:
        raw_at = now
        over = sum(
            window.state == "complete" and window.at is not None and window.at.timestamp() < now - settings.raw_retention
            for window in ledger.windows()
        )
        if over >= _WINDOWS:
            return Need(f"{over} windows of raw are past PGWAL_RAW_RETENTION.", True, (), Seen(versions, now, now))
    moved = tuple(name for name, version in versions.items() if version - known[name] >= _COMMITS)
    if moved:
        looked_at = known | {name: versions[name] for name in moved}
        which = "1 table has" if len(moved) == 1 else f"{len(moved)} tables have"
        return Need(f"{which} {_COMMITS} commits since the last look.", False, moved, Seen(looked_at, seen.whole_at, raw_at))
    return Need("No table has many commits since the last look.", False, (), Seen(known, seen.whole_at, raw_at))

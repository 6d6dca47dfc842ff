"""The commands as Dagster runs: the same jobs as in the UI, executed by this process and recorded in the same instance."""

import contextvars
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pgwal_pipeline import quiet
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages import progress
from pgwal_pipeline.messages.errors import BlockedByTransaction, PgwalError, SettingError, SlotBusy, SourceUnavailable
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.applied_options import take_key
from pgwal_pipeline.pipeline.reports import RunReport
from pgwal_pipeline.pipeline.status import lag
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pgwal_pipeline.runner import Runner

_ROUNDS = 3
_LAG_EVERY = 1.0  # seconds between readings of the lag while a snapshot is read
_RETRY_AFTER = 10.0  # the same, after a reading or a drain that failed
_TRIES = 10  # consecutive tries of a drain while a snapshot is read

Part = Mapping[str, Any]


def dagster_home() -> Path:
    """Return Dagster's instance folder, DAGSTER_HOME or `.dagster` in the working directory; create it if it is missing.

    Raises SettingError if it cannot be written to.
    """
    given = os.environ.get("DAGSTER_HOME") or ".dagster"
    try:
        home = Path(given).expanduser().absolute()
    except RuntimeError as error:
        raise SettingError(f"DAGSTER_HOME takes a writable folder, and {given} is none ({error}).") from None
    os.environ["DAGSTER_HOME"] = str(home)
    try:
        home.mkdir(parents=True, exist_ok=True)
        configuration = home / "dagster.yaml"
        if not configuration.exists():
            configuration.write_bytes((files("pgwal_pipeline") / "instance.yaml").read_bytes())
    except OSError as error:
        raise SettingError(f"DAGSTER_HOME takes a writable folder, and {home} is none ({error.strerror}).") from None
    return home


def sync(settings: Settings) -> RunReport:
    """Run the main job: bootstrap, snapshot the tables that need it while drains go on, drain to the target LSN, publish.

    Tables that have to wait for old transactions are read last, after everything else has been published. If the source is away, what raw
    holds is published first, then SourceUnavailable is raised. While nothing has been committed there is no run.
    """
    dagster_home()
    with progress.Terminal() as terminal:
        before = quiet.sync(settings, progress=terminal)
    if before.done:
        return RunReport.join(before.parts)
    try:
        with _jobs(settings) as run:
            parts = [run.prepared, *(part for window in before.windows for part in run("drain", window)), *_rounds(settings, run)]
            return RunReport.join([*parts, *_what_waited(settings, run, parts)])
    except SourceUnavailable as error:
        if Ledger(Lake(settings.lake)).frontier() is None:
            raise
        published = publish(settings).publish
        at = "" if published is None else f" What raw holds is published, at {published['lsn']}."
        raise SourceUnavailable(f"{error}{at}") from error


def _rounds(settings: Settings, run: "Runner") -> list[Part]:
    """Snapshot, drain and publish; repeat if the drain finds that a table was altered and has to be read again.

    A table that is still to be read after three rounds is left for a later run, and so is one that waits for old transactions.
    """
    parts: list[Part] = []
    for _ in range(_ROUNDS):
        if snapshots.needed(settings):
            parts += [_read_again(settings), *_snapshot_beside_drains(settings, run, {})]
        parts += _drain(settings, run, "sync")
        if not set(map(str, snapshots.needed(settings))) - RunReport.join(parts).unread.keys():
            break
    return parts


def _what_waited(settings: Settings, run: "Runner", parts: Sequence[Part], config: Mapping[str, Any] | None = None) -> list[Part]:
    """Wait for the transactions that keep tables from being read, then read and publish these tables. Return no parts if none wait."""
    unread = RunReport.join(parts).unread
    if not unread:
        return []
    try:
        snapshots.wait_for_blocked(settings, [TableName.parse(name) for name in unread], progress=run.progress)
    except BlockedByTransaction as error:
        return [{"unread": dict.fromkeys(unread, str(error))}]
    return [*_snapshot_beside_drains(settings, run, config or {}), *_drain(settings, run, "sync")]


def drain(settings: Settings) -> RunReport:
    """Run the drain: only slot to raw."""
    with _jobs(settings) as run:
        return RunReport.join([run.prepared, *_drain(settings, run, "drain")])


def publish(settings: Settings) -> RunReport:
    """Run the publish: only raw to current. Works without the source."""
    with _jobs(settings, None) as run:
        return RunReport.join(run("publish"))


def resnapshot(settings: Settings, tables: Sequence[TableName] | None) -> RunReport:
    """Read `tables` again and publish. With None all tables are read, and a lost or missing slot is created again first."""

    def prepare(settings: Settings, *, progress: progress.Progress) -> object:
        take_key(settings, Ledger(Lake(settings.lake)), tables)
        return (drains.renew if tables is None else drains.bootstrap)(settings, progress=progress)

    with _jobs(settings, prepare) as run:
        if tables is None:
            tables = [state.table for state in Ledger(Lake(settings.lake)).tables().values() if state.followed]
        parts = _snapshot_beside_drains(settings, run, {"tables": [str(table) for table in tables]}) if tables else []
        parts = [run.prepared, *parts, *_drain(settings, run, "sync")]
        waited = {"tables": sorted(RunReport.join(parts).unread)}
        return RunReport.join([*parts, *_what_waited(settings, run, parts, waited)])


def verify(settings: Settings, tables: Collection[TableName] | None, *, every: bool = False) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Compare source and `current` at one LSN; return the comparison as JSON, and the tables in error with their reasons.

    `tables` are compared whole, with `every` all that are published. Else it takes about PGWAL_VERIFY_BUDGET.
    """
    if every:
        published = Ledger(Lake(settings.lake)).publish()
        tables = sorted(published.tables) if published is not None else None
    with _jobs(settings) as run:
        parts = run("verify", config={"tables": [str(table) for table in tables]} if tables is not None else {})
        return next(dict(part["verify"]) for part in parts if "verify" in part), RunReport.join(parts).errors


def _read_again(settings: Settings) -> Part:
    """Return warnings naming the tables that have to be read again, and why."""
    states = Ledger(Lake(settings.lake)).tables().values()
    again = [state for state in states if state.state == "pending" and state.reason and state.held is None]
    return {"warnings": [f"Table {state.table}: {state.reason}." for state in again]}


def _drain(settings: Settings, run: "Runner", job: str) -> list[Part]:
    """Run `job` for the window that ends at the source's flush LSN. If that is not past the frontier, no new window is made."""
    reading = lag(settings)
    target = reading.flush_lsn
    frontier = Ledger(Lake(settings.lake)).frontier()
    if frontier is None or target > frontier:
        parts = run(job, target)
    else:
        settled = drains.drain(settings, end_lsn=frontier, progress=progress.Silent()).to_json()
        parts = [settled, *(run("publish") if job == "sync" else [])]
    quiet.remember(settings, reading)
    return parts


def _snapshot_beside_drains(settings: Settings, run: "Runner", config: Mapping[str, Any]) -> list[Part]:
    """Read the tables that need it, and drain whenever the lag reaches PGWAL_LAG_THRESHOLD, so that the slot keeps no more WAL than usual.

    If tables are published already, each drain also publishes, and one is due when the last is older than PGWAL_MAX_STALENESS. A drain that
    fails because the source is away or another drain holds the slot is tried again while the snapshot goes on, ten times in a row at most.
    Any other error of a drain is shown at once, and raised when the snapshot has ended.
    """
    ledger = Ledger(Lake(settings.lake))
    drained: list[Part] = []
    with ThreadPoolExecutor(1, "pgwal-snapshot") as pool:
        reading = pool.submit(contextvars.copy_context().run, run, "snapshot", config=config)
        began, failures, failed = time.monotonic(), 0, None
        while not wait([reading], _LAG_EVERY).done:
            if failed is not None:
                continue
            try:
                published = any(state.published is not None for state in ledger.tables().values())
                behind = lag(settings).lag_bytes
                stale = published and behind > 0 and time.monotonic() - began >= settings.max_staleness
                if behind >= settings.lag_threshold or stale:
                    drained += _drain(settings, run, "sync" if published else "drain")
                    began = time.monotonic()
                failures = 0
            except (SourceUnavailable, SlotBusy) as error:
                failures += 1
                if failures == _TRIES:
                    failed = error
                    run.progress.warn(f"{error} The drain failed {failures} times in a row; the command fails when the snapshot has ended.")
                    continue
                drained.append({"warnings": [f"{error} The snapshot goes on meanwhile, and the drain is tried again."]})
                wait([reading], _RETRY_AFTER)
            except PgwalError as error:
                failed = error
                run.progress.warn(f"{error} The snapshot is read to its end, and then the command fails.")
        parts = drained + reading.result()
        if failed is not None:
            raise failed
        return parts


class _Prepare(Protocol):
    def __call__(self, settings: Settings, *, progress: progress.Progress) -> object: ...


@contextmanager
def _jobs(settings: Settings, prepare: _Prepare | None = drains.bootstrap) -> "Iterator[Runner]":
    """Give a runner of the code location's jobs. They are loaded after `prepare` has set up the source, so that they know every table."""
    home = dagster_home()
    with progress.Terminal() as terminal, progress.watched_by(terminal):
        noted = progress.Noted(terminal)
        if prepare is not None:
            prepare(settings, progress=noted)
        from pgwal_pipeline.runner import runner

        with runner(settings, home, noted.warnings, terminal) as run:
            yield run

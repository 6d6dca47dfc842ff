"""The commands as Dagster runs: the same jobs as the UI's, executed by this process and recorded in the same instance."""

import contextvars
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from pgwal_pipeline import progress
from pgwal_pipeline.errors import PgwalError
from pgwal_pipeline.lsn import window_key
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.reports import RunReport
from pgwal_pipeline.pipeline.status import lag
from pgwal_pipeline.relation import TableName
from pgwal_pipeline.settings import Settings

REPORT = "pgwal/report"
"""The metadata entry under which a step leaves its report as JSON."""

_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_LOOK_EVERY = 1.0  # seconds between looks at the lag while a snapshot is read

Part = Mapping[str, Any]


def dagster_home() -> Path:
    """Dagster's instance folder, made if it is missing: DAGSTER_HOME, or `.dagster` in the working directory."""
    home = Path(os.environ.get("DAGSTER_HOME") or ".dagster").absolute()
    os.environ["DAGSTER_HOME"] = str(home)
    home.mkdir(parents=True, exist_ok=True)
    return home


def sync(settings: Settings) -> RunReport:
    """The main job: bootstrap, snapshot what needs it while draining goes on, drain to the position read at the start, publish."""
    with _jobs(settings) as run:
        target = drains.next_target(settings)
        parts: list[Part] = []
        if snapshots.needed(settings):
            parts += _snapshot_beside_drains(settings, run, {})
            target = drains.next_target(settings)
        return RunReport.join(parts + run("sync", target))


def drain(settings: Settings) -> RunReport:
    """Only slot to raw."""
    with _jobs(settings) as run:
        return RunReport.join(run("drain", drains.next_target(settings)))


def publish(settings: Settings) -> RunReport:
    """Only raw to current; needs no source."""
    with _jobs(settings, bootstrap=False) as run:
        return RunReport.join(run("publish"))


def resnapshot(settings: Settings, tables: Sequence[TableName] | None) -> RunReport:
    """Read `tables` again, all of them where it is None (then a lost or missing slot is made anew first), and publish."""
    if tables is None:
        drains.renew(settings, progress=progress.Silent())
    with _jobs(settings) as run:
        names = {"tables": [str(table) for table in tables]} if tables is not None else {}
        parts = _snapshot_beside_drains(settings, run, names)
        return RunReport.join(parts + run("sync", drains.next_target(settings)))


def verify(settings: Settings, tables: Collection[TableName] | None) -> dict[str, Any]:
    """Compare source and `current` at one LSN; the JSON of the comparison."""
    with _jobs(settings) as run:
        config = {"tables": [str(table) for table in tables]} if tables is not None else {}
        return dict(run("verify", config=config)[-1]["verify"])


def _snapshot_beside_drains(settings: Settings, run: "_Runner", config: Mapping[str, Any]) -> list[Part]:
    """Read what needs reading; whenever the stream gets long meanwhile, drain it, so that the slot keeps no more WAL than usual."""
    drained: list[Part] = []
    with ThreadPoolExecutor(1, "pgwal-snapshot") as pool:
        reading = pool.submit(contextvars.copy_context().run, run, "snapshot", config=config)
        while not wait([reading], _LOOK_EVERY).done:
            reading_lag = lag(settings)
            if reading_lag.lag_bytes >= settings.lag_threshold:
                drained += run("drain", reading_lag.flush_lsn)
        return drained + reading.result()


class _Runner:
    """Executes jobs of one code location in one instance."""

    def __init__(self, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._definitions = definitions
        self._instance = instance

    def __call__(self, job_name: str, target: int | None = None, config: Mapping[str, Any] | None = None) -> list[Part]:
        """Run a job to its end; the reports its steps left, in their order. Raises the step's own error where one failed."""
        raise NotImplementedError


@contextmanager
def _jobs(settings: Settings, *, bootstrap: bool = True) -> Iterator[_Runner]:
    raise NotImplementedError

"""Dagster's own processes fail: daemons, code servers and workers are killed, runs are cancelled in each stage; the next tick goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import dagster as dg
import polars as pl
import psutil
import pytest
from deltalake import DeltaTable

from pgwal_pipeline import definitions as code_location
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.runs import dagster_home
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for

ROOT = Path(code_location.__file__).parents[1]
PATIENCE = 240.0
ORDERS = TableName("public", "orders")
UNFINISHED = [
    dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]  # fmt: skip


class Daemons:
    """Dagster's daemons on one instance: as many as are started."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self.log = home / "daemons.log"
        self.environment = {**os.environ, **environment}
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "dagster._daemon", "run", "-w", "workspace.yaml"]
            self.started.append(subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True))

    def descendants(self, word: str) -> list[psutil.Process]:
        """The processes under the daemons whose command line has `word`."""
        found = []
        for daemon in self.started:
            with suppress(psutil.NoSuchProcess):
                found += psutil.Process(daemon.pid).children(recursive=True)
        return [process for process in found if word in " ".join(_command_line(process))]

    def kill(self) -> None:
        for daemon in self.started:
            with suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGKILL)
            daemon.wait()

    def end(self) -> None:
        for daemon in self.started:
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


class Site:
    """A source, its lake and an instance, with what tells how far they are."""

    def __init__(self, source: Source, lake: Lake, daemons: Daemons, instance: dg.DagsterInstance) -> None:
        self.source = source
        self.lake = lake
        self.daemons = daemons
        self.instance = instance

    def equal(self) -> bool:
        path = self.lake.current(ORDERS)
        if not DeltaTable.is_deltatable(path):
            return False
        rows = pl.scan_delta(path).select("id", "total").collect().sort("id").rows()
        return rows == self.source.sql("SELECT id, total FROM orders ORDER BY id")

    def wait(self, what: str, met: Callable[[], object]) -> None:
        wait_for(met, seconds=PATIENCE, pause=0.2, what=lambda: f"{what}\n{self.daemons.log.read_text(errors='replace')[-4000:]}")

    def change(self) -> None:
        self.source.sql("UPDATE orders SET total = total + 1 WHERE id % 3 = 0; INSERT INTO orders SELECT max(id) + 1, 0 FROM orders")

    def active(self) -> list[dg.DagsterRun]:
        return list(self.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)))

    def started(self) -> list[dg.DagsterRun]:
        return list(self.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.soak
def test_daemons_and_workers_that_die(
    make_server: Callable[..., Postgres],
    stack: ExitStack,
    connect_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = stack.enter_context(fresh_source(make_server()))
    source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int); INSERT INTO orders SELECT g, g FROM generate_series(1, 100) g")
    lake = Lake(str(tmp_path / "lake"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    home = dagster_home()
    pauses = tmp_path / "failpoints"
    environment = {
        "DAGSTER_HOME": str(home),
        "PGWAL_SOURCE_DSN": source.dsn,
        "PGWAL_LAKE": lake.uri,
        "PGWAL_MAX_STALENESS": "3s",
        "PGWAL_BUSY_TIMEOUT": "5s",
        "PGWAL_SPARK_REMOTE": connect_address,
        "PGWAL_SPARK_CONF": json.dumps({}),
    }
    daemons = Daemons(home, environment)
    stack.callback(daemons.end)
    instance = stack.enter_context(dg.DagsterInstance.get())
    site = Site(source, lake, daemons, instance)
    daemons.start()
    site.wait("the first publish", site.equal)

    # The worker of a run, at any moment of it.
    for pause in (0.5, 3.0, 6.0):
        site.change()
        site.wait("a run", site.started)
        time.sleep(pause)
        for worker in daemons.descendants("execute_run"):
            worker.kill()
        site.wait("the changes, after a worker was killed", site.equal)

    # The daemon, and with it or without it what it had started.
    for word in ("", "execute_run", "grpc"):
        site.change()
        site.wait("a run", site.started)
        others = daemons.descendants(word) if word else []
        daemons.kill()
        for process in others:
            with suppress(psutil.Error):
                process.kill()
        daemons.start()
        site.wait("the changes, after the daemon was killed", site.equal)

    # Two daemons at once: nothing is done twice that matters.
    daemons.start()
    for _ in range(2):
        site.change()
        site.wait("the changes, with two daemons", site.equal)

    # Runs that are cancelled from the UI, in each stage; and one that waits in the queue.
    points = ("drain.after_files", "drain.before_confirm", "publish.in_merge", "snapshot.between_read_and_write")
    daemons.end()
    for point in points:
        held = pauses.with_name(f"held_{point}")
        daemons.environment["PGWAL_FAILPOINTS"] = f"{point}=touch:{held}"
        daemons.started.clear()
        daemons.start()
        site.change()
        if point.startswith("snapshot"):
            source.sql(f"CREATE TABLE more_{points.index(point)} (id int PRIMARY KEY)")
        site.wait(f"a run to come to {point}", held.exists)
        waiting = [run for run in site.active() if run not in site.started()]
        for run in [*waiting, *site.started()]:
            instance.run_launcher.terminate(run.run_id)
        site.wait("the runs to be cancelled", lambda: not site.active())
        held.unlink(missing_ok=True)
        daemons.end()
        daemons.started.clear()
        daemons.environment.pop("PGWAL_FAILPOINTS")
        daemons.start()
        site.wait(f"the changes, after a run was cancelled at {point}", site.equal)
        daemons.end()
        daemons.started.clear()
    slots = source.sql("SELECT slot_name::text FROM pg_replication_slots")
    assert slots == [("pgwal",)]

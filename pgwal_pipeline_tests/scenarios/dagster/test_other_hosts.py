"""Runs on several hosts, each in a process of its own: the locks in the source tell them apart, and a run that died stops no other.

The hosts are containers of the tests' own, with names and process ids of their own and a DAGSTER_HOME each.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from dagster._core.launcher.base import LaunchRunContext, RunLauncher
from dagster._core.test_utils import instance_for_test
from dagster._grpc.types import ExecuteRunArgs
from dagster._serdes import ConfigurableClass, ConfigurableClassData

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.postgres.presence import present
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests import elsewhere
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.components.ticks import SensorDaemon, sensor_daemon
from pgwal_pipeline_tests.support import Source, wait_for

ORDERS = TableName("public", "orders")


def host(folder: Path, dsn: str, lake: str, **environment: str) -> Commands:
    """A host with a DAGSTER_HOME of its own, at work on a shared lake."""
    folder.mkdir()
    commands = Commands(folder, dsn)
    commands.environment |= {"PGWAL_LAKE": lake, **environment}
    return commands


def start(commands: Commands, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    everything = {**commands.environment, **environment}
    return elsewhere.start_pgwal(commands.folder.name, *arguments, environment=everything, cwd=commands.folder)


def orders(lake: str) -> list[tuple[Any, ...]]:
    return pl.scan_delta(Lake(lake).current(ORDERS)).select("id", "total").collect().sort("id").rows()


@pytest.mark.long
def test_hosts_that_work_on_one_source(source: Source, tmp_path: Path, connect_address: str) -> None:
    source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int); INSERT INTO orders SELECT g, g FROM generate_series(1, 100) g")
    expected = "SELECT id, total FROM orders ORDER BY id"
    lake, held = str(tmp_path / "lake"), tmp_path / "held"
    first, second = (host(tmp_path / name, source.dsn, lake, PGWAL_SPARK_REMOTE=connect_address) for name in ("host-a", "host-b"))
    assert second.run("sync")[0] == 0
    source.sql("DELETE FROM orders WHERE id > 90")
    with ExitStack() as stack:
        # One that is killed in the middle, with the slot in its hands: another goes on at once.
        a = start(first, "sync", PGWAL_FAILPOINTS=f"drain.before_confirm=touch:{held}")
        stack.callback(a.kill)
        wait_for(held.exists, seconds=120, what="the first host to come to its drain")
        # Meanwhile no other takes the slot, or drops it, and each says who has it.
        for command in (("drain",), ("drop", "--yes")):
            code, _, said = second.run(*command, PGWAL_BUSY_TIMEOUT="0.3s")
            assert code == 1
            assert "is held by another run (pid" in said
            assert f"pgwal on {elsewhere.name_of('host-a')}" in said
        a.kill()
        a.wait()
        held.unlink()
        assert second.run("sync", PGWAL_BUSY_TIMEOUT="5s")[0] == 0
        assert orders(lake) == source.sql(expected)
        # Both at once: one waits for the other, and each change is there once.
        source.sql("UPDATE orders SET total = total + 1; INSERT INTO orders SELECT g, g FROM generate_series(101, 140) g")
        both = [start(commands, "sync", PGWAL_BUSY_TIMEOUT="120s") for commands in (first, second)]
        for process in both:
            stack.callback(process.kill)
        for process in both:
            _, said = process.communicate(timeout=240)
            assert process.returncode == 0, said
        assert orders(lake) == source.sql(expected)
        raw = (
            pl.scan_delta(Lake(lake).raw(ORDERS)).filter(pl.col("_pgwal_op") != "K").select("_pgwal_commit_lsn", "_pgwal_ordinal").collect()
        )
        assert raw.height == 10 + 90 + 40
        assert not raw.is_duplicated().any()
        # What one host keeps of its last sync does not make it overlook what another has done since.
        source.sql("DELETE FROM orders WHERE id <= 10")
        assert second.run("sync")[0] == 0
        assert first.run("sync")[0] == 0
        assert orders(lake) == source.sql(expected)
        assert second.run("verify")[0] == 0


class ElsewhereLauncher(RunLauncher, ConfigurableClass):
    """Starts each run as a program on a host of its own, as launchers for containers do. None of them watches its runs."""

    def __init__(self, folder: str, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__()
        self.folder, self._inst_data = Path(folder), inst_data
        self.processes: list[subprocess.Popen[str]] = []
        self.failpoints: list[str] = []

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {"folder": str}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Any) -> "ElsewhereLauncher":
        return cls(inst_data=inst_data, **config_value)

    def launch_run(self, context: LaunchRunContext) -> None:
        assert context.job_code_origin is not None
        name = f"pod-{len(self.processes) + 1}"
        home = self.folder / name
        home.mkdir()
        _, *arguments = ExecuteRunArgs(context.job_code_origin, context.dagster_run.run_id, self._instance.get_ref()).get_command_args()
        command = (sys.executable, "-m", "dagster", *arguments)
        environment = {**os.environ, "DAGSTER_HOME": str(home)}
        if self.failpoints:
            environment["PGWAL_FAILPOINTS"] = self.failpoints.pop(0)
        with (home / "log").open("wb") as log:
            self.processes.append(elsewhere.start(name, *command, environment=environment, cwd=home, stdout=log, stderr=log))

    def terminate(self, run_id: str) -> bool:
        raise NotImplementedError

    def kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def daemon(source: Source, tmp_path: Path, connect_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SensorDaemon]:
    """The sensors, whose runs are launched on hosts of their own as soon as they are asked for."""
    values = {
        "DAGSTER_HOME": str(tmp_path / "home"),
        "PGWAL_SOURCE_DSN": source.dsn,
        "PGWAL_LAKE": str(tmp_path / "lake"),
        "PGWAL_MAX_STALENESS": "0s",
        "PGWAL_SPARK_REMOTE": connect_address,
        "PGWAL_SPARK_CONF": "{}",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    overrides = {
        "run_launcher": {"module": __name__, "class": "ElsewhereLauncher", "config": {"folder": str(tmp_path)}},
        "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"},
    }
    (tmp_path / "instance").mkdir()
    with instance_for_test(overrides=overrides, temp_dir=str(tmp_path / "instance")) as instance, sensor_daemon(instance) as daemon:
        yield daemon
        launcher_of(instance).kill()


def launcher_of(instance: dg.DagsterInstance) -> ElsewhereLauncher:
    launcher = instance.run_launcher
    assert isinstance(launcher, ElsewhereLauncher)
    return launcher


@pytest.mark.long
def test_runs_that_are_launched_elsewhere(daemon: SensorDaemon, source: Source, tmp_path: Path) -> None:
    """From the sensor to the publish, each run on a host of its own; one of them is killed, and its host with it."""
    logging.getLogger("sensors").setLevel(logging.CRITICAL)
    source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int); INSERT INTO orders SELECT g, g FROM generate_series(1, 100) g")
    expected, lake = "SELECT id, total FROM orders ORDER BY id", str(tmp_path / "lake")
    held = tmp_path / "held"
    launcher = launcher_of(daemon.instance)

    def equal() -> bool:
        daemon.tick()
        return any(Path(Lake(lake).current(ORDERS), "_delta_log").glob("*.json")) and orders(lake) == source.sql(expected)

    def idle() -> bool:
        statuses = [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]
        return not daemon.instance.get_runs(dg.RunsFilter(statuses=statuses))

    wait_for(equal, seconds=240, pause=3, what=lambda: f"the first publish\n{logs(tmp_path)}")
    wait_for(idle, seconds=120, what="the first runs' end")
    before = {run.run_id for run in daemon.instance.get_runs()}
    source.sql("UPDATE orders SET total = total + 1 WHERE id % 2 = 0; DELETE FROM orders WHERE id % 10 = 3")
    launcher.failpoints = [f"drain.before_confirm=touch:{held}"]
    daemon.tick()
    wait_for(held.exists, seconds=120, what=lambda: f"a run to come to its drain\n{logs(tmp_path)}")
    (run,) = (run for run in daemon.instance.get_runs() if run.run_id not in before)
    daemon.tick()
    assert len(daemon.instance.get_runs()) == len(before) + 1, "a run that goes on elsewhere counts as active"
    launcher.kill()
    held.unlink()
    wait_for(lambda: not present(source.dsn, [run.run_id]), what="the run that was killed to be gone")

    def ended() -> bool:
        daemon.tick()
        found = daemon.instance.get_run_by_id(run.run_id)
        return found is not None and found.status == dg.DagsterRunStatus.FAILURE

    wait_for(ended, seconds=60, pause=2, what="the run that was killed to be ended")
    wait_for(equal, seconds=240, pause=3, what=lambda: f"the publish after the failure\n{logs(tmp_path)}")
    wait_for(idle, seconds=120, what="the runs' end")
    failures = daemon.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
    assert [failed.run_id for failed in failures] == [run.run_id], logs(tmp_path)
    if elsewhere.hosts_can_be_made():
        named = {found.tags["pgwal/process"].partition("/")[0] for found in daemon.instance.get_runs()}
        assert "pod-1" in named
        assert len(named) > 1


def logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("pod-*/log")))

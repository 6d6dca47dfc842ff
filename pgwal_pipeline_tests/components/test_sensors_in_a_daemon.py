"""What keeps a sensor from looking is a failed tick with the reason, so that an alert can go by it."""

import time
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.scheduler.instigation import TickStatus
from dagster._core.test_utils import freeze_time
from dagster._daemon.freshness import FreshnessDaemon

from pgwal_pipeline.components import sensors
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.components.ticks import sensor_daemon
from pgwal_pipeline_tests.support import Source

SLOT = dg.AssetKey(["slot", "pgwal"])
SENSORS = ("wal_lag", "new_tables")
_AWAY = "postgresql://someone:s3cret@127.0.0.1:1/db"
_UNREADABLE = "postgresql://someone:s3cret@host:port:x/db"


@pytest.mark.parametrize(
    ("dsn", "reason"), [(_AWAY, "127.0.0.1:1/db cannot be reached"), (_UNREADABLE, "PGWAL_SOURCE_DSN"), ("", "PGWAL_SOURCE_DSN is not set")]
)
def test_a_sensor_that_cannot_look_fails_its_tick_with_the_reason(
    dsn: str, reason: str, source: Source, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the lake knows of tables to be read or not; and once the source is there again, ticks are as before."""
    for name, value in {"DAGSTER_HOME": str(tmp_path / "home"), "PGWAL_LAKE": str(tmp_path / "lake"), "PGWAL_SOURCE_DSN": dsn}.items():
        monkeypatch.setenv(name, value)
    for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE", "PGDATABASE", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    with sensor_daemon(instance) as daemon:
        daemon.tick()
        source.sql("CREATE TABLE t (id int PRIMARY KEY)")
        bootstrap(Settings.from_environment({"PGWAL_SOURCE_DSN": source.dsn, "PGWAL_LAKE": str(tmp_path / "lake")}), progress=Silent())
        daemon.tick()
        for sensor in SENSORS:
            ticks = daemon.ticks(sensor)
            assert [tick.status for tick in ticks] == [TickStatus.FAILURE] * 2
            for tick in ticks:
                assert tick.error is not None
                assert reason in str(tick.error)
                assert "s3cret" not in str(tick.error)
                assert (tick.skip_reason, tick.run_ids) == (None, [])
        monkeypatch.setenv("PGWAL_SOURCE_DSN", source.dsn)
        daemon.tick()
        assert all(daemon.ticks(sensor)[0].status != TickStatus.FAILURE for sensor in SENSORS)


def test_a_quiet_source_stays_fresh_and_one_that_is_not_read_does_not(
    source: Source, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Dagster's own evaluation of the slot's policy, over hours of a clock of the test's own."""
    for name, value in {
        "DAGSTER_HOME": str(tmp_path / "home"),
        "PGWAL_LAKE": str(tmp_path / "lake"),
        "PGWAL_SOURCE_DSN": source.dsn,
    }.items():
        monkeypatch.setenv(name, value)
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    bootstrap(settings := Settings.from_environment(), progress=Silent())
    with sensor_daemon(instance) as daemon:
        monkeypatch.setattr(sensors, "time", SimpleNamespace(time=lambda: daemon.now, monotonic=time.monotonic))

        def states(hours: float, *, drained: bool) -> set[FreshnessState]:
            found = set()
            for _ in range(round(hours * 6)):
                if drained:
                    drain(settings, progress=Silent())
                daemon.now += 540
                daemon.tick()
                with freeze_time(daemon.now):
                    for _ in FreshnessDaemon().run_iteration(daemon.context):
                        pass
                found.add(instance.get_freshness_state_records([SLOT])[SLOT].freshness_state)
            return found

        assert states(3, drained=True) == {FreshnessState.PASS}
        source.sql("INSERT INTO t VALUES (1)")  # nobody runs what the sensor asks for
        assert FreshnessState.FAIL in states(1, drained=False)

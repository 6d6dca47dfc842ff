"""The warm engine fails in the middle of a publish: the next one heals it, nothing is lost or doubled, and no table is blamed."""

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark import engine
from pgwal_pipeline.spark.engine_folder import EngineFolder
from pgwal_pipeline.spark.session import find_engine
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source, wait_for

PUBLISH = """
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.pipeline.publish import publish
publish(settings, lambda: spark_session(settings), progress=progress)
"""
TABLES = ("a", "b", "c")
OTHER = '{"spark.driver.memory": "900m", "spark.sql.shuffle.partitions": "1"}'
POINTS = ["publish.in_merge", *(pytest.param(point, marks=pytest.mark.soak) for point in ("table.look", "publish.in_merge@2"))]
POINTS += [pytest.param(point, marks=pytest.mark.soak) for point in ("publish.between_tables", "publish.before_record", "table.merge")]


class Site:
    """Three tables with changes to be published, and publishes of processes of their own on a warm engine."""

    def __init__(self, source: Source, pipeline: Pipeline, folder: Path) -> None:
        self.source, self.pipeline = source, pipeline
        self.held = folder / "held"
        self.folders: list[EngineFolder] = []
        for table in TABLES:
            source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v int); INSERT INTO {table} SELECT i, 0 FROM generate_series(1, 50) i")
        pipeline.sync()

    def change(self) -> None:
        for table in TABLES:
            self.source.sql(f"UPDATE {table} SET v = v + 1 WHERE id <= 10; UPDATE {table} SET id = -id WHERE id = 20")
            self.source.sql(f"INSERT INTO {table} SELECT max(id) + 1, 0 FROM {table}; DELETE FROM {table} WHERE id = 30")
        self.pipeline.drain()

    def environment(self, **more: str) -> dict[str, str]:
        return {"PGWAL_SPARK_IDLE": "10min", "PGWAL_BUSY_TIMEOUT": "60s", **more}

    def folder(self, **more: str) -> EngineFolder:
        found = find_engine(Settings.from_environment(self.pipeline.environment(**self.environment(**more))))
        assert found is not None
        self.folders.append(found)
        return found

    @contextmanager
    def held_at(self, point: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """A publish that stands still at `point` until the context lets it go on, or ends."""
        name, _, nth = point.partition("@")
        points = f"{name}=touch:{self.held}@{nth or 1}"
        environment = self.environment(PGWAL_FAILPOINTS=points, **more)
        with self.pipeline.started(PUBLISH, environment=environment) as process:
            wait_for(lambda: self.held.exists() or process.poll() is not None, seconds=240, what=f"a publish to come to {point}")
            assert process.poll() is None
            yield process

    def publish(self, **more: str) -> subprocess.CompletedProcess[str]:
        return self.pipeline.child(PUBLISH, environment=self.environment(**more), timeout=300)

    def assert_heals(self) -> None:
        """Fail unless the next publish brings everything right."""
        healed = self.publish()
        assert healed.returncode == 0, healed.stderr
        self.assert_right()

    def assert_right(self) -> None:
        self.pipeline.assert_current(*(f"public.{table}" for table in TABLES))
        assert {state.state for state in self.pipeline.ledger.tables().values()} == {"ready"}
        for table in TABLES:
            raw = pl.scan_delta(self.pipeline.lake.raw(TableName("public", table))).select(
                "_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op"
            )
            assert not raw.collect().is_duplicated().any()


@pytest.fixture
def site(source: Source, pipeline: Pipeline, tmp_path: Path) -> Iterator[Site]:
    made = Site(source, pipeline, tmp_path)
    yield made
    for folder in made.folders:
        engine.stop(folder)


def jvm_of(folder: EngineFolder) -> int:
    record = folder.record()
    assert record is not None
    return record.jvm_pid


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_its_jvm_is_killed(point: str, site: Site) -> None:
    site.change()
    folder = site.folder()
    with site.held_at(point) as process:
        os.kill(jvm_of(folder), signal.SIGKILL)
        site.held.unlink()
        process.wait(240)
    site.assert_heals()


@pytest.mark.soak
def test_its_own_process_is_killed(site: Site) -> None:
    site.change()
    folder = site.folder()
    with site.held_at("publish.in_merge") as process:
        pid = folder.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        site.held.unlink()
        process.wait(240)
    site.assert_heals()


@pytest.mark.soak
def test_two_engines_work_on_one_lake(site: Site) -> None:
    """Other settings are another engine: neither ends the other while it is used, and one publish waits for the other."""
    site.change()
    first, second = site.folder(), site.folder(PGWAL_SPARK_CONF=OTHER)
    with site.held_at("publish.in_merge") as process:
        refused = site.publish(PGWAL_SPARK_CONF=OTHER, PGWAL_BUSY_TIMEOUT="1s")
        assert refused.returncode != 0
        assert "(publish) is held by another run (pid" in refused.stderr
        jvm = jvm_of(first)
        with site.pipeline.started(PUBLISH, environment=site.environment(PGWAL_SPARK_CONF=OTHER)) as other:
            time.sleep(5)
            assert other.poll() is None
            site.held.unlink()
            assert process.wait(240) == 0
            assert other.wait(240) == 0
        assert first.record() is None or jvm_of(first) == jvm
    site.assert_right()
    site.change()
    assert site.publish(PGWAL_SPARK_CONF=OTHER).returncode == 0
    site.assert_right()
    assert second.engine_pid() is not None


@pytest.mark.soak
def test_it_hangs_and_comes_back(site: Site) -> None:
    """The run that uses it waits, and so does every other publish, which says for whom; then all goes on."""
    site.change()
    folder = site.folder()
    with site.held_at("publish.in_merge") as process:
        os.kill(jvm_of(folder), signal.SIGSTOP)
        site.held.unlink()
        refused = site.publish(PGWAL_BUSY_TIMEOUT="2s")
        assert refused.returncode != 0
        assert process.poll() is None
        # Whoever came meanwhile did not get an answer and has ended it: the run fails, or it had its answer before.
        process.wait(240)
    site.assert_heals()


@pytest.mark.soak
def test_it_hangs_and_its_run_is_killed(site: Site) -> None:
    site.change()
    folder = site.folder()
    with site.held_at("publish.in_merge") as process:
        jvm = jvm_of(folder)
        os.kill(jvm, signal.SIGSTOP)
        process.kill()
        process.wait()
        site.held.unlink()
    site.assert_heals()
    assert jvm_of(folder) != jvm


@pytest.mark.soak
def test_the_clock_is_set_back(site: Site) -> None:
    """What is written down then lies in the future: locks, not times, say who is alive."""
    site.change()
    folder = site.folder()
    assert site.publish().returncode == 0
    jvm, record = jvm_of(folder), folder.record()
    assert record is not None
    folder.write_record(dataclasses.replace(record, since=record.since + 86400))
    tomorrow = time.time() + 86400
    for path in (folder.path, folder.path / "idle", folder.path / "alive.lock"):
        os.utime(path, (tomorrow, tomorrow))
    assert engine.status(folder)["running"]
    site.change()
    assert site.publish().returncode == 0
    site.assert_right()
    assert jvm_of(folder) == jvm

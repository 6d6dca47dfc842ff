"""A source that is set back to an older copy of itself, slot included, and grows past what the lake has: a gap, never silence."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import LakeError, SlotLost
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source, fresh_source


@contextmanager
def copied(source: Source, folder: Path) -> Iterator[Callable[[], None]]:
    """Take a copy of the server's volume now; calling what is given sets the server back to it."""
    server: Postgres = source.server
    data, copy = server.data_dir, folder / "copy"
    source.close()
    server.stop()
    subprocess.run(["cp", "-a", data, copy], check=True)
    server.start()

    def set_back() -> None:
        source.close()
        server.stop()
        shutil.rmtree(data)
        subprocess.run(["cp", "-a", copy, data], check=True)
        server.start()

    yield set_back
    shutil.rmtree(copy, ignore_errors=True)


@contextmanager
def followed(make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any, **settings: Any) -> Iterator[Pipeline]:
    with fresh_source(make_server()) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        source.sql("CREATE TABLE elsewhere (id int)")
        source.sql("INSERT INTO t SELECT i, 'first' FROM generate_series(1, 500) i")
        pipeline = make_pipeline(source_dsn=source.dsn, tables="public.t", **settings)
        pipeline.source, pipeline.spark = source, lambda: spark
        pipeline.sync()
        yield pipeline


def grow_past(source: Source, lsn: int | None, statement: str) -> None:
    assert lsn is not None
    while parse_lsn(source.value("SELECT pg_current_wal_flush_lsn()::text")) < lsn + 10_000:
        source.sql(statement)


def test_a_source_that_was_set_back_is_a_gap(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any, tmp_path: Path
) -> None:
    with followed(make_server, make_pipeline, spark) as pipeline:
        source = pipeline.source
        with copied(source, tmp_path) as set_back:
            source.sql("INSERT INTO t SELECT i, 'abandoned' FROM generate_series(1000, 1100) i")
            pipeline.drain()
            pipeline.publish()
            frontier = pipeline.ledger.frontier()
            set_back()
            grow_past(source, frontier, "INSERT INTO t SELECT coalesce(max(id), 0) + 1, 'second' FROM t")
            for _ in range(2):
                with pytest.raises(SlotLost, match=r"set back to an older copy.*gap.*resnapshot --all"):
                    pipeline.drain()
            drains.renew(pipeline.settings, progress=Silent())
            pipeline.sync()
            pipeline.assert_current("public.t")
            source.sql("DELETE FROM t WHERE id % 3 = 0")
            pipeline.drain()
            pipeline.publish()
            pipeline.assert_current("public.t")


def test_nothing_comes_where_the_lake_had_changes(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any, tmp_path: Path
) -> None:
    """The new WAL has no change of a followed table: the tail never comes. With the policy it is mended by itself."""
    with followed(make_server, make_pipeline, spark, on_slot_loss="resnapshot") as pipeline:
        source = pipeline.source
        with copied(source, tmp_path) as set_back:
            source.sql("INSERT INTO t VALUES (1000, 'abandoned')")
            pipeline.drain()
            pipeline.publish()
            frontier = pipeline.ledger.frontier()
            set_back()
            grow_past(source, frontier, "INSERT INTO elsewhere SELECT generate_series(1, 100)")
            report = pipeline.drain()
            assert any("set back to an older copy" in warning for warning in report.warnings)
            pipeline.sync()
            pipeline.assert_current("public.t")


def test_changes_come_where_the_lake_had_none(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any, tmp_path: Path
) -> None:
    """The lake has read on over WAL without a change; the source, set back, has changes there, which would be skipped."""
    with followed(make_server, make_pipeline, spark) as pipeline:
        source = pipeline.source
        source.sql("INSERT INTO t VALUES (999, 'before')")
        pipeline.drain()
        with copied(source, tmp_path) as set_back:
            for _ in range(200):
                source.sql("INSERT INTO elsewhere SELECT generate_series(1, 100)")
            pipeline.drain()
            frontier = pipeline.ledger.frontier()
            set_back()
            grow_past(source, frontier, "INSERT INTO t SELECT max(id) + 1, 'second' FROM t")
            with pytest.raises(SlotLost, match=r"which the lake does not have.*gap"):
                pipeline.drain()


def test_a_slot_that_a_crash_gave_back_a_little_earlier_goes_on(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any
) -> None:
    with followed(make_server, make_pipeline, spark) as pipeline:
        source = pipeline.source
        source.sql("CHECKPOINT")
        for number in range(20):
            source.sql("INSERT INTO t VALUES (%s, 'x')", 1000 + number)
            if number % 5 == 0:
                pipeline.drain()
        frontier = pipeline.ledger.frontier()
        source.close()
        source.server.kill()
        source.server.start()
        given_back = parse_lsn(source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots"))
        assert frontier is not None
        assert given_back < frontier, "the slot stands earlier than the lake"
        report = pipeline.drain()
        assert report.changes == 4
        pipeline.publish()
        pipeline.assert_current("public.t")


def test_an_older_copy_that_is_still_behind_is_refused_as_before(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any, tmp_path: Path
) -> None:
    with followed(make_server, make_pipeline, spark) as pipeline, copied(pipeline.source, tmp_path) as set_back:
        pipeline.source.sql("INSERT INTO t SELECT i, 'abandoned' FROM generate_series(1000, 3000) i")
        pipeline.drain()
        set_back()
        with pytest.raises(LakeError, match="older copy of the source"):
            pipeline.drain()

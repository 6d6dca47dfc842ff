"""What a drain, a publish or maintenance meets while a table is read, and what a publish meets that others have done to `current`."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import current, isolation, rewrite, upkeep
from pgwal_pipeline.lake import maintenance as lakes
from pgwal_pipeline.lake.ledger import TablePointer, TableState
from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.maintenance import maintain
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.postgres import copy
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import READ, WRITTEN, at_each_pass
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.tables.altering import while_the_stream_is_read
from pgwal_pipeline_tests.support import Source

T, OTHER = TableName("public", "t"), TableName("public", "other")


@pytest.fixture
def reading(source: Source, make_pipeline: Callable[..., Pipeline], spark: Any) -> Pipeline:
    """A pipeline that reads `t`, of 20 rows, in three chunks one after the other."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    source.sql("INSERT INTO t SELECT i, repeat('v', 3000) || i FROM generate_series(1, 20) i; ANALYZE t")
    made = make_pipeline(snapshot_chunk_rows=7, snapshot_workers=1)
    made.spark = lambda: spark
    drains.bootstrap(made.settings, progress=Silent())
    return made


def pointer(pipeline: Pipeline, table: TableName) -> TablePointer | None:
    publish = pipeline.ledger.publish()
    assert publish is not None
    return publish.tables.get(table)


def in_error(pipeline: Pipeline, table: TableName) -> None:
    def decide(known: Any) -> list[TableState]:
        return [replace(known[table], state="error", reason="it was refused")]

    pipeline.ledger.amend_tables(decide)


def test_what_a_drain_finds_about_a_table_outlives_the_reading_of_it(reading: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def alter(passed: int) -> None:
        if passed == 2:  # all has been read, in the columns of before
            reading.source.sql("ALTER TABLE t ADD COLUMN c int DEFAULT 5")
            reading.drain()

    at_each_pass(monkeypatch, READ, alter)
    reading.snapshot()
    monkeypatch.undo()
    assert snapshots.needed(reading.settings) == (T,)
    assert "was added with a default" in (reading.ledger.tables()[T].reason or "")
    reading.snapshot()
    reading.drain()
    reading.publish()
    reading.assert_current("public.t")


def test_maintenance_leaves_the_rows_of_a_reading_whose_chunks_are_still_looked_for(
    reading: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, plan = threading.Event(), copy.plan_chunks

    def slow(*args: Any) -> Iterator[copy.ChunkBounds]:
        bounds = plan(*args)
        yield next(bounds)
        assert written.wait(120)
        lakes.forget(reading.lake, reading.ledger, datetime.now(UTC))
        yield from bounds

    monkeypatch.setattr(copy, "plan_chunks", slow)
    monkeypatch.setattr(failpoints, "hit", lambda name: written.set() if name == WRITTEN else None)
    reading.snapshot()
    monkeypatch.undo()
    reading.drain()
    reading.publish()
    reading.assert_current("public.t")


def test_a_table_in_error_is_in_no_publish_until_it_is_read_again(reading: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    reading.source.sql("CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)")
    reading.sync()
    in_error(reading, T)
    reading.source.sql("UPDATE t SET id = id + 100 WHERE id = 3; INSERT INTO other VALUES (2)")
    reading.drain()
    reading.publish()
    assert pointer(reading, T) is None
    with pytest.raises(SourceRefused, match=r"public\.t has no published current"):
        verify(reading.settings, reading.spark, [T], progress=Silent())
    compared = verify(reading.settings, reading.spark, progress=Silent())
    assert (compared.equal, set(compared.tables)) == (True, {OTHER})

    def publish(passed: int) -> None:
        reading.source.sql(f"INSERT INTO other VALUES ({10 + passed})")
        reading.drain()
        reading.publish()
        assert pointer(reading, T) is None

    at_each_pass(monkeypatch, READ, publish)
    snapshots.snapshot(reading.settings, [T], progress=Silent())
    monkeypatch.undo()
    reading.drain()
    reading.publish()
    reading.assert_current("public.t", "public.other")


def test_a_publish_names_the_newest_version_of_a_table_that_did_not_change(reading: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance made it, whose older files go one day; or a replacement that died before it was in a publish."""
    monkeypatch.setattr(rewrite, "_ROWS", -1)
    monkeypatch.setattr(isolation, "_FEW_ROWS", -1)
    monkeypatch.setattr(upkeep, "_SMALL_FILES", 2)
    monkeypatch.setattr(upkeep, "_TINY", 0)
    reading.source.sql("CREATE TABLE other (id int PRIMARY KEY)")
    reading.sync()
    for number in range(2):
        reading.source.sql(f"UPDATE t SET v = 'w' WHERE id = {number + 1}")
        reading.sync()
    path = reading.lake.current(T)
    before = reading.ledger.publish()
    assert before is not None
    maintain(reading.settings, reading.spark, progress=Silent())
    assert current.version(path) > before.tables[T].version
    assert pointer(reading, T) == TablePointer(path, current.version(path))
    assert [publish.lsn for publish in reading.ledger.publishes()].count(before.lsn) == 1
    upkeep.set_properties(reading.spark(), path, {"pgwal.test": "1"})
    reading.source.sql("UPDATE t SET v = 'x' WHERE id = 9; INSERT INTO other VALUES (1)")
    reading.sync()
    upkeep.set_properties(reading.spark(), path, {"pgwal.test": "2"})
    reading.source.sql("INSERT INTO other VALUES (2)")
    reading.sync()
    assert pointer(reading, T) == TablePointer(path, current.version(path))

    def die(name: str) -> None:
        if name == "publish.before_record":
            raise KeyboardInterrupt

    snapshots.snapshot(reading.settings, [T], progress=Silent())
    reading.drain()
    monkeypatch.setattr(failpoints, "hit", die)
    with pytest.raises(KeyboardInterrupt):
        reading.publish()
    monkeypatch.undo()
    reading.publish()
    assert pointer(reading, T) == TablePointer(path, current.version(path))
    reading.assert_current("public.t", "public.other")


def test_a_column_that_no_row_has_yet_is_there_after_the_next_run(reading: Pipeline) -> None:
    reading.sync()
    reading.source.sql('ALTER TABLE t ADD COLUMN c int, ADD COLUMN "De" text')
    reading.sync()
    now = pointer(reading, T)
    assert now is not None
    assert pl.scan_delta(now.path, version=now.version).collect_schema().names()[:4] == ["id", "v", "c", "De"]
    assert {"c", "De"} <= {field.name for field in DeltaTable(reading.lake.raw(T)).schema().fields}
    assert verify(reading.settings, reading.spark, progress=Silent()).equal
    reading.sync()
    assert pointer(reading, T) == now
    reading.source.sql("UPDATE t SET c = id WHERE id < 5")
    reading.sync()
    reading.assert_current("public.t")


def test_another_table_that_takes_the_name_is_not_merged_into_it(
    source: Source, make_pipeline: Callable[..., Pipeline], spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT i, 'old' FROM generate_series(1, 5) i")
    source.sql("CREATE PUBLICATION everything FOR ALL TABLES")
    pipeline = make_pipeline(publication="everything")
    pipeline.spark = lambda: spark
    pipeline.sync()

    def anew() -> None:
        source.sql("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (9, 'new')")

    while_the_stream_is_read(pipeline, monkeypatch, anew)
    pipeline.publish()
    assert pointer(pipeline, T) is None
    pipeline.sync()
    pipeline.assert_current("public.t")


def test_a_replica_identity_that_was_another_for_a_while(source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows then have another key than the table: their deletes would meet nothing."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL); CREATE UNIQUE INDEX by_code ON t (code)")
    source.sql("INSERT INTO t SELECT i, 'c' || i FROM generate_series(1, 5) i")
    pipeline.sync()

    def to_and_fro() -> None:
        source.sql("ALTER TABLE t REPLICA IDENTITY USING INDEX by_code")
        source.sql("DELETE FROM t WHERE id = 3")
        source.sql("UPDATE t SET id = 40 WHERE id = 4")
        source.sql("ALTER TABLE t REPLICA IDENTITY DEFAULT")

    while_the_stream_is_read(pipeline, monkeypatch, to_and_fro)
    assert snapshots.needed(pipeline.settings) == (T,)
    pipeline.snapshot()
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.t")
    to_and_fro()
    source.sql("UPDATE t SET id = 50 WHERE id = 5")
    pipeline.sync()
    pipeline.sync()
    pipeline.assert_current("public.t")

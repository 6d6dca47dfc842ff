"""`deletes: keep`: `current` keeps each row that was deleted, with its last values and when that was."""

import os
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.published.state import PublishedState, open_state
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline, killed
from pgwal_pipeline_tests.support import Source

KEEP = {"deletes": "keep"}
T, NEIGHBOR = TableName("public", "t"), TableName("public", "neighbor")
_PUBLISH = "from pgwal_pipeline.pipeline.publish import publish\nfrom pgwal_pipeline.spark.session import spark_session\n"
_PUBLISH += "publish(settings, lambda: spark_session(settings), progress=progress)"


def keeping(pipeline: Pipeline, options: dict[str, Any] | None = None, table: str = "public.t") -> Pipeline:
    """The same pipeline, which keeps the deleted rows of a table."""
    given = {**pipeline.settings.model_dump(exclude_unset=True), "table_options": {table: KEEP if options is None else options}}
    return Pipeline(pipeline.source, type(pipeline.settings).from_environment({}, **given), pipeline.spark)


def frame(pipeline: Pipeline, table: TableName = T) -> pl.DataFrame:
    return pl.read_delta(pipeline.lake.current(table))


def deleted(pipeline: Pipeline, table: TableName = T) -> dict[Any, Any]:
    """The deleted rows: their last value by key."""
    rows = frame(pipeline, table).filter(pl.col("_pgwal_deleted_lsn").is_not_null())
    assert (rows["_pgwal_deleted_lsn"] == rows["_pgwal_commit_lsn"]).all()
    assert rows["_pgwal_deleted_at"].null_count() == 0
    return dict(rows.select("id", "v").rows())


def living(pipeline: Pipeline, table: TableName = T) -> dict[Any, Any]:
    rows = frame(pipeline, table)
    return dict(rows.filter(pl.col("_pgwal_deleted_lsn").is_null()).select("id", "v").rows())


def make(source: Source) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, i FROM generate_series(1, 6) i")
    source.sql("CREATE TABLE neighbor (id int PRIMARY KEY, v int); INSERT INTO neighbor SELECT i, i FROM generate_series(1, 6) i")


def test_rows_that_are_deleted_stay_and_come_back(source: Source, pipeline: Pipeline) -> None:
    make(source)
    keeps = keeping(pipeline)
    keeps.sync()
    before = open_state(keeps.settings)
    source.sql("UPDATE t SET v = 20 WHERE id = 2; DELETE FROM t WHERE id IN (1, 2)")
    source.sql("UPDATE t SET id = 33 WHERE id = 3; INSERT INTO t VALUES (7, 7)")
    source.sql("DELETE FROM t WHERE id = 7; DELETE FROM neighbor WHERE id = 1")  # 7 came and went between two publishes
    keeps.sync()
    assert deleted(keeps) == {1: 1, 2: 20, 3: 3, 7: 7}
    assert living(keeps) == {4: 4, 5: 5, 6: 6, 33: 3}
    raw = pl.read_delta(keeps.lake.raw(T)).filter(pl.col("_pgwal_op").is_in(["D", "K"]))
    assert set(raw.select("id", "_pgwal_commit_lsn", "_pgwal_committed_at").rows()) == set(
        frame(keeps).drop_nulls("_pgwal_deleted_lsn").select("id", "_pgwal_deleted_lsn", "_pgwal_deleted_at").rows()
    )
    assert frame(keeps).columns == ["id", "v", "_pgwal_commit_lsn", "_pgwal_text", "_pgwal_deleted_at", "_pgwal_deleted_lsn"]
    assert frame(keeps, NEIGHBOR).columns == ["id", "v", "_pgwal_commit_lsn", "_pgwal_text"]
    assert frame(keeps, NEIGHBOR)["id"].sort().to_list() == [2, 3, 4, 5, 6]
    report = verify(keeps.settings, keeps.spark, progress=Silent())
    assert report.equal
    assert report.tables[T].rows == 4
    shown = status(keeps.settings)["tables"]["public.t"]
    assert (shown["rows"], shown["options"]) == (4, KEEP)
    _assert_changes(keeps, before, {1: "delete", 2: "delete", 3: "delete", 33: "insert"})
    between = open_state(keeps.settings)
    # Who reads what is published sees the deleted rows too.
    assert between.arrow("public.t").num_rows == between.polars("public.t").collect().height == 8
    assert between.duckdb().sql("SELECT count(*), count(_pgwal_deleted_lsn) FROM public.t").fetchall() == [(8, 4)]
    source.sql("INSERT INTO t VALUES (1, 100); UPDATE t SET v = 40 WHERE id = 4")
    keeps.sync()
    assert deleted(keeps) == {2: 20, 3: 3, 7: 7}
    assert living(keeps) == {1: 100, 4: 40, 5: 5, 6: 6, 33: 3}
    _assert_changes(keeps, between, {1: "insert", 4: "update"})
    whole = open_state(keeps.settings).changes("public.t")
    assert sorted(whole.arrow()["id"].to_pylist()) == sorted(whole.polars().collect()["id"]) == [1, 4, 5, 6, 33]
    at = open_state(keeps.settings)
    source.sql("TRUNCATE t; INSERT INTO t VALUES (2, 2)")
    keeps.sync()
    assert deleted(keeps) == {1: 100, 3: 3, 4: 40, 5: 5, 6: 6, 7: 7, 33: 3}
    assert living(keeps) == {2: 2}
    _assert_changes(keeps, at, {2: "insert"} | dict.fromkeys((1, 4, 5, 6, 33), "delete"), spark=True)


def _assert_changes(pipeline: Pipeline, since: PublishedState, wanted: dict[int, str], *, spark: bool = False) -> None:
    found = open_state(pipeline.settings).changes("public.t", since)
    assert not found.complete, found.reason
    assert dict(zip(*(found.arrow()[name].to_pylist() for name in ("id", "_pgwal_change")), strict=True)) == wanted
    if spark:  # it is the same query
        assert {row["id"]: row["_pgwal_change"] for row in found.spark(pipeline.spark()).collect()} == wanted


def test_the_option_comes_goes_and_comes_again(source: Source, pipeline: Pipeline) -> None:
    make(source)
    pipeline.sync()
    source.sql("DELETE FROM t WHERE id = 1; DELETE FROM neighbor WHERE id = 1")
    pipeline.sync()
    generation, neighbor = pipeline.ledger.tables()[T].generation, frame(pipeline, NEIGHBOR)
    keeps = keeping(pipeline)
    keeps.sync()  # nothing was written since
    assert (deleted(keeps), len(living(keeps))) == ({}, 5)
    source.sql("DELETE FROM t WHERE id = 2")
    keeps.sync()
    assert deleted(keeps) == {2: 2}
    pipeline.sync()
    assert frame(pipeline).columns == ["id", "v", "_pgwal_commit_lsn", "_pgwal_text"]
    pipeline.assert_current("public.t", "public.neighbor")
    source.sql("DELETE FROM t WHERE id = 3")
    pipeline.sync()
    source.sql("DELETE FROM t WHERE id = 4")
    keeps.sync()  # the option and the deletion in one publish
    assert deleted(keeps) == {4: 4}
    assert living(keeps) == {5: 5, 6: 6}
    assert pipeline.ledger.tables()[T].generation == generation
    assert frame(pipeline, NEIGHBOR).equals(neighbor)


def test_a_table_that_is_read_again(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE t (id int, v int, w text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
    source.sql("CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10); CREATE TABLE high PARTITION OF t FOR VALUES FROM (10) TO (20)")
    source.sql("INSERT INTO t SELECT i, i, 'w' FROM generate_series(8, 12) i")
    keeps = keeping(pipeline)
    keeps.sync()
    source.sql("DELETE FROM t WHERE id = 8")
    keeps.sync()
    began, first = datetime.now(UTC), frame(keeps).filter(pl.col("id") == 8)
    source.sql("DELETE FROM t WHERE id = 9; ALTER TABLE t DETACH PARTITION high; UPDATE t SET v = 0")
    source.sql("ALTER TABLE t ALTER v TYPE bigint; INSERT INTO t VALUES (5, 5)")
    keeps.sync()
    keeps.sync()
    assert keeps.ledger.tables()[T].state == "ready"
    assert deleted(keeps) == {8: 8, 9: 9, 10: 10, 11: 11, 12: 12}
    assert living(keeps) == {5: 5}
    marks = {row["id"]: (row["_pgwal_deleted_lsn"], row["_pgwal_deleted_at"]) for row in frame(keeps).iter_rows(named=True)}
    assert marks[8] == (first["_pgwal_deleted_lsn"][0], first["_pgwal_deleted_at"][0])
    assert len({marks[number] for number in (10, 11, 12)}) == 1
    assert began < marks[10][1] < datetime.now(UTC)
    assert marks[10][0] == keeps.ledger.tables()[T].required_lsn
    assert frame(keeps).filter(pl.col("id") == 10)["w"].to_list() == ["w"]
    keeps.resnapshot("public.t")
    assert deleted(keeps) == {8: 8, 9: 9, 10: 10, 11: 11, 12: 12}
    assert {row["id"]: (row["_pgwal_deleted_lsn"], row["_pgwal_deleted_at"]) for row in frame(keeps).iter_rows(named=True)} == marks
    # A protected column: what was kept from before may not stay.
    hashed = keeping(keeps, {**KEEP, "exclude": ["w"]})
    hashed.sync()
    hashed.sync()
    assert (deleted(hashed), living(hashed)) == ({}, {5: 5})


def test_rows_that_leave_the_filter(source: Source, pipeline: Pipeline) -> None:
    make(source)
    source.sql("ALTER TABLE t REPLICA IDENTITY FULL")
    keeps = keeping(pipeline, {**KEEP, "rows": "v < 5"})
    keeps.sync()
    source.sql("UPDATE t SET v = 9 WHERE id = 1; UPDATE t SET v = 1 WHERE id = 6; DELETE FROM t WHERE id = 5")
    keeps.sync()
    assert deleted(keeps) == {1: 1}
    assert living(keeps) == {2: 2, 3: 3, 4: 4, 6: 1}


def test_a_table_without_a_key(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE t (id int, v int); ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t VALUES (1, 1), (1, 1), (1, 1), (2, 2)")
    keeps = keeping(pipeline)

    def copies() -> list[tuple[int, int, bool]]:
        return sorted(frame(keeps).select("id", "v", pl.col("_pgwal_deleted_lsn").is_not_null()).rows())

    keeps.sync()
    source.sql("DELETE FROM t WHERE ctid IN (SELECT ctid FROM t WHERE id = 1 LIMIT 2); UPDATE t SET v = 3 WHERE id = 2")
    keeps.sync()
    assert copies() == [(1, 1, False), (1, 1, True), (1, 1, True), (2, 2, True), (2, 3, False)]
    source.sql("INSERT INTO t VALUES (4, 4); TRUNCATE t; INSERT INTO t VALUES (1, 1)")
    keeps.sync()
    assert copies() == [(1, 1, False), (1, 1, True), (1, 1, True), (1, 1, True), (2, 2, True), (2, 3, True), (4, 4, True)]
    source.sql("DELETE FROM t")
    keeps.resnapshot("public.t")
    assert [copy for copy in copies() if not copy[2]] == []
    assert len(copies()) == 7
    assert verify(keeps.settings, keeps.spark, progress=Silent()).equal


@pytest.mark.soak
@pytest.mark.parametrize("point", ["publish.in_merge", "publish.in_merge@2", "publish.between_tables", "publish.before_record"])
@pytest.mark.parametrize("change", ["DELETE FROM t WHERE id < 3", "TRUNCATE t", "on", "off"])
def test_killed_in_a_publish(source: Source, pipeline: Pipeline, point: str, change: str) -> None:
    make(source)
    keeps = keeping(pipeline)
    (pipeline if change == "on" else keeps).sync()
    source.sql("DELETE FROM t WHERE id = 6")
    if change not in ("on", "off"):
        source.sql(change)
    (pipeline if change == "on" else keeps).drain()
    options = "{}" if change == "off" else '{"public.t": {"deletes": "keep"}}'
    name, _, at = point.partition("@")
    killed(pipeline, _PUBLISH, name, PGWAL_FAILPOINTS=f"{name}=kill{'@' + at if at else ''}", PGWAL_TABLE_OPTIONS=options)
    (pipeline if change == "off" else keeps).publish()
    pipeline.assert_current("public.t", "public.neighbor")
    if change == "off":
        assert "_pgwal_deleted_lsn" not in frame(pipeline).columns
    else:
        assert deleted(keeps) == {6: 6} | ({} if change == "on" else {n: n for n in range(1, 6) if change == "TRUNCATE t" or n < 3})


class Model:
    """One writer's table, and the rows that it lost, by key."""

    def __init__(self, source: Source, rng: random.Random) -> None:
        self.source, self.rng = source, rng
        self.rows: dict[int, tuple[int, str]] = {}
        self.gone: dict[int, tuple[int, str]] = {}
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v int, body text)")

    def transaction(self) -> None:
        rows, gone = dict(self.rows), dict(self.gone)
        statements = [self._statement(rows, gone) for _ in range(self.rng.randint(1, 5))]
        if self.rng.random() < 0.1:
            self.source.sql(f"BEGIN; {'; '.join(statements)}; ROLLBACK")
            return
        self.source.sql(f"BEGIN; {'; '.join(statements)}; COMMIT")
        self.rows, self.gone = rows, gone

    def _statement(self, rows: dict[int, Any], gone: dict[int, Any]) -> str:
        key, kind = self.rng.randrange(30), self.rng.random()
        if kind < 0.03:
            gone.update(rows)
            rows.clear()
            return "TRUNCATE t"
        if key not in rows:
            rows[key] = (self.rng.randrange(100), f"{key}-" * self.rng.choice((1, 2000)))
            gone.pop(key, None)
            return f"INSERT INTO t VALUES ({key}, {rows[key][0]}, '{rows[key][1]}')"
        free = self.rng.choice([other for other in range(30) if other not in rows] or [None])
        if kind < 0.4 or free is None:
            gone[key] = rows.pop(key)
            return f"DELETE FROM t WHERE id = {key}"
        if kind < 0.6:
            gone[key] = rows.pop(key)
            rows[free] = gone[key]
            gone.pop(free, None)
            return f"UPDATE t SET id = {free} WHERE id = {key}"
        rows[key] = (self.rng.randrange(100), rows[key][1])
        return f"UPDATE t SET v = {rows[key][0]} WHERE id = {key}"


def _random_rounds(source: Source, pipeline: Pipeline, seed: int, rounds: int) -> None:
    model = Model(source, random.Random(seed))
    keeps = keeping(pipeline)
    keeps.sync()
    for number in range(rounds):
        for _ in range(model.rng.choice((1, 5, 40))):
            model.transaction()
        if model.rng.random() < 0.2:
            keeps.resnapshot("public.t")
        else:
            keeps.sync()
        found = frame(keeps)
        assert found["id"].is_unique().all()
        shown = [{row[0]: row[1:3] for row in found.filter(kept).iter_rows()} for kept in _sides()]
        assert shown == [model.rows, model.gone], f"seed {seed}, round {number}"
        raw = pl.read_delta(keeps.lake.raw(T))
        ends = raw.filter(pl.col("_pgwal_op").is_in(["D", "K"])).group_by("id").agg(pl.col("_pgwal_commit_lsn").max())
        truncates, lost = raw.filter(pl.col("_pgwal_op") == "T")["_pgwal_commit_lsn"].to_list(), dict(ends.iter_rows())
        for key, at in found.drop_nulls("_pgwal_deleted_lsn").select("id", "_pgwal_deleted_lsn").iter_rows():
            assert at == lost.get(key) or at in truncates, f"seed {seed}, round {number}, key {key}"


def _sides() -> tuple[pl.Expr, pl.Expr]:
    return pl.col("_pgwal_deleted_lsn").is_null(), pl.col("_pgwal_deleted_lsn").is_not_null()


def test_random_work_in_short(source: Source, pipeline: Pipeline) -> None:
    _random_rounds(source, pipeline, int(os.environ.get("PGWAL_TEST_SEED", "4")), 2)


@pytest.mark.soak
def test_random_work_for_long(postgres: Any, make_pipeline: MakePipeline, spark: Any, tmp_path: Path) -> None:
    """Seed after seed, for a quarter of PGWAL_SOAK_MINUTES."""
    from pgwal_pipeline_tests.support import fresh_source

    end, seed = time.monotonic() + 15 * float(os.environ.get("PGWAL_SOAK_MINUTES", "240")), 1000
    while time.monotonic() < end:
        with fresh_source(postgres) as source:
            pipeline = make_pipeline(source_dsn=source.dsn, lake=str(tmp_path / f"lake{seed}"))
            pipeline.source, pipeline.spark = source, lambda: spark
            _random_rounds(source, pipeline, seed, 12)
        seed += 1

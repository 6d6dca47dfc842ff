"""From source to `current`, compared with the source itself: snapshots beside writers, one LSN for all tables, and kills on the way."""

import random
import threading
from collections.abc import Mapping
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source

ALL_TYPES = """CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy'); CREATE DOMAIN price AS numeric(10, 2);
CREATE TABLE kinds (id bigint PRIMARY KEY, b bool, i2 int2, i4 int4, f4 float4, f8 float8, o oid, n numeric(12, 4), nn numeric, m money,
d date, ts timestamp, tz timestamptz, by bytea, t text, vc varchar(20), c char(5), j json, jb jsonb, u uuid, e mood, tm time, iv interval,
ip inet, bits bit(4), r int4range, p point, dom price)"""


def fill_kinds(source: Source, first: int, last: int) -> None:
    source.sql(
        f"""INSERT INTO kinds SELECT i, i % 2 = 0, i % 100, i, i / 3.0, i / 7.0, i, i / 9.0, i / 11.0, i, date '2000-01-01' + i::int,
        timestamp '1999-12-31 23:59:59.123456' + i * interval '1 hour', timestamptz '2000-01-01 00:00:00+02' + i * interval '1 min',
        decode(lpad(to_hex(i), 8, '0'), 'hex'), CASE WHEN i % 5 = 0 THEN NULL ELSE 'tëxt ' || i END, 'v' || i, 'c' || i % 10,
        json_build_object('k', i), jsonb_build_object('k', i), md5(i::text)::uuid, 'ok', time '12:00' + i * interval '1 s',
        i * interval '1 day', '10.0.0.1', B'0101', int4range(i::int, i::int + 5), point(i, -i), i / 3.0
        FROM generate_series({first}, {last}) i"""
    )


def test_current_equals_the_source_by_snapshot_and_by_stream(source: Source, pipeline: Pipeline) -> None:
    source.sql(ALL_TYPES)
    source.sql("CREATE TABLE lists (id int PRIMARY KEY, ints int[], texts text[], prices numeric(8, 2)[])")
    source.sql("CREATE TABLE bag (a int, b text)")
    source.sql("ALTER TABLE bag REPLICA IDENTITY FULL")
    fill_kinds(source, 1, 50)
    source.sql("INSERT INTO lists VALUES (1, '{1,2,NULL}', '{a,\"b, c\",NULL,\"\"}', '{1.50,2}'), (2, '{}', NULL, NULL)")
    source.sql("INSERT INTO bag VALUES (1, 'x'), (1, 'x'), (1, 'x'), (2, NULL), (2, NULL)")
    pipeline.sync()
    pipeline.assert_current("public.kinds", "public.lists", "public.bag")
    fill_kinds(source, 51, 80)
    source.sql("UPDATE kinds SET t = 'changed', f8 = 'NaN', f4 = '-Infinity' WHERE id % 3 = 0")
    source.sql("DELETE FROM kinds WHERE id % 7 = 0")
    source.sql("UPDATE kinds SET id = id + 1000 WHERE id % 11 = 0")
    source.sql("INSERT INTO lists VALUES (3, '{3}', '{\"q\"\"uote\"}', '{}')".replace('""', '\\"'))
    source.sql("UPDATE lists SET texts = NULL WHERE id = 1")
    source.sql("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 1)")
    source.sql("UPDATE bag SET b = 'now' WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 2)")
    source.sql("INSERT INTO bag VALUES (3, 'z'), (3, 'z')")
    pipeline.sync()
    pipeline.assert_current("public.kinds", "public.lists", "public.bag")
    assert pipeline.ledger.frontier() == pipeline.ledger.publish().lsn  # pyright: ignore[reportOptionalMemberAccess]


def test_truncate_and_unchanged_toast(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE docs (id int PRIMARY KEY, n int, body text)")
    source.sql("ALTER TABLE docs ALTER body SET STORAGE EXTERNAL")
    source.sql("INSERT INTO docs SELECT i, 0, repeat(md5(i::text), 300) FROM generate_series(1, 10) i")
    pipeline.sync()
    source.sql("UPDATE docs SET n = 1 WHERE id <= 3")
    source.sql("UPDATE docs SET id = 100 WHERE id = 4")
    source.sql("UPDATE docs SET id = 101, n = 5 WHERE id = 100")
    source.sql("INSERT INTO docs VALUES (11, 0, repeat('z', 9000))")
    source.sql("UPDATE docs SET n = 2 WHERE id = 11")
    pipeline.sync()
    pipeline.assert_current("public.docs")
    source.sql("BEGIN; INSERT INTO docs VALUES (50, 1, 'lost'); TRUNCATE docs; INSERT INTO docs VALUES (51, 1, repeat('k', 9000)); COMMIT")
    source.sql("UPDATE docs SET n = 9")
    pipeline.sync()
    pipeline.assert_current("public.docs")


def transfer(conn: Connection, rng: random.Random) -> None:
    """Move money between rows of three tables: their sum never changes."""
    tables = rng.sample(["checking", "savings", "shares"], 2)
    amount = rng.randint(1, 50)
    with conn.transaction():
        for table, change in zip(sorted(tables), (amount, -amount), strict=True):
            conn.execute(f"UPDATE {table} SET amount = amount + %s WHERE id = %s".encode(), [change, rng.randint(1, 20)])


def sum_at(tables: Mapping[TableName, Any]) -> int:
    return sum(
        pl.scan_delta(pointer.path, version=pointer.version).select(pl.col("amount").sum()).collect().item() for pointer in tables.values()
    )


def test_every_publish_is_one_transactional_state(source: Source, pipeline: Pipeline) -> None:
    for table in ("checking", "savings", "shares"):
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, amount int NOT NULL)")
        source.sql(f"INSERT INTO {table} SELECT i, 1000 FROM generate_series(1, 20) i")
    stop = threading.Event()

    def work(seed: int) -> None:
        rng, conn = random.Random(seed), source.connect()
        while not stop.wait(rng.random() * 0.02):
            transfer(conn, rng)

    writers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(2):
            pipeline.sync()
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    pipeline.sync()
    publishes = [publish for publish in pipeline.ledger.publishes() if len(publish.tables) == 3]
    assert len(publishes) >= 3
    assert {sum_at(publish.tables) for publish in publishes} == {60000}
    pipeline.assert_current("public.checking", "public.savings", "public.shares")


def test_single_table_by_hand_changes_nothing_for_the_others(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    source.sql("CREATE TABLE b (id int PRIMARY KEY)")
    first = pipeline.sync()
    source.sql("INSERT INTO a VALUES (1)")
    source.sql("INSERT INTO b VALUES (1)")
    pipeline.drain()
    pipeline.publish([TableName("public", "a")])
    alone = pipeline.ledger.publish()
    assert alone is not None
    assert alone.lsn == first.lsn
    pipeline.publish()
    pipeline.assert_current("public.a", "public.b")


POINTS = [
    "publish.in_merge",
    pytest.param("publish.between_tables", marks=pytest.mark.soak),
    pytest.param("publish.before_record", marks=pytest.mark.soak),
    "publish.after_record",
]
PUBLISH = """
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.pipeline.publish import publish
publish(settings, lambda: spark_session(settings), progress=progress)
"""


@pytest.mark.parametrize("point", POINTS)
def test_killed_publish_is_taken_up(point: str, source: Source, pipeline: Pipeline, request: pytest.FixtureRequest) -> None:
    # A Spark of its own dies with the process in mid-merge; at the other points it is the ledger that matters.
    remote = {} if point == "publish.in_merge" else {"PGWAL_SPARK_REMOTE": request.getfixturevalue("connect_address")}
    for table in ("a", "b"):
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
        source.sql(f"INSERT INTO {table} SELECT i, 0 FROM generate_series(1, 50) i")
    pipeline.sync()
    for table in ("a", "b"):
        source.sql(f"UPDATE {table} SET v = 1 WHERE id <= 10")
        source.sql(f"UPDATE {table} SET id = id + 100 WHERE id = 5")
        source.sql(f"DELETE FROM {table} WHERE id = 6")
    pipeline.drain()
    killed = pipeline.child(PUBLISH, environment={"PGWAL_FAILPOINTS": f"{point}=kill", **remote})
    assert killed.returncode == -9, killed.stderr
    source.sql("UPDATE a SET v = 2 WHERE id = 7")
    pipeline.sync()
    pipeline.assert_current("public.a", "public.b")


SNAPSHOT_POINTS = ["snapshot.between_read_and_write", "snapshot.before_chunk_record", "snapshot.after_table"]


@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_killed_snapshot_goes_on_where_it_was(point: str, source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int)")
    source.sql("INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i")
    source.sql("ANALYZE t")
    pipeline = make_pipeline(snapshot_chunk_rows=100)
    pipeline.spark = lambda: spark
    drains.bootstrap(pipeline.settings, progress=Silent())
    nth = "" if point == "snapshot.after_table" else "@4"
    killed = pipeline.child(
        "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)",
        environment={"PGWAL_FAILPOINTS": f"{point}=kill{nth}", "PGWAL_SNAPSHOT_WORKERS": "1"},
    )
    assert killed.returncode == -9, killed.stderr
    source.sql("UPDATE t SET v = 1 WHERE id % 10 = 0")
    source.sql("DELETE FROM t WHERE id % 10 = 1")
    state = pipeline.ledger.tables()[TableName("public", "t")]
    chunks = pipeline.ledger.chunks(state.table, state.reading or state.generation or "")
    done = len([chunk for chunk in chunks if chunk.attempt is not None])
    assert done == (10 if not nth else 3)
    pipeline.sync()
    pipeline.assert_current("public.t")

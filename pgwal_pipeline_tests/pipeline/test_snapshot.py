"""Snapshots beside writers: every order of reads and writes that matters, and what a read costs and leaves when it is cut short."""

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg2
import pytest

from pgwal_pipeline.lake.current import generation
from pgwal_pipeline.lake.ledger import Chunk, TableState
from pgwal_pipeline.messages.errors import SourceRefused, SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import READ, WRITTEN, at_each_pass
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source, wait_for

LONG = "repeat('-', 3000)"  # stored apart, and not sent again where it did not change


# What is done to tables of 20 rows, read in chunks of 7, when the first chunk (1 to 7) has been read and the others have not.
AHEAD_AND_BEHIND = {
    "inserted": "INSERT INTO {t} VALUES (0, 0, 'x'), (1000, 0, 'y')",
    "updated": "UPDATE {t} SET n = 100 WHERE id IN (3, 15)",
    "deleted": "DELETE FROM {t} WHERE id IN (3, 15)",
    "deleted_and_inserted": "DELETE FROM {t} WHERE id IN (3, 15); INSERT INTO {t} VALUES (3, 30, 'new'), (15, 150, 'new')",
    "moved_ahead": "UPDATE {t} SET id = 1003 WHERE id = 3",
    "moved_behind": "UPDATE {t} SET id = -15 WHERE id = 15",
    "moved_behind_and_on": "UPDATE {t} SET id = -15 WHERE id = 15; UPDATE {t} SET id = -16 WHERE id = -15",
    "moved_there_and_back": "UPDATE {t} SET id = -15 WHERE id = 15; UPDATE {t} SET id = 15 WHERE id = -15",
    "moved_onto_a_deleted_one": "DELETE FROM {t} WHERE id = 3; UPDATE {t} SET id = 3 WHERE id = 15",
    "moved_and_deleted": "UPDATE {t} SET id = -15 WHERE id = 15; DELETE FROM {t} WHERE id = -15",
    "swapped": "BEGIN; UPDATE {t} SET id = -1 WHERE id = 3; UPDATE {t} SET id = 3 WHERE id = 15; "
    "UPDATE {t} SET id = 15 WHERE id = -1; COMMIT",
    "in_part": "UPDATE {t} SET n = n + 1 WHERE id IN (3, 15); UPDATE {t} SET n = n + 1 WHERE id IN (3, 15)",
    "truncated": "TRUNCATE {t}; INSERT INTO {t} VALUES (3, 3, 'after'), (15, 15, 'after')",
    "all_moved": "UPDATE {t} SET id = id - 1000 WHERE id > 7",
}


# Those whose rows have to be read once more, by their keys.
READ_BY_KEY = {"all_moved", "moved_behind", "moved_behind_and_on", "moved_onto_a_deleted_one", "swapped"}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["moved_behind", "swapped"], id="moved"),
        pytest.param(sorted(AHEAD_AND_BEHIND), id="all", marks=pytest.mark.soak),
    ],
)
def test_what_is_written_while_chunks_are_on_their_way(
    names: list[str], source: Source, make_pipeline: Callable[..., Pipeline], spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first chunk's read, before its rows are in the lake; and once more after the second's. Read in the order of `names`."""
    for name in names:
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, n int, body text); ALTER TABLE {name} ALTER body SET STORAGE EXTERNAL")
        source.sql(f"INSERT INTO {name} SELECT i, i, {LONG} || i FROM generate_series(1, 20) i; ANALYZE {name}")
    pipeline = make_pipeline(snapshot_chunk_rows=7, snapshot_workers=1)
    pipeline.spark = lambda: spark
    drains.bootstrap(pipeline.settings, progress=Silent())

    def write(passed: int) -> None:
        name = names[passed // 3]  # with three chunks each
        if passed % 3 == 0:
            for statement in [AHEAD_AND_BEHIND[name]] if name == "swapped" else AHEAD_AND_BEHIND[name].split("; "):
                source.sql(statement.format(t=name))
        elif passed % 3 == 1:
            source.sql(f"UPDATE {name} SET n = n + 10000 WHERE id IN (5, 12)")
            pipeline.drain()  # the stream never waits

    at_each_pass(monkeypatch, READ, write)
    pipeline.snapshot()
    monkeypatch.undo()
    for _ in range(3):
        pipeline.drain()
        report = pipeline.publish()
        if not snapshots.needed(pipeline.settings):
            break
        assert report.warnings
        pipeline.snapshot()
    pipeline.assert_current(*(f"public.{name}" for name in names))
    moved = {state.table.name for state in pipeline.ledger.tables().values() for chunk in _chunks(pipeline, state.table) if chunk.single}
    assert moved == READ_BY_KEY & set(names)


def _chunks(pipeline: Pipeline, table: TableName) -> tuple[Any, ...]:
    state = pipeline.ledger.tables()[table]
    assert state.generation is not None
    return pipeline.ledger.chunks(table, state.generation)


@pytest.mark.usefixtures("several_parts")
def test_a_table_without_a_key_is_read_in_ranges_under_one_snapshot(
    source: Source, make_pipeline: Callable[..., Pipeline], spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE bag (n int, body text); ALTER TABLE bag REPLICA IDENTITY FULL")
    source.sql("INSERT INTO bag SELECT i % 500, repeat('x', 100) FROM generate_series(1, 5000) i; ANALYZE bag")
    source.sql("CREATE TABLE cut (n int, d int) PARTITION BY RANGE (d)")
    source.sql("CREATE TABLE cut_low PARTITION OF cut FOR VALUES FROM (0) TO (10); CREATE TABLE cut_rest PARTITION OF cut DEFAULT")
    for name in ("cut_low", "cut_rest", "cut"):
        source.sql(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    source.sql("INSERT INTO cut SELECT i, i % 30 FROM generate_series(1, 3000) i; ANALYZE cut")
    source.sql("CREATE PUBLICATION bags FOR TABLE bag, cut WITH (publish_via_partition_root = true)")
    pipeline = make_pipeline(publication="bags", snapshot_chunk_rows=1000, snapshot_workers=2)
    pipeline.spark = lambda: spark
    drains.bootstrap(pipeline.settings, progress=Silent())

    def write(passed: int) -> None:
        source.sql("DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag ORDER BY random() LIMIT 20)")
        source.sql("UPDATE bag SET n = n + 1 WHERE ctid IN (SELECT ctid FROM bag ORDER BY random() LIMIT 20)")
        source.sql("INSERT INTO bag SELECT 7, 'seven' FROM generate_series(1, 5); UPDATE cut SET d = 25 WHERE n % 100 = 5")

    at_each_pass(monkeypatch, READ, write)
    pipeline.snapshot()
    monkeypatch.undo()
    for name in ("bag", "cut"):
        chunks = _chunks(pipeline, TableName("public", name))
        assert len(chunks) >= 3
        assert len({chunk.snapshot for chunk in chunks}) == 1
        assert sum(chunk.rows > 0 for chunk in chunks) >= 3
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.bag", "public.cut")


def test_a_read_that_died_reads_no_finished_chunk_again(source: Source, make_pipeline: Callable[..., Pipeline]) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT i, 'v' FROM generate_series(1, 5000) i")
    source.sql("VACUUM ANALYZE t")
    pipeline = make_pipeline(snapshot_chunk_rows=500, snapshot_workers=1)
    drains.bootstrap(pipeline.settings, progress=Silent())
    code = "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)"
    for _ in range(3):
        died = pipeline.child(code, environment={"PGWAL_FAILPOINTS": "snapshot.before_chunk_record=kill@4", "PGWAL_SNAPSHOT_WORKERS": "1"})
        assert died.returncode == -9, died.stderr
    (state,) = pipeline.ledger.tables().values()
    assert state.reading is not None
    done = [chunk for chunk in pipeline.ledger.chunks(state.table, state.reading) if chunk.attempt is not None]
    assert len(done) == 9

    def rows_read() -> int:
        return source.value("SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 't'")

    def settled() -> int:
        source.sql("SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
        return rows_read()

    # The session of a process that was killed tells what it read when it notices, and ends.
    theirs = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgwal%'"
    wait_for(lambda: source.value(theirs) == 0, what="the end of the killed processes' sessions")
    before = settled()
    pipeline.snapshot()
    wait_for(lambda: settled() > before, what="the statistics")
    assert settled() - before <= 600
    assert sum(chunk.rows for chunk in _chunks(pipeline, TableName("public", "t"))) == 5000


@pytest.mark.long
def test_the_stream_goes_on_while_a_table_is_read(
    source: Source, make_pipeline: Callable[..., Pipeline], spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is confirmed further and further during a long read, and a table that stands already goes on being published."""
    source.sql("CREATE TABLE small (id int PRIMARY KEY, v int); INSERT INTO small VALUES (1, 1)")
    pipeline = make_pipeline(snapshot_chunk_rows=100, snapshot_workers=1)
    pipeline.spark = lambda: spark
    pipeline.sync()
    source.sql("CREATE TABLE big (id int PRIMARY KEY, v int); INSERT INTO big SELECT i, i FROM generate_series(1, 1000) i; ANALYZE big")
    drains.bootstrap(pipeline.settings, progress=Silent())
    confirmed, published = [], []

    def look(passed: int) -> None:
        source.sql("UPDATE small SET v = v + 1; UPDATE big SET v = v + 1 WHERE id % 7 = 0")
        pipeline.drain()
        confirmed.append(
            source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", pipeline.settings.slot)
        )
        if passed % 4 == 0:
            published.append(pipeline.publish())
            pipeline.assert_current("public.small")
        assert (
            source.value("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start < now() - interval '5 s'")
            == 0
        )

    at_each_pass(monkeypatch, WRITTEN, look)
    pipeline.snapshot()
    monkeypatch.undo()
    assert len(set(confirmed)) == len(confirmed) >= 10
    assert all(
        TableName("public", "big") not in report.tables or report.tables[TableName("public", "big")].version is None for report in published
    )
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.small", "public.big")


def test_a_table_read_again_keeps_its_rows_until_the_new_ones_are_whole(
    source: Source, make_pipeline: Callable[..., Pipeline], spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, i FROM generate_series(1, 100) i; ANALYZE t")
    pipeline = make_pipeline(snapshot_chunk_rows=30, snapshot_workers=1)
    pipeline.spark = lambda: spark
    pipeline.sync()
    table = TableName("public", "t")
    source.sql("DELETE FROM t WHERE id <= 10")

    def publish(passed: int) -> None:
        source.sql(f"UPDATE t SET v = {passed} WHERE id = 50")
        pipeline.drain()
        pipeline.publish()
        pipeline.assert_current("public.t")
        assert generation(pipeline.lake.current(table)) == before

    before = generation(pipeline.lake.current(table))
    at_each_pass(monkeypatch, WRITTEN, publish)
    snapshots.snapshot(pipeline.settings, [table], progress=Silent())
    monkeypatch.undo()
    pipeline.drain()
    pipeline.publish()
    assert generation(pipeline.lake.current(table)) != before
    pipeline.assert_current("public.t")
    # After a gap: nobody tells that these rows are gone.
    source.drop_slot(pipeline.settings.slot)
    source.sql("DELETE FROM t WHERE id <= 20")
    drains.renew(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.t")


def test_only_what_joined_waits_for_old_transactions(source: Source, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    source.sql("CREATE TABLE first (id int PRIMARY KEY); INSERT INTO first VALUES (1); CREATE TABLE other (id int PRIMARY KEY)")
    pipeline = make_pipeline(blocked_timeout=1)
    pipeline.spark = lambda: spark
    pipeline.sync()
    old = source.connect(autocommit=False)
    old.execute("INSERT INTO other VALUES (1)")
    source.sql("CREATE TABLE joined (id int PRIMARY KEY); INSERT INTO joined VALUES (1); INSERT INTO first VALUES (2)")
    drains.bootstrap(pipeline.settings, progress=Silent())
    again = snapshots.snapshot(pipeline.settings, [TableName("public", "first")], progress=Silent())
    assert [report.table.name for report in again.tables] == ["first"]
    report = snapshots.snapshot(pipeline.settings, progress=Silent())
    assert report.tables == ()
    (reason,) = report.blocked.values()
    assert str(old.info.backend_pid) in reason
    assert "PGWAL_BLOCKED_TIMEOUT" in reason
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.first", "public.other")
    old.commit()
    pipeline.snapshot()
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.first", "public.other", "public.joined")


READ_ALL = "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)"


def keep_writing(source: Source, seed: int, stop: threading.Event) -> None:
    """One writer: inserts, updates in part, key changes to and fro, deletes, now and then a TRUNCATE."""
    rng, conn = random.Random(seed), source.connect(autocommit=False)
    while not stop.is_set():
        try:
            for _ in range(rng.randint(1, 10)):
                key, other, kind = rng.randint(1, 2200), rng.randint(1, 2200), rng.random()
                if kind < 0.4:
                    conn.execute("UPDATE t SET v = v + 1 WHERE id = %s", [key])
                elif kind < 0.55:
                    conn.execute("UPDATE t SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM t x WHERE x.id = %s)", [other, key, other])
                elif kind < 0.7:
                    conn.execute("DELETE FROM t WHERE id = %s", [key])
                elif kind < 0.9995:
                    conn.execute("INSERT INTO t VALUES (%s, 1, repeat('i', 3000)) ON CONFLICT (id) DO UPDATE SET v = t.v + 1", [key])
                else:
                    conn.execute("TRUNCATE t")
            conn.rollback() if rng.random() < 0.1 else conn.commit()
            stop.wait(rng.random() * 0.02)
        except psycopg2.Error:
            conn.rollback()
    conn.rollback()


def snapshot_beside_writers(seed: int, source: Source, pipeline: Pipeline, *, kills: int) -> int:
    """A table read in chunks with random pauses while four write to it; the reader is killed `kills` times.

    Gives how many publishes were compared while they wrote.
    """
    rng = random.Random(seed)
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int, body text); ALTER TABLE t ALTER body SET STORAGE EXTERNAL")
    source.sql("INSERT INTO t SELECT i, 0, repeat('b', 3000) FROM generate_series(1, 2000) i; ANALYZE t")
    drains.bootstrap(pipeline.settings, progress=Silent())
    stop = threading.Event()
    writers = [threading.Thread(target=keep_writing, args=(source, seed * 100 + number, stop)) for number in range(4)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(kills):
            point, nth = rng.choice([READ, WRITTEN]), rng.randint(1, 8)
            points = f"{READ}=sleep:{rng.random() * 0.2:.2f};{WRITTEN}=sleep:{rng.random() * 0.2:.2f};{point}=kill@{nth}"
            pipeline.child(READ_ALL, environment={"PGWAL_FAILPOINTS": points})
            pipeline.drain()
        pipeline.snapshot()
        pipeline.drain()
        pipeline.publish()
        compared = 0
        for _ in range(kills - 1):
            if not snapshots.needed(pipeline.settings):
                # At the LSN of a snapshot of the source, while the writers go on.
                with contextlib.suppress(SourceUnavailable, SourceRefused):  # truncated just then; or before, and to be read again
                    report = verify(pipeline.settings, pipeline.spark, [TableName("public", "t")], progress=Silent())
                    assert report.equal, report.tables
                    compared += 1
            else:
                pipeline.snapshot()
            pipeline.drain()
            pipeline.publish()
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    for _ in range(4):
        if snapshots.needed(pipeline.settings):
            pipeline.snapshot()
        pipeline.drain()
        pipeline.publish()
        if not snapshots.needed(pipeline.settings):
            break
    pipeline.assert_current("public.t")
    return compared


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_random_writers_beside_a_reader_that_dies(seed: int, source: Source, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    pipeline = make_pipeline(snapshot_chunk_rows=150)
    pipeline.spark = lambda: spark
    snapshot_beside_writers(seed, source, pipeline, kills=seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_random_writers_beside_a_reader_that_dies_often(
    seed: int, source: Source, make_pipeline: Callable[..., Pipeline], spark: Any
) -> None:
    pipeline = make_pipeline(snapshot_chunk_rows=150)
    pipeline.spark = lambda: spark
    print(f"seed {seed}: {snapshot_beside_writers(seed, source, pipeline, kills=3)} publishes compared beside writers")  # noqa: T201


def test_a_table_altered_while_single_rows_of_it_are_read_again(source: Source, make_pipeline: MakePipeline) -> None:
    """It has no snapshot in force then, and would wait for one that nobody reads."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t SELECT i, i FROM generate_series(1, 5) i")
    pipeline = make_pipeline()
    table = TableName("public", "t")
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()

    def single_rows(known: Any) -> list[TableState]:
        state = known[table]
        return [replace(state, generation=None, reading=state.generation, published=state.generation, reason="1 rows are read again")]

    reading = pipeline.ledger.tables()[table].generation
    assert reading is not None
    pipeline.ledger.record_chunks([Chunk(table=table, generation=reading, chunk=1, lower=("3",), upper=("3",))])
    pipeline.ledger.amend_tables(single_rows)
    source.sql("ALTER TABLE t DROP a")
    state = pipeline.ledger.tables()[table]
    snapshots._record_error(pipeline.ledger, state, snapshots.copy.TableChanged(str(table), "it was altered while it was read"))
    assert snapshots.needed(pipeline.settings) == (table,)
    pipeline.snapshot()
    assert pipeline.ledger.tables()[table].state == "ready"
    snapshots._record_error(pipeline.ledger, pipeline.ledger.tables()[table], snapshots.copy.TableChanged(str(table), "it was altered"))
    assert snapshots.needed(pipeline.settings) == (), "its snapshot in force goes on"

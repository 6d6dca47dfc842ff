"""The drain against a real server: whole transactions by commit LSN, one pass for all tables, nothing lost and nothing twice."""

import threading
import time
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import LakeError, SlotBusy, SlotLost, SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import window as windows
from pgwal_pipeline.postgres import slot
from pgwal_pipeline.values.lsn import parse_lsn, window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source, fresh_source


def raw(pipeline: Pipeline, table: str) -> list[tuple[Any, ...]]:
    """(op, id) of every raw row in the order of its position; K before the U that shares its position."""
    frame = pl.read_delta(pipeline.lake.raw(TableName.parse(table)))
    frame = frame.sort("_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op")
    return list(frame.select("_pgwal_op", "id").iter_rows())


def confirmed(source: Source, name: str) -> int:
    return parse_lsn(source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", name))


def test_every_change_lands_once_in_its_window(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline = make_pipeline()
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 3) i")
    source.sql("UPDATE t SET v = 'y' WHERE id = 1")
    first = pipeline.drain()
    source.sql("UPDATE t SET id = 10 WHERE id = 2")
    source.sql("DELETE FROM t WHERE id = 3")
    source.sql("TRUNCATE t")
    second = pipeline.drain()
    assert [report.changes for report in (first, second)] == [4, 3]
    assert raw(pipeline, "public.t") == [("I", 1), ("I", 2), ("I", 3), ("U", 1), ("K", 2), ("U", 10), ("D", 3), ("T", None)]
    counts = second.tables[TableName("public", "t")]
    assert (counts.updates, counts.key_changes, counts.deletes, counts.truncates) == (1, 1, 1, 1)
    windows = [window for window in pipeline.ledger.windows() if window.start_lsn < window.end_lsn]
    assert [window.key for window in windows] == [window_key(report.windows[0].end_lsn) for report in (first, second)]
    assert windows[0].end_lsn == windows[1].start_lsn
    assert confirmed(source, pipeline.settings.slot) == windows[1].end_lsn == pipeline.ledger.frontier()
    frame = pl.read_delta(pipeline.lake.raw(TableName("public", "t")))
    assert set(frame["_pgwal_window"]) == {window.key for window in windows}
    for window in windows:
        lsns = frame.filter(pl.col("_pgwal_window") == window.key)["_pgwal_commit_lsn"]
        assert window.start_lsn <= min(lsns)
        assert max(lsns) < window.end_lsn


def test_transaction_open_across_a_run_is_read_when_it_commits(source: Source, make_pipeline: MakePipeline) -> None:
    """Loss (a): rows older than what other tables have reached, in a transaction that commits after the run."""
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    source.sql("CREATE TABLE b (id int PRIMARY KEY)")
    pipeline = make_pipeline()
    drains.bootstrap(pipeline.settings, progress=Silent())
    late = source.connect(autocommit=False)
    late.execute("INSERT INTO a VALUES (100)")
    source.sql("INSERT INTO a VALUES (1)")
    source.sql("INSERT INTO b VALUES (1)")
    pipeline.drain()
    source.sql("INSERT INTO b VALUES (2)")
    pipeline.drain()
    assert raw(pipeline, "public.a") == [("I", 1)]
    late.execute("INSERT INTO b VALUES (100)")
    late.commit()
    pipeline.drain()
    assert raw(pipeline, "public.a") == [("I", 1), ("I", 100)]
    assert raw(pipeline, "public.b") == [("I", 1), ("I", 2), ("I", 100)]


def test_silent_walsender_is_not_taken_for_the_end(source: Source, make_pipeline: MakePipeline) -> None:
    """Loss (b): a large transaction of an unpublished table keeps the walsender silent, and a committed row stands behind it."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql("CREATE TABLE big (id int, filler text)")
    pipeline = make_pipeline(tables="public.t")
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO big SELECT i, repeat('x', 60) FROM generate_series(1, 600000) i")
    source.sql("INSERT INTO t VALUES (1)")
    report = pipeline.drain()
    assert report.windows[0].changes == 1
    assert raw(pipeline, "public.t") == [("I", 1)]
    assert confirmed(source, pipeline.settings.slot) == pipeline.ledger.frontier()


def test_idle_source_is_quick_and_unpublished_wal_is_released(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql("CREATE TABLE other (id int)")
    pipeline = make_pipeline(tables="public.t")
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO other SELECT generate_series(1, 50000)")
    before = confirmed(source, pipeline.settings.slot)
    report = pipeline.drain()
    assert report.changes == 0
    assert report.seconds["drain"] < 5
    assert confirmed(source, pipeline.settings.slot) > before + 1_000_000
    frontier = pipeline.ledger.frontier()
    again = pipeline.drain(end_lsn=frontier)
    assert again.windows == ()


def test_any_number_of_tables_costs_one_walsender_and_one_decoding(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, tmp_path: Any
) -> None:
    server = make_server(log_replication_commands="on")
    totals = {}
    with fresh_source(server) as source:
        for number in (1, 10):
            schema = f"s{number}"
            source.sql(f"CREATE SCHEMA {schema}")
            for table in range(number):
                source.sql(f"CREATE TABLE {schema}.t{table} (id int PRIMARY KEY, v text)")
            pipeline = make_pipeline(source_dsn=source.dsn, tables=f"{schema}.*", lake=str(tmp_path / schema))
            drains.bootstrap(pipeline.settings, progress=Silent())
            logged = server.log_file.read_text().count("command: START_REPLICATION")
            for table in range(number):
                source.sql(f"INSERT INTO {schema}.t{table} SELECT i, repeat('v', 50) FROM generate_series(1, {20000 // number}) i")
            assert pipeline.drain().changes == 20000
            assert server.log_file.read_text().count("command: START_REPLICATION") - logged == 1
            source.sql("SELECT pg_stat_force_next_flush()")
            totals[number] = source.value("SELECT total_bytes FROM pg_stat_replication_slots WHERE slot_name = %s", pipeline.settings.slot)
            with source.connect() as conn:
                slot.drop(conn, pipeline.settings.slot)
    assert totals[10] <= totals[1] * 1.1


def test_large_transaction_under_a_small_budget(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline = make_pipeline(memory_budget="2MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO t SELECT i, repeat('v', 100) FROM generate_series(1, 100000) i")
    assert pipeline.drain().changes == 100000
    frame = pl.read_delta(pipeline.lake.raw(TableName("public", "t")))
    assert sorted(frame["id"]) == list(range(1, 100001))
    assert sorted(frame["_pgwal_ordinal"]) == list(range(100000))


def test_second_drain_waits_then_names_the_holder(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline = make_pipeline(busy_timeout=1)
    with slot.exclusive(pipeline.settings.dsn, pipeline.settings.slot, 1), pytest.raises(SlotBusy, match=pipeline.settings.slot):
        pipeline.drain()


def test_drains_beside_writers_keep_every_row(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int)")
    pipeline = make_pipeline()
    drains.bootstrap(pipeline.settings, progress=Silent())

    def write(first: int) -> None:
        conn = source.connect(autocommit=False)
        for number in range(200):
            conn.execute("INSERT INTO t VALUES (%s, %s)", [first + number, number])
            if number % 7 == 6:
                conn.commit()
        conn.commit()

    writers = [threading.Thread(target=write, args=(1000 * number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        pipeline.drain()
    pipeline.drain()
    assert sorted(identity for _, identity in raw(pipeline, "public.t")) == sorted(source_ids(source))


def source_ids(source: Source) -> list[int]:
    return [identity for (identity,) in source.sql("SELECT id FROM t")]


def test_slot_of_another_lake_and_lost_slot_are_refused(source: Source, make_pipeline: MakePipeline, tmp_path: Any) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline = make_pipeline()
    pipeline.drain()
    other = make_pipeline(lake=str(tmp_path / "other"), slot=pipeline.settings.slot, publication=pipeline.settings.publication)
    with pytest.raises(LakeError, match="no record of it"):
        other.drain()
    assert not (tmp_path / "other").exists()
    with source.connect() as conn:
        slot.drop(conn, pipeline.settings.slot)
    with pytest.raises(SlotLost, match="resnapshot --all"):
        pipeline.drain()


def test_slot_advanced_by_someone_else_is_a_gap(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline = make_pipeline()
    pipeline.drain()
    source.sql("INSERT INTO t VALUES (1)")
    source.wait_for_slot(pipeline.settings.slot)
    source.sql("SELECT pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", pipeline.settings.slot)
    with pytest.raises(SlotLost, match="advanced"):
        pipeline.drain()


POINTS = ["drain.read", "drain.after_files", "drain.after_prepared", "drain.before_complete", "drain.before_confirm", "drain.after_confirm"]


@pytest.mark.parametrize("point", POINTS)
def test_killed_drain_leaves_every_row_once(point: str, source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    source.sql("CREATE TABLE b (id int PRIMARY KEY)")
    pipeline = make_pipeline()
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO a SELECT generate_series(1, 500)")
    source.sql("INSERT INTO b SELECT generate_series(1, 500)")
    killed = pipeline.child(
        "from pgwal_pipeline.pipeline.drain import drain\ndrain(settings, progress=progress)",
        environment={"PGWAL_FAILPOINTS": f"{point}=kill"},
    )
    assert killed.returncode == -9, killed.stderr
    source.sql("INSERT INTO a VALUES (501)")
    pipeline.drain()
    assert [identity for _, identity in raw(pipeline, "public.a")] == list(range(1, 502))
    assert [identity for _, identity in raw(pipeline, "public.b")] == list(range(1, 501))
    assert confirmed(source, pipeline.settings.slot) == pipeline.ledger.frontier()


def test_patience_is_measured_from_the_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    patience = drains._Patience()
    broke = SourceUnavailable("gone")
    forward = windows.StreamBroke(broke, kept=object())  # pyright: ignore[reportArgumentType]
    for _ in range(5):  # a connection that lives for ten minutes at a time
        assert patience.pause(forward) is not None
        clock[0] += 600
    assert patience.pause(broke) is None, "ten minutes without getting any further"
    clock[0] = 0
    patience = drains._Patience()
    assert patience.pause(broke) is not None
    clock[0] += 59
    assert patience.pause(broke) is not None
    clock[0] += 2
    assert patience.pause(broke) is None

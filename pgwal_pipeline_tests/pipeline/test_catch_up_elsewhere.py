"""Backlogs that are caught up in other places and circumstances: cut off, on a standby, as a command, and how they are shown."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SlotLost
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import catch_up
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline import window_commit as counting
from pgwal_pipeline.postgres import copies
from pgwal_pipeline.postgres.copies import Room
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.pipeline.catching_up import DRAIN as FOUR_CORES_DRAIN
from pgwal_pipeline_tests.pipeline.catching_up import assert_settled, fill, slots
from pgwal_pipeline_tests.pipelines import DRAIN, MakePipeline, ids_in_raw, killed
from pgwal_pipeline_tests.postgres.standby import caught_up, standby_of
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for


def test_a_slot_lost_while_a_backlog_was_being_caught_up(make_server: Callable[..., Postgres], make_pipeline: MakePipeline) -> None:
    """What its windows had read by then is not taken for what comes after the gap."""
    server = make_server(max_slot_wal_keep_size="8MB", wal_keep_size="0", max_wal_size="32MB", min_wal_size="32MB")
    with fresh_source(server) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source = source
        pipeline.drain()
        source.sql("INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 3000) i")
        killed(pipeline, DRAIN, "catch_up.all_read", PGWAL_CATCHUP_THRESHOLD="1MB", PGWAL_CATCHUP_SLOTS="1")
        assert pipeline.ledger.plan() is not None
        source.lose_slot(pipeline.settings.slot, "INSERT INTO t SELECT max(id) + 1 FROM t")
        with pytest.raises(SlotLost):
            pipeline.drain()
        drains.renew(pipeline.settings, progress=Silent())
        source.sql("INSERT INTO t VALUES (9999, 'after')")
        pipeline.drain()
        assert pipeline.ledger.plan() is None
        assert ids_in_raw(pipeline) == [9999]
        assert snapshots.needed(pipeline.settings) == (TableName("public", "t"),)


def test_tables_altered_between_a_killed_catch_up_and_the_next_drain(source: Source, make_pipeline: MakePipeline) -> None:
    """Its windows are adopted as they were read; what was done to the tables since is the next window's."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE leaves (id int PRIMARY KEY)")
    pipeline = make_pipeline()
    pipeline.drain()
    pipeline.snapshot()
    pipeline.drain()
    source.sql("INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 3000) i; INSERT INTO leaves VALUES (1)")
    killed(pipeline, DRAIN, "catch_up.all_read", PGWAL_CATCHUP_THRESHOLD="1MB", PGWAL_CATCHUP_SLOTS="1")
    plan = pipeline.ledger.plan()
    assert plan is not None
    source.sql("ALTER TABLE t ADD w int; INSERT INTO t VALUES (3001, 'v', 1); DROP TABLE leaves")
    source.sql("CREATE TABLE joins (id int PRIMARY KEY); INSERT INTO joins VALUES (1)")
    report = pipeline.drain()
    assert [window.end_lsn for window in report.windows[:2]] == list(plan.ends)
    assert ids_in_raw(pipeline) == list(range(1, 3002))
    states = {state.table.name: state.state for state in pipeline.ledger.tables().values()}
    assert states == {"t": "ready", "leaves": "gone", "joins": "pending"}
    assert pl.read_delta(pipeline.lake.raw(TableName("public", "leaves"))).height == 1


@pytest.mark.parametrize("behind", [1, 30], ids=["a little behind it", "a backlog behind it"])
def test_a_catch_up_that_died_is_given_up_for_one_stream_and_what_came_since_follows(
    behind: int, make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any, four_cores: None
) -> None:
    """Its plan was written down and its worker was at work; now others have all slots. What is behind its end has a stretch of its own."""
    with fresh_source(make_server(max_replication_slots=3)) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, big text)")
        source.sql("ALTER TABLE u ALTER big SET STORAGE EXTERNAL; INSERT INTO u SELECT i, repeat('u', 3000) FROM generate_series(1, 9) i")
        pipeline = make_pipeline(source_dsn=source.dsn, catchup_threshold="512kB", catchup_slots=1)
        pipeline.source, pipeline.spark = source, lambda: spark
        pipeline.sync()
        fill(source, 15)
        source.sql("UPDATE u SET id = id + 10 WHERE id < 4; ALTER TABLE t ADD w int; UPDATE t SET w = id WHERE id % 7 = 0")
        fill(source, 15, first=20)
        limits = {"PGWAL_CATCHUP_THRESHOLD": "512kB", "PGWAL_CATCHUP_SLOTS": "1"}
        points = "catch_up.ready=kill;catch_up.copied=sleep:60"
        died = pipeline.child(FOUR_CORES_DRAIN, environment={"PGWAL_FAILPOINTS": points, **limits})
        assert died.returncode == -9, died.stderr
        plan = pipeline.ledger.plan()
        assert plan is not None
        assert len(plan.ends) == 2
        assert pipeline.ledger.reads(plan) == {}
        wait_for(lambda: slots(source, pipeline.settings.slot) == {pipeline.settings.slot}, what="the copy to be gone")
        source.sql("UPDATE u SET id = id + 100 WHERE id > 8; ALTER TABLE t ADD x int")
        fill(source, behind, first=40)
        source.sql("UPDATE t SET x = 1 WHERE id % 50 = 0; DELETE FROM t WHERE id % 40 = 3; UPDATE u SET id = 500 WHERE id = 5")
        for name in ("other", "last"):
            source.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)
        with pytest.MonkeyPatch.context() as patch:
            # As when others take the last ones between the look and the copy.
            patch.setattr(copies, "room", lambda _: Room(9, 9))
            report = pipeline.drain()
        refusals = [warning for warning in report.warnings if "drained by one reader alone, since the slot cannot be copied" in warning]
        assert len(refusals) == (1 if behind == 1 else 2), report.warnings
        assert [window.start_lsn for window in report.windows] == [plan.start_lsn, plan.ends[-1]]
        assert report.windows[-1].end_lsn == pipeline.ledger.frontier()
        assert_settled(pipeline)
        for name in ("other", "last"):
            source.drop_slot(name)
        assert {(state.state, state.reason) for state in pipeline.ledger.tables().values()} == {("ready", None)}, "nothing is read again"
        pipeline.publish()
        pipeline.assert_current("public.t", "public.u")


def test_a_standby_is_caught_up_from_as_its_primary_is(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    server = make_server(hot_standby_feedback="on")
    with fresh_source(server) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        with standby_of(source, tmp_path / "standby") as standby:
            pipeline = make_pipeline(source_dsn=standby.dsn, catchup_threshold=1 << 20, catchup_slots=1)
            pipeline.source = standby
            source.sql(f"CREATE PUBLICATION {pipeline.settings.publication} FOR TABLE t")
            caught_up(source, standby)
            beginning = threading.Thread(target=pipeline.drain)
            beginning.start()
            while beginning.is_alive():
                source.sql("SELECT pg_log_standby_snapshot()")
                beginning.join(0.2)
            source.sql("INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 3000) i")
            caught_up(source, standby)
            done = threading.Event()

            def primary_goes_on() -> None:
                with source.connect() as conn:
                    while not done.wait(0.2):  # the copies of a slot wait for it to tell which transactions run
                        conn.execute("SELECT pg_log_standby_snapshot()")

            teller = threading.Thread(target=primary_goes_on)
            teller.start()
            try:
                report = pipeline.drain()
            finally:
                done.set()
                teller.join()
            assert len(report.windows) == 2, report.warnings
            assert ids_in_raw(pipeline) == list(range(1, 3001))


def test_a_command_catches_up(source: Source, tmp_path: Path) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    commands = Commands(tmp_path, source.dsn)
    commands.environment |= {"PGWAL_CATCHUP_THRESHOLD": "1MB", "PGWAL_CATCHUP_SLOTS": "1"}
    commands.json("drain")
    for first in range(1, 3001, 100):
        source.sql(f"INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series({first}, {first + 99}) i")
    done = commands.json("drain")
    assert [window["changes"] > 0 for window in done["windows"]] == [True, True]
    assert done["changes"] == 3000


class Recorder(Silent):
    """What a drain shows of its work."""

    def __init__(self) -> None:
        self.stages: dict[str, list[int]] = {}

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        self.stages.setdefault(name, []).append(done)


def test_each_window_of_a_catch_up_is_shown_and_has_its_share_of_the_memory(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline = make_pipeline(memory_budget="64MB", catchup_threshold=1 << 20, catchup_slots=1)
    pipeline.drain()
    source.sql("INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 5000) i")
    budgets: list[int] = []
    made, read = catch_up.CatchUpProcess, counting.read_window

    def process(settings: Any, limits: Any, budget: int, *rest: Any) -> Any:
        budgets.append(budget)
        return made(settings, limits, budget, *rest)

    def window(*args: Any, memory_budget: int, **named: Any) -> Any:
        budgets.append(memory_budget)
        return read(*args, memory_budget=memory_budget, **named)

    monkeypatch.setattr(catch_up, "CatchUpProcess", process)
    monkeypatch.setattr(counting, "read_window", window)
    recorder = Recorder()
    drains.drain(pipeline.settings, progress=recorder)
    assert budgets == [32 << 20, 32 << 20]
    assert {"window 1 of 2", "window 2 of 2"} <= recorder.stages.keys()
    assert all(done[-1] >= done[0] for done in recorder.stages.values())

"""The catch-up: a backlog read in windows side by side holds just what one reader would have found, whatever is killed on the way."""

import random
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline import failpoints
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake import rows as as_rows
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Plan
from pgwal_pipeline.lake.log import RowLog
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import catch_up, status
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline.catch_up import DrainRate, Split, borders, falling_behind, windows_for
from pgwal_pipeline.pipeline.window_commit import DrainContext
from pgwal_pipeline.postgres import copies
from pgwal_pipeline.postgres.copies import Room
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipeline.catching_up import (
    DRAIN,
    alone,
    assert_same_raw,
    assert_settled,
    catching_up,
    fill,
    raw_rows,
    slots,
    windows,
)
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.scenarios.random.rounds import Rounds
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for

pytestmark = pytest.mark.usefixtures("four_cores")


class Workload:
    """Changes that reach over the borders wherever these are: of the same few keys, in transactions that overlap, under changing tables."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.rng = source, random.Random(seed)
        self.done = self.added = 0
        source.sql("CREATE TABLE keyed (id int PRIMARY KEY, v text, big text)")
        self.long = source.connect(autocommit=False)
        source.sql("ALTER TABLE keyed ALTER big SET STORAGE EXTERNAL")
        source.sql("CREATE TABLE bag (a int, b text)")
        source.sql("ALTER TABLE bag REPLICA IDENTITY FULL")
        source.sql("CREATE TABLE huge (id int PRIMARY KEY, v text)")
        source.sql("CREATE TABLE emptied (id int PRIMARY KEY)")
        # Values that stand in the first window at the latest, and are not sent again.
        source.sql("INSERT INTO keyed SELECT i, 'first', repeat(md5(i::text), 200) FROM generate_series(1, 30) i")

    def run(self, steps: int) -> None:
        for number in range(steps):
            self._step(self.done)
            self.done += 1
            if number % (steps // 3) == steps // 4:
                self.long.commit()
        self.long.commit()

    def _step(self, number: int) -> None:
        rng, sql = self.rng, self.source.sql
        key = rng.randrange(1, 31)
        # The long transaction writes between the commits of the others, and more than a window holds.
        self.long.execute(
            "INSERT INTO huge SELECT i, repeat('h', 100) FROM generate_series(%s::int, %s::int) i", [number * 100, number * 100 + 99]
        )
        match rng.randrange(12):
            case 0 | 1 | 2:
                sql("UPDATE keyed SET v = %s WHERE id = %s", f"v{number}", key)
            case 3:
                sql("INSERT INTO keyed (id, v, big) VALUES (%s, 'new', repeat(md5(%s), 150)) ON CONFLICT DO NOTHING", key, str(number))
            case 4:
                sql("UPDATE keyed SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM keyed WHERE id = %s)", 100 + key, key, 100 + key)
            case 5:
                sql("UPDATE keyed SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM keyed WHERE id = %s)", key, 100 + key, key)
            case 6:
                sql("DELETE FROM keyed WHERE id = %s", key)
            case 7:
                sql("INSERT INTO bag SELECT %s::int, 'b' FROM generate_series(1, 3)", number % 5)
                sql("DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)")
            case 8:
                sql("TRUNCATE emptied")
                sql("INSERT INTO emptied SELECT generate_series(1, %s::int)", key)
            case 9:
                sql("DELETE FROM emptied WHERE id % 3 = 0")
            case 10 if self.added < 4:
                self.added += 1
                sql(f"ALTER TABLE keyed ADD COLUMN c{self.added} int")
                sql(f"UPDATE keyed SET c{self.added} = %s WHERE id <= 3", number)
            case _:
                sql("UPDATE keyed SET v = v || '.' WHERE id %% 7 = %s", number % 7)
        sql("INSERT INTO bag SELECT i, repeat('w', 100) FROM generate_series(1, 100) i")
        sql("DELETE FROM bag WHERE b LIKE 'w%'")


TABLES = ("public.keyed", "public.bag", "public.huge", "public.emptied")


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_windows_hold_what_one_reader_finds(seed: int, source: Source, make_pipeline: MakePipeline, tmp_path: Path) -> None:
    workload = Workload(source, seed)
    pipeline, other = catching_up(make_pipeline), alone(make_pipeline, tmp_path)
    for _ in range(2):
        workload.run(60)
        end = drains.next_target(pipeline.settings)
        source.sql("INSERT INTO emptied VALUES (1000) ON CONFLICT DO NOTHING")  # after the target: the next drain's
        report = pipeline.drain(end)
        assert len(report.windows) == 3
        assert [window.start_lsn for window in report.windows[1:]] == [window.end_lsn for window in report.windows[:-1]]
        assert report.windows[-1].end_lsn == end
        assert report.changes == other.drain(end).changes
        assert_same_raw(pipeline, other, *TABLES)
        assert_settled(pipeline)
        assert {str(name): state.state for name, state in pipeline.ledger.tables().items()} == {
            str(name): state.state for name, state in other.ledger.tables().items()
        }


def test_current_equals_the_source_after_catching_up(source: Source, pipeline: Pipeline) -> None:
    workload = Workload(source, 4)
    pipeline.settings = pipeline.settings.model_copy(update={"catchup_threshold": 512 << 10})
    pipeline.sync()
    workload.run(60)
    assert len(pipeline.drain().windows) == 3
    pipeline.sync()
    assert all(state.state == "ready" for state in pipeline.ledger.tables().values())
    pipeline.assert_current(*TABLES)


@pytest.mark.soak
def test_random_changes_of_the_tables(source: Source, make_pipeline: MakePipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that are altered, renamed, emptied and made anew, whatever window that falls in; small as the backlogs are, they are cut."""
    monkeypatch.setattr(catch_up, "_LEAST_WINDOW", 1)
    pipeline = make_pipeline(memory_budget="1MB", snapshot_chunk_rows=7, blocked_timeout=3, catchup_threshold=1)
    pipeline.spark = lambda: spark
    rounds = Rounds(source, pipeline, seed=7)
    try:
        for _ in range(2):
            rounds.round()
    finally:
        for writer in rounds.work.writers:
            writer.connection.close()
    assert any(len(plan.ends) > 1 for plan in plans(pipeline))
    assert rounds.compared


def plans(pipeline: Pipeline) -> list[Plan]:
    return as_rows.plans(RowLog(pipeline.lake, "plans", as_rows.PLANS, ["start_lsn"]).rows())


def test_transactions_at_both_sides_of_a_border(
    source: Source, make_pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline, other = catching_up(make_pipeline), alone(make_pipeline, tmp_path)
    fill(source, transactions=10)
    end = drains.next_target(pipeline.settings)
    other.drain(end)
    commits = sorted({row["_pgwal_commit_lsn"] for row in raw_rows(other, "public.t")})
    assert len(commits) == 10
    # A border at a commit, where that transaction is the later window's first, and one just behind, where it is the earlier one's last;
    # and a window between two commits, which is empty.
    cut = (commits[3], commits[6] + 1, commits[6] + 2, end)
    monkeypatch.setattr(catch_up, "borders", lambda *_: cut)
    pipeline.drain(end)
    assert windows(pipeline) == list(zip((pipeline.ledger.windows()[0].end_lsn, *cut[:-1]), cut, strict=True))
    frame = pl.read_delta(pipeline.lake.raw(TableName("public", "t")))
    found = {key: sorted(set(frame.filter(pl.col("_pgwal_window") == window_key(key))["_pgwal_commit_lsn"])) for key in cut}
    assert found == {cut[0]: commits[:3], cut[1]: commits[3:7], cut[2]: [], cut[3]: commits[7:]}
    assert_same_raw(pipeline, other, "public.t")
    assert_settled(pipeline)


def test_a_column_that_has_another_type_in_each_window(
    source: Source, make_pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither window knows of the other: the later one is read again, and its values stand beside, as with one reader."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline, other = catching_up(make_pipeline), alone(make_pipeline, tmp_path)
    cut = []
    for number, kind in enumerate(("int", "text", "date")):
        source.sql(f"ALTER TABLE t ADD COLUMN c {kind}")
        fill(source, transactions=8, first=100 * number)
        source.sql("UPDATE t SET c = " + {"int": "1", "text": "'x'", "date": "'2026-01-01'"}[kind] + " WHERE id % 50 = 0")
        source.sql("ALTER TABLE t DROP COLUMN c")
        cut.append(drains.next_target(pipeline.settings))
    monkeypatch.setattr(catch_up, "borders", lambda *_: tuple(cut))
    pipeline.drain(cut[-1])
    other.drain(cut[-1])
    assert len(windows(pipeline)) == 3
    assert_same_raw(pipeline, other, "public.t")
    assert_settled(pipeline)


IN_SOAK = pytest.mark.soak  # neighbours of the others
BY_PARENT = [
    "catch_up.planned",
    pytest.param("catch_up.ready", marks=IN_SOAK),
    pytest.param("drain.read", marks=IN_SOAK),
    pytest.param("drain.after_files", marks=IN_SOAK),
    pytest.param("catch_up.read_here", marks=IN_SOAK),
    "catch_up.all_read",
    pytest.param("drain.after_prepared", marks=IN_SOAK),
    pytest.param("raw.between_tables", marks=IN_SOAK),
    pytest.param("drain.before_complete", marks=IN_SOAK),
    "drain.before_confirm",
    pytest.param("drain.after_confirm", marks=IN_SOAK),
]


@pytest.mark.parametrize("point", BY_PARENT)
def test_killed_catch_up_leaves_every_row_once(point: str, source: Source, make_pipeline: MakePipeline, tmp_path: Path) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql("CREATE TABLE u (id int PRIMARY KEY)")
    pipeline, other = catching_up(make_pipeline, catchup_slots=1), alone(make_pipeline, tmp_path)
    foreign = f"{pipeline.settings.slot}_w_foreign"
    source.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", foreign)
    fill(source)
    source.sql("INSERT INTO u SELECT generate_series(1, 500)")
    environment = {"PGWAL_CATCHUP_THRESHOLD": "512kB", "PGWAL_CATCHUP_SLOTS": "1", "PGWAL_FAILPOINTS": f"{point}=kill"}
    killed = pipeline.child(DRAIN, environment=environment)
    assert killed.returncode == -9, killed.stderr
    wait_for(lambda: slots(source, pipeline.settings.slot) == {pipeline.settings.slot, foreign}, what="the copies to be gone")
    plan = pipeline.ledger.plan()
    fill(source, first=30)
    source.sql("INSERT INTO u VALUES (501)")
    end = drains.next_target(pipeline.settings)
    pipeline.drain(end)
    other.drain(end)
    assert_same_raw(pipeline, other, "public.t", "public.u")
    assert_settled(pipeline, foreign)
    # The borders of the plan stand, and what came later was cut by itself.
    assert plan is None or set(plan.ranges) < set(windows(pipeline))


def test_finished_windows_are_adopted_and_the_others_read_again(
    source: Source, make_pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO t VALUES (-1, 'before')")
    pipeline, other = catching_up(make_pipeline), alone(make_pipeline, tmp_path)
    pipeline.drain()
    pipeline.snapshot()
    fill(source)
    source.sql("TRUNCATE t")  # in a window that is adopted; without its message it would be taken for a rewrite
    at_end = tmp_path / "first_window_is_read"
    environment = {"PGWAL_CATCHUP_THRESHOLD": "512kB", "PGWAL_FAILPOINTS": f"drain.after_files=touch:{at_end}"}
    ledger = pipeline.ledger
    with pipeline.started(DRAIN, environment=environment) as drain:
        wait_for(at_end.exists, seconds=60, what="the first window's end")
        plan = ledger.plan()
        assert plan is not None
        wait_for(lambda: len(ledger.reads(plan)) == 2, seconds=60, what="the other windows")
        drain.kill()
    adopted = ledger.reads(plan)
    assert set(adopted) == {window_key(end) for end in plan.ends[1:]}
    assert ledger.frontier() == plan.start_lsn
    assert [window["state"] for window in status.status(pipeline.settings)["windows"]] == ["planned", "read", "read"]
    assert pl.read_delta(pipeline.lake.raw(TableName("public", "t"))).is_empty(), "raw has rows that do not count"

    def no_copy(*_: object) -> None:
        raise AssertionError("a window was read that was read before")

    monkeypatch.setattr(copies.SlotCopy, "make", no_copy)
    monkeypatch.setattr(catch_up, "CatchUpProcess", no_copy)
    source.sql("TRUNCATE t")  # after the plan's end: the next drain's
    report = pipeline.drain(plan.ends[-1])
    assert [window.end_lsn for window in report.windows] == list(plan.ends)
    other.drain(plan.ends[-1])
    assert_same_raw(pipeline, other, "public.t")
    assert [(state.state, state.reason) for state in ledger.tables().values()] == [("ready", None)]
    assert_settled(pipeline)
    files = {file.path for read in adopted.values() for write in read.window.tables for file in write.files}
    raw = Path(pipeline.lake.raw(TableName("public", "t")))
    assert files <= {str(path.relative_to(raw)) for path in raw.rglob("*.parquet")}
    pipeline.drain()
    assert [(state.state, state.reason) for state in ledger.tables().values()] == [("ready", None)]


def test_a_window_that_cannot_be_read_stops_the_drain_and_keeps_the_others(
    source: Source, make_pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline, other = catching_up(make_pipeline), alone(make_pipeline, tmp_path)
    fill(source)
    monkeypatch.setenv("PGWAL_FAILPOINTS", "catch_up.moved=error")
    with pytest.raises(PgwalError, match="failpoint"):
        pipeline.drain()
    plan = pipeline.ledger.plan()
    assert plan is not None
    assert list(pipeline.ledger.reads(plan)) == [window_key(plan.ends[0])]
    assert pipeline.ledger.frontier() == plan.start_lsn
    monkeypatch.delenv("PGWAL_FAILPOINTS")
    pipeline.drain(plan.ends[-1])
    other.drain(plan.ends[-1])
    assert windows(pipeline) == list(plan.ranges)
    assert_same_raw(pipeline, other, "public.t")
    assert_settled(pipeline)


@pytest.mark.parametrize("pattern", ["{slot}", "{slot}_w_%"])
def test_a_connection_that_breaks(
    pattern: str, source: Source, make_pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot's own one, and a copy's: the other windows are read to their ends, and that one from where it broke."""
    # Every reader, in this process and in its own, waits once in the midst of its window, or it might be done before it is found.
    fault = "drain.read=sleep:1@1"
    monkeypatch.setenv("PGWAL_FAILPOINTS", fault)
    monkeypatch.setattr(failpoints, "_points", failpoints._parse(fault))
    monkeypatch.setattr(failpoints, "_passed", {})
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline, other = catching_up(make_pipeline), alone(make_pipeline, tmp_path)
    fill(source, transactions=40)
    conn = source.connect()
    ended, broken = threading.Event(), []

    def terminate() -> None:
        while not ended.is_set() and not broken:
            rows = conn.execute(
                "SELECT pg_terminate_backend(active_pid) FROM (SELECT active_pid FROM pg_replication_slots s "
                "JOIN pg_stat_replication r ON r.pid = active_pid WHERE slot_name LIKE %s AND sent_lsn > confirmed_flush_lsn LIMIT 1) one",
                [pattern.format(slot=pipeline.settings.slot.replace("_", r"\_"))],
            ).fetchall()
            broken.extend(rows)

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        report = pipeline.drain()
    finally:
        ended.set()
        thread.join()
    assert broken
    assert len(report.windows) in (3, 4)
    other.drain(pipeline.ledger.frontier())
    assert_same_raw(pipeline, other, "public.t")
    assert_settled(pipeline)


def test_slots_and_walsenders_that_are_short(make_server: Callable[..., Postgres], make_pipeline: MakePipeline, tmp_path: Path) -> None:
    """One for the pipeline alone; with three there are two free, of which a catch-up takes one."""
    server = make_server(max_replication_slots=3, max_wal_senders=10)
    with fresh_source(server) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        pipeline = catching_up(make_pipeline, source_dsn=source.dsn, catchup_slots=5)
        pipeline.source = source
        fill(source)
        assert len(pipeline.drain().windows) == 2
        source.sql("SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
        fill(source, first=30)
        report = pipeline.drain()
        assert len(report.windows) == 1
        assert "1 replication slots" in report.warnings[0]
        source.sql("SELECT pg_create_logical_replication_slot('last', 'pgoutput')")
        fill(source, first=60)
        with pytest.MonkeyPatch.context() as patch:
            # As when others take the last ones between the look and the copy.
            patch.setattr(copies, "room", lambda _: Room(9, 9))
            report = pipeline.drain()
        assert len(report.windows) == 1
        assert "cannot be copied" in report.warnings[0]
        assert "max_replication_slots" in report.warnings[0]
        assert sorted(row["id"] for row in raw_rows(pipeline, "public.t")) == list(range(90 * 200))
        assert_settled(pipeline)
        for name in ("other", "last"):
            source.drop_slot(name)


def test_a_role_that_may_not_copy_slots_drains_alone(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    role = f"r_{source.database}"
    copy = "FUNCTION pg_copy_logical_replication_slot(name, name, bool)"
    source.sql(f"CREATE ROLE {role} LOGIN REPLICATION")
    source.sql(f"CREATE PUBLICATION p_{role} FOR ALL TABLES")
    source.sql(f"REVOKE EXECUTE ON {copy} FROM public")
    try:
        pipeline = catching_up(make_pipeline, source_dsn=source.dsn_of(role), publication=f"p_{role}")
        fill(source)
        report = pipeline.drain()
        assert len(report.windows) == 1
        assert "drained by one reader alone, since the slot cannot be copied" in report.warnings[0]
        assert len(raw_rows(pipeline, "public.t")) == 6000
        assert_settled(pipeline)
    finally:
        source.sql(f"DROP PUBLICATION p_{role}")
        source.sql(f"DROP ROLE {role}")


def test_few_cores_that_the_source_shares_are_one_readers(
    source: Source, make_pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was measured; but whoever sets the catch-up is taken at his word, and a source elsewhere takes none of these cores."""
    warnings: list[str] = []
    with connect(source.dsn) as conn:

        def windows_of(cores: int, **overrides: Any) -> int:
            monkeypatch.setattr(catch_up, "cores", lambda: cores)
            settings = make_pipeline(lake=str(tmp_path / str(len(warnings))), **overrides).settings
            run = DrainContext(settings, Ledger(Lake(settings.lake)), conn, conn.info.server_version, warnings.append, Silent())
            plan = catch_up.plan(run, 1 << 30, 3 << 30, "1:1:")
            return 1 if plan is None else len(plan.ends)

        assert windows_of(4) == 3
        assert warnings == []
        assert windows_of(3) == 1
        assert "source runs on this machine too, and one reader keeps 3 cores busy" in warnings.pop()
        assert windows_of(2, catchup_slots=2) == windows_of(2, catchup_threshold="1GB") == 2
        monkeypatch.setattr(catch_up, "on_this_machine", lambda _: False)
        assert windows_of(2) == 2
        assert warnings == []


def test_a_backlog_that_grows_faster_than_it_is_drained(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline = catching_up(make_pipeline, catchup_slots=1)
    fill(source, transactions=10)
    real = catch_up.commit_windows

    def beside_writers(*args: Any) -> Any:
        fill(source, transactions=40, first=100)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(catch_up, "commit_windows", beside_writers)
        report = pipeline.drain()
    assert any("grows faster than it is drained" in warning and "is lost in about" in warning for warning in report.warnings)
    assert not pipeline.drain().warnings


def test_how_many_windows() -> None:
    much, room, giga = 10 << 30, Room(10, 11), 1 << 30
    assert windows_for(giga - 1, giga, 2, room, 8) == Split(1)
    assert windows_for(giga, giga, 2, room, 8) == Split(3)
    assert windows_for(much, giga, 0, room, 8) == Split(1)
    assert windows_for(much, giga, 64, room, 64) == Split(6)
    assert windows_for(much, giga, 64, Room(10, 4), 64) == Split(2)
    assert windows_for(much, giga, 64, room, 2) == Split(2)
    one_core, no_room = windows_for(much, giga, 2, room, 1), windows_for(much, giga, 2, Room(1, 9), 8)
    assert one_core.windows == no_room.windows == 1
    assert "one core" in (one_core.reason or "")
    assert "max_replication_slots" in (no_room.reason or "")
    assert windows_for(300 << 10, 0, 2, room, 8) == Split(1)


@pytest.mark.parametrize("windows", [1, 2, 3, 7])
def test_windows_follow_one_another(windows: int) -> None:
    rng = random.Random(windows)
    for _ in range(100):
        start = rng.randrange(1 << 60)
        end = start + rng.randrange(1 << 20, 1 << 40)
        ranges = Plan(start, borders(start, end, windows), "1:1:").ranges
        assert len(ranges) == windows
        assert (ranges[0][0], ranges[-1][1]) == (start, end)
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
        sizes = [after - before for before, after in ranges]
        assert max(sizes) - min(sizes) <= 1


def test_falling_behind() -> None:
    mega = 1 << 20
    assert falling_behind("s", DrainRate(100 * mega, 50 * mega, 10, 500 * mega, None), mega) is None
    assert falling_behind("s", DrainRate(50 * mega, 100 * mega, 10, mega - 1, None), mega) is None
    text = falling_behind("s", DrainRate(50 * mega, 100 * mega, 10, 500 * mega, 3000 * mega), mega) or ""
    assert "writes 10.0 MB of WAL a second, 5.0 MB are drained" in text
    assert "slot s is lost in about 10 min at these rates" in text
    assert "max_slot_wal_keep_size" in (falling_behind("s", DrainRate(0, mega, 1, mega, None), mega) or "")

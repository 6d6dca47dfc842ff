"""A long drain counts what it has window by window, on one stream: a kill costs one window, and the slot moves while the drain goes on."""

import re
from itertools import pairwise
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline import failpoints
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import window as windows
from pgwal_pipeline.pipeline.reports import DrainReport
from pgwal_pipeline.postgres.stream import Messages, ReplicationStream
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import injected
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source

_MB = 1 << 20


def prepared(source: Source, make_pipeline: MakePipeline, **settings: Any) -> Pipeline:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql("CREATE TABLE u (id int PRIMARY KEY, v text)")
    pipeline = make_pipeline(**settings)
    drains.bootstrap(pipeline.settings, progress=Silent())
    return pipeline


def fill(source: Source, transactions: int, first: int = 0, kilobytes: int = 100) -> None:
    """Transactions of two tables with about so many kB of WAL each."""
    for number in range(first, first + transactions):
        source.sql(
            "WITH a AS (INSERT INTO u VALUES (%s, 'x')) INSERT INTO t SELECT %s, string_agg(md5(random()::text), '') "
            "FROM generate_series(1, %s)",
            number,
            number,
            kilobytes * 32,
        )


def assert_raw_is_whole(pipeline: Pipeline, count: int) -> None:
    """Each change stands once in raw, in the window that its commit belongs to, and windows follow one another."""
    counted = [window for window in pipeline.ledger.windows() if window.start_lsn < window.end_lsn]
    assert all(one.end_lsn == other.start_lsn for one, other in pairwise(counted))
    for name in "tu":
        frame = pl.read_delta(pipeline.lake.raw(TableName("public", name)))
        assert sorted(frame["id"]) == list(range(count))
        for window in counted:
            lsns = frame.filter(pl.col("_pgwal_window") == window.key)["_pgwal_commit_lsn"]
            assert all(window.start_lsn <= lsn < window.end_lsn for lsn in lsns)
            (rows,) = [write.rows for write in window.tables if write.table == f"public.{name}"] or [0]
            assert rows == len(lsns)


def confirmed(pipeline: Pipeline) -> int:
    found = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return parse_lsn(pipeline.source.value(found, pipeline.settings.slot))


def drained(pipeline: Pipeline) -> DrainReport:
    report = pipeline.drain()
    assert confirmed(pipeline) == pipeline.ledger.frontier()
    return report


def test_windows_of_a_size_on_one_stream(source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = prepared(source, make_pipeline, window_size="1MB")
    fill(source, 60)
    opened, moved = [], []
    begin, confirm = ReplicationStream.begin, ReplicationStream.confirm

    def counted(*args: Any, **named: Any) -> ReplicationStream:
        opened.append(args)
        return begin(*args, **named)

    def noted(self: ReplicationStream, lsn: int) -> None:
        moved.append(lsn)
        confirm(self, lsn)

    monkeypatch.setattr(ReplicationStream, "begin", counted)
    monkeypatch.setattr(ReplicationStream, "confirm", noted)
    report = drained(pipeline)
    assert len(opened) == 1
    assert len(report.windows) >= 4
    assert all(window.end_lsn - window.start_lsn < 2 * _MB for window in report.windows)
    assert sum(window.transactions for window in report.windows) == 60
    assert report.changes == 120
    assert sorted(set(moved)) == moved
    assert len(moved) > 1, "the slot moves while the drain goes on"
    assert_raw_is_whole(pipeline, 60)
    # Another drain of another length follows on.
    fill(source, 3, first=60)
    assert len(drained(pipeline).windows) == 1
    assert_raw_is_whole(pipeline, 63)


def test_windows_of_a_time(source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = prepared(source, make_pipeline, window_time="1s", memory_budget="1MB")
    fill(source, 40)
    with injected("drain.read=sleep:0.2"):
        report = drained(pipeline)
    assert len(report.windows) > 1
    assert_raw_is_whole(pipeline, 40)


def test_a_transaction_larger_than_a_window_stays_whole(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = prepared(source, make_pipeline, window_size="1MB", memory_budget="1MB")
    fill(source, 5)
    text = "(SELECT string_agg(md5(random()::text || i || j), '') FROM generate_series(1, 500) j)"
    source.sql(f"INSERT INTO t SELECT i, {text} FROM generate_series(5, 400) i")
    source.sql("INSERT INTO u SELECT i, 'x' FROM generate_series(5, 400) i")
    fill(source, 30, first=401)
    report = drained(pipeline)
    assert len(report.windows) > 2
    assert_raw_is_whole(pipeline, 431)


def test_wal_of_others_moves_the_slot_too(source: Source, make_pipeline: MakePipeline) -> None:
    """Much WAL without a change of ours: no window is shorter than it has to be, and the slot does not wait for its end."""
    pipeline = prepared(source, make_pipeline, window_size="1MB")
    fill(source, 2)
    for _ in range(10):
        source.sql("SELECT pg_logical_emit_message(false, 'noise', repeat('x', 1048576))")
    fill(source, 2, first=2)
    report = drained(pipeline)
    assert len(report.windows) > 1
    assert all(window.end_lsn - window.start_lsn >= _MB for window in report.windows[:-1])
    assert_raw_is_whole(pipeline, 4)


@pytest.mark.parametrize(
    "point", ["drain.between_windows=kill@3", "drain.after_prepared=kill@3", "drain.before_complete=kill@3", "drain.before_confirm=kill@1"]
)
def test_a_kill_costs_one_window(point: str, source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = prepared(source, make_pipeline, window_size="1MB")
    fill(source, 60)
    begun = pipeline.ledger.frontier()
    code = "from pgwal_pipeline.pipeline.drain import drain\ndrain(settings, progress=progress)"
    child = pipeline.child(code, environment={"PGWAL_FAILPOINTS": point, "PGWAL_WINDOW_SIZE": "1MB"})
    assert child.returncode == -9
    frontier = pipeline.ledger.frontier()
    assert frontier is not None
    assert begun is not None
    assert frontier >= begun + _MB, "what was counted before the kill stays"
    drained(pipeline)
    assert_raw_is_whole(pipeline, 60)


def test_a_connection_that_breaks_between_windows(source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that came before count, what came whole of the one under way is kept, and the sentence says how much."""
    pipeline = prepared(source, make_pipeline, window_size="1MB", memory_budget="1MB")
    fill(source, 200)
    read, came = ReplicationStream.read, [0]

    def breaking(self: ReplicationStream, *args: Any) -> Messages:
        messages = read(self, *args)
        before, came[0] = came[0], came[0] + messages.size
        if before < 3 * _MB <= came[0]:
            source.sql("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", pipeline.settings.slot)
        return messages

    monkeypatch.setattr(ReplicationStream, "read", breaking)
    report = drained(pipeline)
    assert len(report.windows) > 2
    (said,) = report.warnings
    assert re.search(
        r"What came whole is kept: [1-9]\d+ rows of [1-9]\d+ transactions, up to [0-9A-F]+/[0-9A-F]+, read in [0-9.]+ s\.", said
    )
    assert_raw_is_whole(pipeline, 200)


def test_a_connection_that_breaks_beside_the_stream(source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one on which tables are looked at, while the stream's lives: what counts by then is told all the same."""
    pipeline = prepared(source, make_pipeline, window_size="1MB", memory_budget="1MB")
    fill(source, 100)
    passed = [0]

    def hit(name: str) -> None:
        passed[0] += name == "drain.between_windows"
        if name == "drain.between_windows" and passed[0] == 3:
            source.sql(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE 'pgwal%' AND backend_type <> 'walsender'"
            )

    monkeypatch.setattr(failpoints, "hit", hit)
    report = drained(pipeline)
    (said,) = report.warnings
    assert re.search(r"What came whole is kept: [1-9]\d+ rows of [1-9]\d+ transactions, up to [0-9A-F]+/[0-9A-F]+, read in ", said), said
    assert_raw_is_whole(pipeline, 100)


def test_a_table_altered_and_truncated_between_windows(source: Source, pipeline: Pipeline) -> None:
    """What the stream tells of a table in one window and the catalog shows in another is put together as in drains of their own."""
    pipeline.settings = pipeline.settings.model_copy(update={"window_size": _MB})
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql("CREATE TABLE u (id int PRIMARY KEY, v text)")
    pipeline.sync()
    fill(source, 15)
    source.sql("TRUNCATE t")
    fill(source, 15, first=15)
    source.sql("ALTER TABLE u ADD COLUMN w int")
    source.sql("UPDATE u SET w = id")
    fill(source, 15, first=30)
    source.sql("TRUNCATE t")
    source.sql("INSERT INTO t VALUES (1000, 'last')")
    report = drained(pipeline)
    assert len(report.windows) > 2
    assert {str(state.table): state.reason for state in pipeline.ledger.tables().values()} == dict.fromkeys(["public.t", "public.u"])
    pipeline.publish()
    pipeline.assert_current("public.t", "public.u")


def test_the_last_window_is_the_one_that_was_asked_for(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = prepared(source, make_pipeline, window_size="1MB")
    fill(source, 40)
    end = source.value("SELECT (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::int8")
    fill(source, 5, first=40)
    report = pipeline.drain(end)
    assert report.windows[-1].end_lsn == end
    assert [window.key for window in report.windows] == sorted(window.key for window in report.windows)
    assert windows.window_key(end) == report.windows[-1].key
    drained(pipeline)
    assert_raw_is_whole(pipeline, 45)

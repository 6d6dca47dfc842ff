"""Connections that break in the middle of a drain: nothing is lost or doubled, the drain goes on, or ends with what came whole."""

import contextlib
import threading
import time
from collections.abc import Callable
from io import StringIO
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from pgwal_pipeline import failpoints
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake import raw as raw_tables
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import committer
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.postgres.connection import Connection, plain_session
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.proxy import Proxy, proxied, tcp
from pgwal_pipeline_tests.scenarios.connections.workload import assert_raw_is_whole, at_reads, drained, fill, prepared
from pgwal_pipeline_tests.support import Source, fresh_source, no_room


def by_socket(source: Source) -> str:
    """The source's DSN by its Unix socket, which holds some 200 kB: a connection that ends in the middle has not brought everything yet."""
    assert isinstance(source.server, Postgres)
    return make_dsn(source.dsn, host=str(source.server.socket_dir))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "_PAUSE", 0.05)


@pytest.mark.parametrize("who", ["walsender", "everyone"])
def test_terminated_again_and_again(
    who: str, source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    prepared(source)
    pipeline = make_pipeline(source_dsn=by_socket(source), memory_budget="1MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    fill(source, 100)
    times = 0

    def terminate(passed: int) -> None:
        nonlocal times
        if passed % 7 == 0 and times < 5:
            times += 1
            only = "AND backend_type = 'walsender'" if who == "walsender" else "AND application_name LIKE 'pgwal%'"
            # It ends when its last words are read, which is not while this waits.
            source.sql(f"SELECT pg_terminate_backend(pid, 200) FROM pg_stat_activity WHERE datname = current_database() {only}")

    at_reads(monkeypatch, terminate)
    report = drained(pipeline)
    assert times == 5
    assert len(report.windows) >= 2
    assert report.warnings
    assert all("goes on from there" in warning for warning in report.warnings)
    assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes


@pytest.mark.parametrize("reset", [False, True])
def test_cut_by_the_network(reset: bool, source: Source, make_pipeline: MakePipeline, quick: None) -> None:
    prepared(source)
    with Proxy(*tcp(source)) as proxy:
        pipeline = make_pipeline(source_dsn=proxied(source, proxy), memory_budget="1MB")
        drains.bootstrap(pipeline.settings, progress=Silent())
        fill(source, 80)
        proxy.reset, proxy.cut_after = reset, 900_000
        report = drained(pipeline)
        assert proxy.cuts >= 3
    assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes
    fill(source, 10, seed=1)
    pipeline.source = source
    drains.drain(pipeline.settings.model_copy(update={"source_dsn": make_pipeline().settings.source_dsn}), progress=Silent())
    assert_raw_is_whole(source, pipeline.settings.lake)


def test_a_transaction_larger_than_a_connection_lives_for_is_given_up_with_what_came_before(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(drains, "_PATIENCE", 2.0)
    prepared(source)
    with Proxy(*tcp(source)) as proxy:
        pipeline = make_pipeline(source_dsn=proxied(source, proxy), memory_budget="1MB")
        drains.bootstrap(pipeline.settings, progress=Silent())
        fill(source, 20)
        before = source.value("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        source.sql("INSERT INTO a (body) SELECT repeat(md5(random()::text), 30) FROM generate_series(1, 5000)")
        proxy.cut_after = 3_000_000
        with pytest.raises(SourceUnavailable):
            pipeline.drain()
        frontier = pipeline.ledger.frontier()
        assert frontier is not None
        assert frontier <= before
        proxy.cut_after = None
        report = drained(pipeline)
        assert report.changes >= 5000
    assert_raw_is_whole(source, pipeline.settings.lake)


def test_a_source_that_goes_away_for_good_leaves_what_came(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(drains, "_PATIENCE", 1.0)
    prepared(source)
    with Proxy(*tcp(source)) as proxy:
        pipeline = make_pipeline(source_dsn=proxied(source, proxy), memory_budget="1MB")
        drains.bootstrap(pipeline.settings, progress=Silent())
        fill(source, 100)

        def leave(passed: int) -> None:
            if passed == 5:
                proxy.refusing, proxy.cut_after = True, 0

        at_reads(monkeypatch, leave)
        with pytest.raises(SourceUnavailable) as caught:
            pipeline.drain()
        assert "in the way" not in str(caught.value)
        plan = pipeline.ledger.plan()
        assert plan is not None
        (read,) = pipeline.ledger.reads(plan).values()
        assert read.window.changes > 0
        monkeypatch.setattr(failpoints, "hit", lambda name: None)
        proxy.refusing, proxy.cut_after = False, None
        # On a busy machine the drain that failed may have finished a window before.
        finished = sum(window.changes for window in pipeline.ledger.windows())
        report = drained(pipeline)
        assert report.windows[0].end_lsn == read.window.end_lsn
        assert report.windows[0].changes == read.window.changes
    assert assert_raw_is_whole(source, pipeline.settings.lake) == finished + report.changes


def test_a_server_that_crashes_and_comes_back(
    make_server: Callable[..., Postgres], tmp_path: Any, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    server = make_server(fsync="on")
    with fresh_source(server) as source:
        prepared(source)
        pipeline = make_pipeline(source_dsn=source.dsn, memory_budget="1MB")
        pipeline.source = source
        drains.bootstrap(pipeline.settings, progress=Silent())
        fill(source, 100)
        back = threading.Thread(target=server.start)

        def crash(passed: int) -> None:
            if passed == 6:
                server.kill()
                source.close()
                back.start()

        at_reads(monkeypatch, crash)
        report = drained(pipeline)
        back.join()
        assert report.warnings
        assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes


def test_a_connection_through_which_nothing_comes_any_more(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """Half-open: nothing arrives and nothing fails. Found out by the answers that do not come; here after two seconds, not sixty."""
    prepared(source)
    monkeypatch.setattr("pgwal_pipeline.postgres.stream._LEAST_SILENCE", 2.0)
    monkeypatch.setattr("pgwal_pipeline.postgres.stream._LONGEST_INTERVAL", 0.5)
    source.sql(f"ALTER DATABASE {source.database} SET wal_sender_timeout = '1s'")
    with Proxy(*tcp(source)) as proxy:
        pipeline = make_pipeline(source_dsn=proxied(source, proxy), memory_budget="1MB")
        drains.bootstrap(pipeline.settings, progress=Silent())
        fill(source, 60)

        def freeze(passed: int) -> None:
            if passed == 4:
                proxy.frozen.set()
                threading.Timer(4.0, proxy.frozen.clear).start()

        at_reads(monkeypatch, freeze)
        report = drained(pipeline)
        assert report.warnings
    assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes


def test_a_source_without_room_to_decode(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """The walsender puts large transactions beside the slot (pg_replslot). Where it cannot, what came before stays."""
    monkeypatch.setattr(drains, "_PATIENCE", 1.0)
    server = make_server(logical_decoding_work_mem="64kB")
    with fresh_source(server) as source:
        prepared(source)
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source = source
        drained(pipeline)
        fill(source, 20)
        small = parse_lsn(source.value("SELECT pg_current_wal_lsn()::text"))
        with source.connect() as conn, conn.cursor() as cursor:
            cursor.copy_expert("COPY a (n, body) FROM STDIN", StringIO("1\tx\n" * 250_000))
        fill(source, 5, seed=1)
        with no_room(server, 16 << 20), pytest.raises(SourceUnavailable) as caught:
            pipeline.drain()
        assert "no room left on its disk while reading slot" in str(caught.value)
        assert str(caught.value).endswith("No space left on device; make room there and run it again.")
        frontier = pipeline.ledger.frontier()
        assert frontier is not None
        assert frontier >= small
        drained(pipeline)
        assert assert_raw_is_whole(source, pipeline.settings.lake) > 250_000


def test_a_catch_up_whose_connections_break_again_and_again(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """What came whole of a window is kept as a window of its own, so that each attempt gets further than the one before."""
    prepared(source)
    pipeline = make_pipeline(source_dsn=by_socket(source), memory_budget="1MB", catchup_threshold=1 << 20, catchup_slots=1)
    drained(pipeline)
    fill(source, 60)
    ended = 0

    def end(passed: int) -> None:
        nonlocal ended
        if passed % 4 == 3:
            ended += source.value(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND backend_type = 'walsender'"
            )

    at_reads(monkeypatch, end)
    report = drained(pipeline)
    monkeypatch.undo()
    assert ended > 3
    assert len(report.windows) > 2
    assert report.warnings
    assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes


def test_every_connection_of_the_source_is_taken_when_the_drain_comes_back(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """Its connections are ended in the middle of a window, and others take their places for a while."""
    server = make_server(max_connections="14", max_wal_senders="4")
    with fresh_source(server) as source:
        prepared(source)
        pipeline = make_pipeline(source_dsn=source.dsn, memory_budget="1MB")
        pipeline.source = source
        drained(pipeline)
        fill(source, 60)
        source.value("SELECT 1")
        crowd: list[Connection] = []
        left: list[threading.Timer] = []

        def leave() -> None:
            for conn in crowd:
                conn.close()

        def crowd_in(passed: int) -> None:
            if passed != 3 or crowd:
                return
            source.sql("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'pgwal%'")
            with contextlib.suppress(psycopg2.OperationalError):
                while True:
                    crowd.append(plain_session(source.dsn))
            left.append(threading.Timer(2.0, leave))
            left[0].start()

        at_reads(monkeypatch, crowd_in)
        report = drained(pipeline)
        monkeypatch.undo()
        left[0].join()
        assert len(crowd) > 5
        assert any("too many" in warning or "reserved for" in warning for warning in report.warnings), report.warnings
        assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes


def test_a_slow_lake_on_a_server_of_little_patience(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing files, looking at the tables and committing each take longer than the server waits for an answer: no connection is lost."""
    server = make_server(wal_sender_timeout="2s")
    with fresh_source(server) as source:
        prepared(source)
        pipeline = make_pipeline(source_dsn=source.dsn, memory_budget="1MB")
        pipeline.source = source
        drained(pipeline)
        fill(source, 40)
        add, review, count = raw_tables.WindowWriter.add, committer.review, committer.commit_windows
        started = threading.Event()

        def slowly(function: Any, seconds: float, once: bool = False) -> Any:
            def wrapper(*args: Any, **named: Any) -> Any:
                if not once or not started.is_set():
                    started.set()
                    time.sleep(seconds)
                return function(*args, **named)

            return wrapper

        monkeypatch.setattr(raw_tables.WindowWriter, "add", slowly(add, 5.0, once=True))
        monkeypatch.setattr(committer, "review", slowly(review, 5.0))
        monkeypatch.setattr(committer, "commit_windows", slowly(count, 5.0))
        report = drained(pipeline)
        assert report.warnings == ()
        assert len(report.windows) == 1
        assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes

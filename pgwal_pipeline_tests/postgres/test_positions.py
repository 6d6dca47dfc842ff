"""Where the WAL ends, by SQL and by a walsender: one and the same on Postgres, and the walsender's where they are made to differ."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.postgres import catalog, health, positions, slot
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.health import Check
from pgwal_pipeline_tests.postgres.shifted_positions import FAR, flushed, shift_sql
from pgwal_pipeline_tests.postgres.standby import standby_of
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for


@pytest.fixture
def walsenders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each walsender that is asked for a position."""
    asked: list[str] = []
    real = positions.replication_connection

    def counted(dsn: str) -> object:
        asked.append(dsn)
        return real(dsn)

    monkeypatch.setattr(positions, "replication_connection", counted)
    return asked


def wrote_nothing(source: Source, look: Callable[[], int]) -> bool:
    """Whether the WAL ended at one place before and after `look`, which gave that place; the server writes now and then by itself."""
    end = "SELECT pg_current_wal_insert_lsn() - '0/0'"
    before, found = int(source.value(end)), look()
    return before == found == int(source.value(end))


def test_sql_and_walsender_agree_while_the_source_is_written_to(source_matrix: Source, walsenders: list[str]) -> None:
    source = source_matrix
    source.sql("CREATE TABLE t (v text)")
    stop = threading.Event()

    def write(conn: object) -> None:
        with source.connect() as writer:
            while not stop.is_set():
                writer.execute("INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 20)")

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        with connect(source.dsn) as conn:
            found = [positions.compare(conn) for _ in range(15)]
            assert all(comparison.agree for comparison in found), found
            assert found[-1].stream > found[0].stream
            before = flushed(source)
            assert before <= catalog.flush_lsn(conn) <= flushed(source)
            assert catalog.insert_lsn(conn) >= before
            # Compared once a server, and not at each reading.
            for _ in range(3):
                catalog.flush_lsn(conn)
            assert len(walsenders) == 16
            assert not positions.known_to_differ(conn)
    finally:
        stop.set()
        for writer in writers:
            writer.join()


@pytest.mark.parametrize("by", [FAR, -(1 << 22)])
def test_the_walsenders_position_counts_where_sql_tells_another(
    by: int, source: Source, monkeypatch: pytest.MonkeyPatch, walsenders: list[str]
) -> None:
    source.sql("CREATE TABLE t (n int)")
    shift_sql(monkeypatch, by)
    slot.create(source.dsn, f"s_{source.database}", blocked_timeout=20, warn=print)
    with connect(source.dsn) as conn:
        for number in range(3):
            source.sql("INSERT INTO t VALUES (1)")
            before = flushed(source)
            assert before <= catalog.flush_lsn(conn) <= flushed(source)
            assert len(walsenders) == number + 2  # compared once, then asked each time
        assert positions.known_to_differ(conn)
        # What is not flushed yet counts as written.
        source.connect(options="-c synchronous_commit=off").execute("INSERT INTO t VALUES (2)")
        inserted = int(source.value("SELECT pg_current_wal_insert_lsn() - '0/0'"))
        assert catalog.insert_lsn(conn) >= inserted
        wait_for(lambda: wrote_nothing(source, lambda: catalog.insert_lsn(conn, force=False)), what="a look that writes nothing")
        before = flushed(source)
        state = slot.inspect(conn, f"s_{source.database}")
        assert state is not None
        assert before <= state.confirmed_flush_lsn + state.lag_bytes <= flushed(source)


def test_a_role_that_may_not_force_a_flush_is_told(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_sql(monkeypatch, FAR)
    source.sql("CREATE ROLE no_messages LOGIN REPLICATION")
    try:
        for (function,) in source.sql("SELECT oid::regprocedure::text FROM pg_proc WHERE proname = 'pg_logical_emit_message'"):
            source.sql(f"REVOKE EXECUTE ON FUNCTION {function} FROM public")
        with connect(source.dsn_of("no_messages")) as conn:
            assert flushed(source) <= catalog.flush_lsn(conn) < FAR
            with pytest.raises(SourceRefused, match=r"GRANT EXECUTE ON FUNCTION pg_catalog\.pg_logical_emit_message"):
                catalog.insert_lsn(conn)
    finally:
        source.sql("DROP ROLE no_messages")


def test_without_a_walsender_to_spare_sql_is_believed(
    make_server: Callable[..., Postgres], source: Source, monkeypatch: pytest.MonkeyPatch, walsenders: list[str]
) -> None:
    shift_sql(monkeypatch, FAR)
    with fresh_source(make_server(max_wal_senders="1")) as small, connect(small.dsn) as conn:
        assert catalog.flush_lsn(conn) >= FAR
        assert walsenders == []
    # Nor by a role that may not have one; that is said where one is needed.
    source.sql("CREATE ROLE plain LOGIN")
    try:
        with connect(source.dsn_of("plain")) as conn:
            assert catalog.flush_lsn(conn) >= FAR
            assert not positions.known_to_differ(conn)
    finally:
        source.sql("DROP ROLE plain")


def test_of_several_hosts_the_one_that_answered_is_asked(source: Source, make_server: Callable[..., Postgres]) -> None:
    """One of which is another server, of which another walsender tells."""
    other = make_server()
    here, there = (parse_dsn(dsn) for dsn in (source.dsn, other.dsn()))
    parts = {**here, "host": f"{there['host']},{here['host']}", "port": f"{there['port']},{here['port']}"}
    with connect(make_dsn(**parts)) as conn:  # that database is on one of them alone
        assert conn.info.port == int(str(here["port"]))
        assert positions.compare(conn).agree
        assert catalog.flush_lsn(conn) <= flushed(source)


def test_on_a_standby_that_has_more_than_it_replays(make_server: Callable[..., Postgres], tmp_path: Path) -> None:
    with fresh_source(make_server()) as source:
        source.sql("CREATE TABLE t (v text)")
        with standby_of(source, tmp_path / "standby") as standby, connect(standby.dsn) as conn:
            wait_for(lambda: standby.value("SELECT status FROM pg_stat_wal_receiver") == "streaming", what="the standby to stream")
            standby.sql("SELECT pg_wal_replay_pause()")
            wait_for(lambda: standby.value("SELECT pg_get_wal_replay_pause_state()") == "paused", what="the replay to pause")
            source.sql("INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 100)")
            end = flushed(source)
            wait_for(lambda: int(standby.value("SELECT pg_last_wal_receive_lsn() - '0/0'")) >= end, what="the WAL to come")
            found = positions.compare(conn)
            assert found.agree
            assert found.before < end <= found.stream
            assert catalog.flush_lsn(conn) == catalog.insert_lsn(conn) == found.before


@contextmanager
def checked(source: Source) -> Iterator[dict[str, Check]]:
    yield {check.name: check for check in health.doctor_checks(source.dsn, slot="s", publication="p", globs="*.*")}


def test_the_doctor_says_which_of_them_counts(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with checked(source) as found:
        assert found["positions"].ok
        assert "is one that the stream reaches" in found["positions"].found
        assert found["positions"].mend is None
    shift_sql(monkeypatch, FAR)
    with checked(source) as found:
        assert found["positions"].ok, "it stops nothing"
        assert "is not one of the stream, whose walsender is at" in found["positions"].found
        assert "runs use the walsender's position" in (found["positions"].mend or "")

"""The slot against real servers: made, refused, moved, and held by one at a time."""

import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import BlockedByTransaction, SlotBusy, SlotLost, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres import slot, waiting
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.postgres.standby import standby_of
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for


def silent(text: str) -> None:
    raise AssertionError(f"nothing should wait: {text}")


def name_of(source: Source, suffix: str = "") -> str:
    """A name of the test's own: slots belong to the whole cluster."""
    return f"s_{source.database}{suffix}"


def make(source: Source, suffix: str = "") -> slot.SlotState:
    return slot.create(source.dsn, name_of(source, suffix), blocked_timeout=20, warn=silent)


def look(source: Source, name: str) -> slot.SlotState | None:
    with connect(source.dsn) as conn:
        return slot.inspect(conn, name)


def flushed(source: Source) -> int:
    return int(source.value("select pg_current_wal_flush_lsn() - '0/0'"))


@contextmanager
def role(source: Source, name: str, options: str = "") -> Iterator[str]:
    source.sql(f"create role {name} login {options}")
    try:
        yield source.dsn_of(name)
    finally:
        source.sql(f"drop role {name}")


def test_create_inspect_and_drop(source_matrix: Source) -> None:
    source = source_matrix
    name = name_of(source)
    assert look(source, name) is None
    made = make(source)
    version = source.connect().info.server_version
    assert (made.name, made.plugin, made.database, made.active, made.active_pid) == (name, "pgoutput", source.database, False, None)
    assert (made.wal_status, made.invalidation_reason, made.lost) == ("reserved", None, False)
    assert 0 < made.restart_lsn < made.confirmed_flush_lsn
    assert made.safe_wal_size is not None
    assert (made.inactive_since is not None) == (version >= 170000)
    if version >= 170000:
        assert source.value("select failover from pg_replication_slots where slot_name = %s", name)
    source.sql("create table noise as select generate_series(1, 10000) n")
    later = look(source, name)
    assert later is not None
    assert later.confirmed_flush_lsn == made.confirmed_flush_lsn
    assert 500_000 < later.lag_bytes <= flushed(source) - later.confirmed_flush_lsn
    with connect(source.dsn) as conn:
        assert slot.lag(conn, name) >= later.lag_bytes
        assert slot.drop(conn, name)
        assert not slot.drop(conn, name)
        with pytest.raises(SlotLost, match=f"Slot {name} is not on the source"):
            slot.lag(conn, name)


def test_a_slot_of_that_name_is_there_already(source_matrix: Source) -> None:
    source = source_matrix
    make(source)
    with pytest.raises(SourceRefused, match=r"exists already.*pgwal drop"):
        make(source)
    physical = name_of(source, "_p")
    source.sql("select pg_create_physical_replication_slot(%s)", physical)
    try:
        with pytest.raises(SourceRefused, match=r"physical slot.*PGWAL_SLOT"):
            make(source, "_p")
    finally:
        source.sql("select pg_drop_replication_slot(%s)", physical)
    with fresh_source(source.server) as other, pytest.raises(SourceRefused, match=f"belongs to database {source.database}, not to"):
        slot.create(other.dsn, name_of(source), blocked_timeout=20, warn=silent)


def test_a_slot_of_another_plugin(source: Source) -> None:
    """The embedded server brings test_decoding."""
    source.sql("select pg_create_logical_replication_slot(%s, 'test_decoding')", name_of(source))
    with pytest.raises(SourceRefused, match=r"plugin test_decoding, not pgoutput.*PGWAL_SLOT"):
        make(source)
    with pytest.raises(SourceRefused, match="plugin test_decoding"):
        ReplicationStream.open(source.dsn, name_of(source), "p", 0, server_version=180000)


def test_what_the_server_must_be_set_to(make_server: Callable[..., Postgres]) -> None:
    server = make_server(wal_level="replica", max_replication_slots="2")
    with fresh_source(server) as source, pytest.raises(SourceRefused, match=r"wal_level = logical.*has replica.*ALTER SYSTEM"):
        make(source)
    server.settings["wal_level"] = "logical"
    server.restart()
    with fresh_source(server) as source:
        make(source, "_1")
        make(source, "_2")
        with pytest.raises(SourceRefused, match=rf"all 2 replication slots.*max_replication_slots.*{name_of(source, '_1')}"):
            make(source, "_3")


def test_a_role_without_replication(source_matrix: Source) -> None:
    source = source_matrix
    with role(source, "plain_reader") as dsn:
        with pytest.raises(SourceRefused, match="ALTER ROLE plain_reader REPLICATION"):
            slot.create(dsn, name_of(source), blocked_timeout=20, warn=silent)
        with pytest.raises(SourceRefused, match="ALTER ROLE plain_reader REPLICATION"), slot.create_with_snapshot(dsn, name_of(source)):
            pass
    with role(source, "replicator", "replication") as dsn:
        assert slot.create(dsn, name_of(source), blocked_timeout=20, warn=silent).plugin == "pgoutput"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_WARN_AFTER", 0.2)


@pytest.mark.usefixtures("soon")
def test_creation_waits_for_those_it_names(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table busy (n int)")
    blocker = source.connect(autocommit=False, application_name="nightly job")
    blocker.execute("insert into busy values (1)")
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        blocker.commit()

    made = slot.create(source.dsn, name_of(source), blocked_timeout=30, warn=warn)
    assert made.plugin == "pgoutput"
    assert len(warnings) == 1
    assert f"Making slot {made.name} waits for pid {blocker.info.backend_pid}, nightly job, postgres, {source.database}" in warnings[0]
    assert "idle in transaction: insert into busy values (1)" in warnings[0]


@pytest.mark.usefixtures("soon")
def test_creation_that_is_blocked_for_too_long_leaves_nothing(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table busy (n int)")
    blocker = source.connect(autocommit=False)
    blocker.execute("insert into busy values (1)")
    warnings: list[str] = []
    started = time.monotonic()
    with pytest.raises(BlockedByTransaction, match=rf"PGWAL_BLOCKED_TIMEOUT.*pid {blocker.info.backend_pid}") as caught:
        slot.create(source.dsn, name_of(source), blocked_timeout=1, warn=warnings.append)
    assert 0.9 < time.monotonic() - started < 20
    assert "insert into busy" in str(caught.value)
    assert len(warnings) == 1
    assert look(source, name_of(source)) is None
    with pytest.raises(BlockedByTransaction), slot.create_with_snapshot(source.dsn, name_of(source), blocked_timeout=1):
        pass
    wait_for(lambda: look(source, name_of(source)) is None, what="the temporary slot to go")
    blocker.commit()
    time.sleep(0.5)
    assert look(source, name_of(source)) is None
    assert make(source).name == name_of(source)


@pytest.mark.usefixtures("soon")
def test_a_prepared_transaction_blocks_too(source: Source) -> None:
    source.sql("create table busy (n int)")
    blocker = source.connect()
    for statement in ("begin", "insert into busy values (1)", f"prepare transaction '{source.database}'"):
        blocker.execute(statement.encode())
    with pytest.raises(BlockedByTransaction, match=f"the prepared transaction '{source.database}' in database {source.database}"):
        slot.create(source.dsn, name_of(source), blocked_timeout=1, warn=lambda _: None)
    source.sql(f"rollback prepared '{source.database}'")


def test_an_interrupted_creation_leaves_nothing(source: Source) -> None:
    source.sql("create table busy (n int)")
    blocker = source.connect(autocommit=False)
    blocker.execute("insert into busy values (1)")
    interrupt = threading.Timer(1, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        slot.create(source.dsn, name_of(source), blocked_timeout=60, warn=silent)
    blocker.commit()
    time.sleep(0.3)
    assert look(source, name_of(source)) is None


def test_a_creator_that_is_killed_leaves_nothing(source: Source) -> None:
    source.sql("create table busy (n int)")
    blocker = source.connect(autocommit=False)
    blocker.execute("insert into busy values (1)")
    child = start_child(f"slot.create({source.dsn!r}, {name_of(source)!r}, blocked_timeout=60, warn=print)")
    try:
        wait_for(lambda: look(source, name_of(source)), what="the creation to begin")
    finally:
        child.kill()
        child.wait()
    wait_for(lambda: look(source, name_of(source)) is None, what="the server to notice")
    blocker.commit()


def test_a_snapshot_and_its_lsn_are_of_one_moment(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table item (id int primary key)")
    source.sql("create publication p for table item")
    make(source)
    source.sql("insert into item values (1)")
    with slot.create_with_snapshot(source.dsn, name_of(source, "_v")) as (lsn, snapshot):
        source.sql("insert into item values (2)")
        reader = source.connect(autocommit=False)
        reader.execute("set transaction isolation level repeatable read, read only")
        reader.execute(f"set transaction snapshot '{snapshot}'".encode())
        assert reader.execute("select id from item").fetchall() == [(1,)]
        reader.rollback()
        commits = commit_lsns(source, name_of(source))
        assert [commit < lsn for commit in commits] == [True, False]
        assert look(source, name_of(source, "_v")) is not None
    wait_for(lambda: look(source, name_of(source, "_v")) is None, what="the temporary slot to go")


def commit_lsns(source: Source, name: str) -> list[int]:
    """What Begin announces for each transaction that the slot has still to send."""
    rows = source.sql(
        "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1', 'publication_names', 'p')", name
    )
    return [int.from_bytes(data[1:9]) for data in (bytes(row[0]) for row in rows) if data[:1] == b"B"]


def test_a_flush_can_be_forced(source_matrix: Source) -> None:
    source = source_matrix
    with connect(source.dsn) as conn:
        source.sql("create table noise (n int)")
        source.connect(options="-c synchronous_commit=off").execute("insert into noise values (1)")
        target = parse_lsn(source.value("select pg_current_wal_insert_lsn()::text"))
        conn.execute("set synchronous_commit = off")
        assert slot.force_flush(conn)
        assert flushed(source) >= target
        assert conn.info.transaction_status == TRANSACTION_STATUS_IDLE
    with role(source, "no_messages") as dsn, connect(dsn) as conn:
        assert slot.force_flush(conn)
        for (function,) in source.sql("select oid::regprocedure::text from pg_proc where proname = 'pg_logical_emit_message'"):
            source.sql(f"revoke execute on function {function} from public")
        assert not slot.force_flush(conn)


def start_child(code: str) -> subprocess.Popen[str]:
    prelude = "import time\nfrom pgwal_pipeline.postgres import slot\n"
    return subprocess.Popen([sys.executable, "-c", prelude + code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def hold(source: Source) -> subprocess.Popen[str]:
    child = start_child(f"with slot.exclusive({source.dsn!r}, {name_of(source)!r}, 5):\n    print('held', flush=True)\n    time.sleep(60)")
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_one_at_a_time_and_a_killed_holder_is_none(source_matrix: Source) -> None:
    source = source_matrix
    child = hold(source)
    try:
        started = time.monotonic()
        who = rf"Slot {name_of(source)} is held by another run \(pid \d+, pgwal on {re.escape(platform.node())}, user postgres.*since"
        with pytest.raises(SlotBusy, match=who), slot.exclusive(source.dsn, name_of(source), 0.5):
            raise AssertionError("two at once")
        assert 0.4 < time.monotonic() - started < 20
        with slot.exclusive(source.dsn, name_of(source, "_other"), 0.5):
            pass
        child.kill()
        started = time.monotonic()
        with slot.exclusive(source.dsn, name_of(source), 60):
            assert time.monotonic() - started < 20
    finally:
        child.kill()
        child.wait()


def test_the_lock_is_let_go_after_an_error_and_when_the_connection_is_gone(source: Source) -> None:
    with pytest.raises(ZeroDivisionError), slot.exclusive(source.dsn, name_of(source), 0):
        raise ZeroDivisionError
    with slot.exclusive(source.dsn, name_of(source), 5):
        source.sql(
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' "
            "and database = (select oid from pg_database where datname = current_database())"
        )
    with slot.exclusive(source.dsn, name_of(source), 5):
        pass


def test_a_reader_of_the_slot_is_waited_for_and_named(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create publication p")
    state = make(source)
    stream = ReplicationStream.open(source.dsn, state.name, "p", 0, server_version=source.connect().info.server_version)
    with stream:
        active = look(source, state.name)
        assert active is not None
        who = rf"Slot {state.name} is read by pid {active.active_pid}, pgwal.*pg_terminate_backend"
        with pytest.raises(SlotBusy, match=who), slot.exclusive(source.dsn, state.name, 0.3):
            pass
        with connect(source.dsn) as conn, pytest.raises(SlotBusy, match=f"pid {active.active_pid}"):
            slot.drop(conn, state.name, timeout=0.2)
        closing = threading.Timer(0.5, stream.close)
        closing.start()
        with slot.exclusive(source.dsn, state.name, 10):
            pass
        closing.join()


@pytest.mark.usefixtures("soon")
def test_on_a_standby(make_server: Callable[..., Postgres], tmp_path: Path) -> None:
    primary = make_server()
    with fresh_source(primary) as source:
        source.sql("create table item (id int primary key)")
        source.sql("create publication p for table item")
        with standby_of(source, tmp_path / "standby") as standby:
            warnings: list[str] = []

            def warn(text: str) -> None:
                warnings.append(text)
                source.sql("select pg_log_standby_snapshot()")

            made = slot.create(standby.dsn, name_of(source), blocked_timeout=30, warn=warn)
            assert all("SELECT pg_log_standby_snapshot() on the primary" in text for text in warnings)
            with slot.exclusive(standby.dsn, made.name, 5), connect(standby.dsn) as conn:
                assert not slot.force_flush(conn)
                source.sql("insert into item values (1)")
                target = flushed(source)
                wait_for(lambda: slot.lag(conn, made.name) >= target - made.confirmed_flush_lsn, what="the standby to replay")
                with ReplicationStream.open(standby.dsn, made.name, "p", 0, server_version=conn.info.server_version) as stream:
                    messages = wait_for(lambda: stream.read(1 << 20, 0.2), what="the insert")
                    assert b"I" in [payload[:1] for payload in messages.payloads]
                assert slot.drop(conn, made.name)


def test_a_source_that_is_down(make_server: Callable[..., Postgres]) -> None:
    server = make_server()
    with fresh_source(server) as source:
        make(source)
        with pytest.raises(SourceUnavailable), slot.exclusive(source.dsn, name_of(source), 1), connect(source.dsn) as conn:
            source.close()
            server.kill()
            slot.inspect(conn, name_of(source))
        with pytest.raises(SourceUnavailable):
            slot.create(source.dsn, "other", blocked_timeout=1, warn=silent)

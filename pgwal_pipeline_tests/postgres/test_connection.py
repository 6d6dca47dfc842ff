"""Sessions: what a statement gives, how addresses are tried, and what an interrupt does."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import psycopg2
import psycopg2.errors
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.postgres.dsn import connect, copying_connection, replication_connection
from pgwal_pipeline_tests.support import Source, wait_for

_WAITS = """
import sys
from pgwal_pipeline.postgres.dsn import connect, replication_connection
print("begun", flush=True)
conn = (replication_connection if sys.argv[3] == "walsender" else connect)(sys.argv[1])
print("connected", flush=True)
conn.execute(sys.argv[2])
"""


@pytest.mark.parametrize("make", [connect, copying_connection, replication_connection])
def test_what_a_statement_takes_and_gives(source: Source, make: type) -> None:
    with make(source.dsn) as conn:
        assert conn.execute("select '100 %', 1 % 2").fetchall() == [("100 %", 1)]
        assert conn.execute("select %s::text, %s::int, '%%'", ["it's \\ %s", None]).fetchall() == [("it's \\ %s", None, "%")]
        assert conn.execute("select %(a)s::oid[], %(b)s::text[], %(c)s", {"a": [1, 4294967295], "b": [], "c": -5}).fetchall() == [
            ([1, 4294967295], [], -5)
        ]
        assert conn.execute("set local jit = off; select 1; select 2").fetchall() == [(2,)]
        with pytest.raises(psycopg2.errors.DivisionByZero):
            conn.execute("select 1; select 1/0; select 2")
        assert conn.execute("select 3").fetchone() == (3,)
    assert conn.closed


@pytest.mark.parametrize("make", [connect, copying_connection])
def test_threads_may_share_a_session(source: Source, make: type) -> None:
    with make(source.dsn) as conn, ThreadPoolExecutor(8) as pool:
        asked = list(range(200))
        assert list(pool.map(lambda n: conn.execute("select %s, pg_sleep(0.001)", [n]).fetchall()[0][0], asked)) == asked


def test_transactions_and_savepoints(source: Source) -> None:
    source.sql("create table t (n int)")
    with connect(source.dsn) as conn:
        with conn.transaction():
            conn.execute("insert into public.t values (1)")
            with pytest.raises(psycopg2.errors.UndefinedTable), conn.transaction():
                conn.execute("insert into public.t values (2)")
                conn.execute("insert into public.nosuch values (2)")
            with conn.transaction():
                conn.execute("insert into public.t values (3)")
        with pytest.raises(ZeroDivisionError), conn.transaction():
            conn.execute("insert into public.t values (4)")
            raise ZeroDivisionError
    assert source.sql("select n from t order by n") == [(1,), (3,)]


@contextmanager
def deaf() -> Iterator[int]:
    """A port where connections are taken and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_each_address_has_its_own_time(source: Source) -> None:
    parts = parse_dsn(source.dsn)
    with deaf() as port:
        several = {**parts, "host": f"127.0.0.1,{parts['host']}", "port": f"{port},{parts['port']}", "connect_timeout": "2"}
        started = time.monotonic()
        with connect(make_dsn(**several)) as conn:
            assert 1.5 < time.monotonic() - started < 20
            assert str(conn.info.port) == parts["port"]
    with connect(make_dsn(**{**parts, "target_session_attrs": "prefer-standby"})) as conn:
        assert conn.execute("select 1").fetchone() == (1,)
    with pytest.raises(SourceUnavailable, match="standby"):
        connect(make_dsn(**{**parts, "target_session_attrs": "standby"}))


@contextmanager
def waiting(dsn: str, statement: str, kind: str = "sql") -> Iterator["subprocess.Popen[str]"]:
    """A process that runs a statement which does not end."""
    command = [sys.executable, "-c", _WAITS, dsn, statement, kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.wait()


def interrupted(process: "subprocess.Popen[str]") -> float:
    """Seconds that the process takes to end by an interrupt."""
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert process.returncode in (1, -signal.SIGINT)
    return time.monotonic() - started


def at_work(source: Source, statement: str) -> bool:
    return bool(source.sql("select from pg_stat_activity where query = %s and state = 'active'", statement))


@pytest.mark.parametrize("kind", ["sql", "walsender"])
def test_a_long_statement_is_interrupted(source: Source, kind: str) -> None:
    statement = "select pg_sleep(60)"
    with waiting(source.dsn, statement, kind) as process:
        wait_for(lambda: at_work(source, statement), what="the statement to begin")
        assert interrupted(process) < 5
        assert not at_work(source, statement)


def test_a_statement_that_waits_for_a_lock_is_interrupted_and_leaves_the_queue(source: Source) -> None:
    source.sql("create table t (n int)")
    statement = "lock table public.t"
    with closing(source.connect(autocommit=False)) as holder:
        holder.execute("lock table t in access share mode")
        with waiting(source.dsn, f"begin; {statement}") as process:
            waits = "select from pg_locks where relation = 't'::regclass and not granted"
            wait_for(lambda: source.sql(waits), what="the statement to wait")
            assert interrupted(process) < 5
            assert not source.sql(waits)


def test_a_connection_to_a_host_that_does_not_answer_is_interrupted() -> None:
    with deaf() as port, waiting(f"host=127.0.0.1 port={port} user=nobody connect_timeout=60", "") as process:
        time.sleep(0.3)
        assert interrupted(process) < 5


def test_an_interrupt_does_not_wait_for_a_server_that_is_gone(source: Source) -> None:
    """Cancelling takes a session of its own, which nobody answers either."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        passing = threading.Thread(target=_pass_one_on, args=(listener, source), daemon=True)
        passing.start()
        parts = {**parse_dsn(source.dsn), "host": "127.0.0.1", "port": str(listener.getsockname()[1]), "sslmode": "disable"}
        statement = "select pg_sleep(20)"
        with waiting(make_dsn(**parts), statement) as process:
            wait_for(lambda: at_work(source, statement), what="the statement to begin")
            assert interrupted(process) < 15


def _pass_one_on(listener: socket.socket, source: Source) -> None:
    """Pass the first connection on to the source, and leave all others without an answer."""
    parts = parse_dsn(source.dsn)
    client, _ = listener.accept()
    server = socket.create_connection((str(parts["host"]), int(parts["port"])))

    def pass_on(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)

    threading.Thread(target=pass_on, args=(server, client), daemon=True).start()
    pass_on(client, server)

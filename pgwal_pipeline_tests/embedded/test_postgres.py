"""The Postgres launcher: real servers, started, killed and started again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.host.spawn import port_free
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline_tests.embedded.launching import FAST, OpenFolder, as_root
from pgwal_pipeline_tests.support import Source, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server as the demo has it, with a table; its data is made once for all tests here."""
    made = Postgres(tmp_path_factory.mktemp("launcher") / "data", settings=FAST)
    made.start()
    with plain_session(made.dsn()) as connection:
        connection.execute("create table kept (id int)")
    yield made
    made.destroy()


@pytest.fixture
def stopped(server: Postgres) -> Iterator[Postgres]:
    """The same server, stopped for the length of a test."""
    server.stop()
    yield server
    server.start()


def _rows(server: Postgres) -> int:
    with plain_session(server.dsn()) as connection:
        row = connection.execute("select count(*) from kept").fetchone()
    assert row is not None
    return row[0]


def _add(server: Postgres) -> None:
    with plain_session(server.dsn()) as connection:
        connection.execute("insert into kept values (1)")


def test_every_version_streams_logically(source_matrix: Source) -> None:
    assert int(source_matrix.value("show server_version_num")) // 10000 == source_matrix.server.installation.version
    slot = source_matrix.value("select slot_name from pg_create_logical_replication_slot('s', 'pgoutput')")
    assert slot == "s"


def test_data_and_port_stay_over_a_restart(server: Postgres) -> None:
    before, dsn = _rows(server), server.dsn()
    _add(server)
    server.restart()
    assert server.dsn() == dsn
    assert _rows(server) == before + 1


def test_committed_rows_outlive_a_kill(server: Postgres) -> None:
    before = _rows(server)
    with plain_session(server.dsn()) as connection:
        connection.execute("insert into kept values (1)")
        connection.commit()
        server.kill()
        with pytest.raises(psycopg2.OperationalError):
            connection.execute("select 1")
    assert not server.running
    server.start()
    assert _rows(server) == before + 1


def test_a_password_over_tcp_and_none_through_the_socket(server: Postgres) -> None:
    with plain_session(server.dsn()) as connection:
        assert connection.info.host == "127.0.0.1"
    for wrong in ("", "wrong"):
        with pytest.raises(psycopg2.OperationalError, match="password"):
            plain_session(server.dsn(password=wrong))
    with plain_session(make_dsn(host=str(server.socket_dir), port=server.port, user="postgres")):
        pass
    assert server.socket_dir.stat().st_mode & 0o077 == 0
    password = (server.data_dir / "pgwal_password").read_text()
    assert password not in repr(server)
    assert password not in server.log_file.read_text()


def test_dsn_takes_any_name(server: Postgres) -> None:
    with plain_session(server.dsn()) as connection:
        connection.execute('create database "a b/c?"')
        connection.execute("create role \"o'r@x\" login password 'p:w/d'")
    with plain_session(server.dsn("a b/c?", "o'r@x", password="p:w/d")) as connection:
        assert (connection.info.dbname, connection.info.user) == ("a b/c?", "o'r@x")


def test_data_in_use_is_refused(server: Postgres) -> None:
    with pytest.raises(PgwalError, match="in use by another process"):
        Postgres(server.data_dir, settings=FAST).start()
    assert _rows(server) >= 0


def test_a_taken_port_is_named(stopped: Postgres) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PgwalError, match=f"Port {port} on 127.0.0.1 is taken"):
            Postgres(stopped.data_dir, settings=FAST, port=port).start()


def test_data_of_another_major_version_is_refused(stopped: Postgres) -> None:
    own = stopped.data_dir / "PG_VERSION"
    version = own.read_text()
    own.write_text("12\n")
    try:
        with pytest.raises(PgwalError, match=rf"is of version 12, but the server at hand is {version.strip()}"):
            Postgres(stopped.data_dir, settings=FAST).start()
    finally:
        own.write_text(version)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/letter.txt").write_text("mine")
    with pytest.raises(PgwalError, match="not empty and holds no Postgres data"):
        Postgres(tmp_path / "data").start()
    assert (tmp_path / "data/letter.txt").read_text() == "mine"


def test_the_logs_end_says_why_there_was_no_start(stopped: Postgres) -> None:
    with pytest.raises(PgwalError, match=r"did not start: .*FATAL:.*wal_level") as caught:
        Postgres(stopped.data_dir, settings={**FAST, "wal_level": "nonsense"}).start()
    assert "\n" not in str(caught.value)


def test_a_server_that_outlived_its_starter_is_stopped_first(server: Postgres) -> None:
    left = server.pid
    server._release()  # as if the process that started it had gone
    with Postgres(server.data_dir, settings=FAST) as heir:
        assert heir.pid != left
        assert _rows(heir) >= 0
    wait_for(lambda: not server.running, what="the server left over to be gone")
    server.start()


def test_the_server_outlives_the_thread_that_started_it(stopped: Postgres) -> None:
    thread = threading.Thread(target=stopped.start)
    thread.start()
    thread.join()
    assert stopped.running
    assert _rows(stopped) >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's death on Linux only")
def test_the_server_ends_with_a_process_that_is_killed(stopped: Postgres) -> None:
    program = (
        "import sys, time; from pathlib import Path; from pgwal_pipeline.embedded.postgres import Postgres\n"
        "server = Postgres(Path(sys.argv[1])); server.start(); print(server.pid, server.port, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, str(stopped.data_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        pid, port = map(int, starter.stdout.readline().split())
        os.kill(pid, 0)
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    wait_for(lambda: port_free(port), what="the server to end")


def test_a_process_that_took_the_id_of_a_dead_server_is_left_alone(stopped: Postgres) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        pid_file = stopped.data_dir / "postmaster.pid"
        pid_file.write_text(f"{other.pid}\n{stopped.data_dir}\n1\n{stopped.port}\n/tmp/pgwal-gone\n")
        with contextlib.suppress(PgwalError):  # Postgres itself may see another server in it
            stopped.start()
        assert other.poll() is None
        other.kill()
    pid_file.unlink(missing_ok=True)


@as_root
def test_data_under_a_closed_folder(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    server = Postgres(closed / "data", settings=FAST)
    try:
        server.start()
        assert (closed / "data").stat().st_uid != 0
        server.restart()
        assert server.running
    finally:
        server.destroy()


@as_root
def test_another_users_data_is_refused(server: Postgres) -> None:
    program = (
        "import os, sys; from pathlib import Path; from pgwal_pipeline.embedded.postgres import Postgres, PgwalError\n"
        "os.seteuid(1234)\n"
        "try: Postgres(Path(sys.argv[1])).start()\n"
        "except PgwalError as error: print(error)"
    )
    with contextlib.closing(OpenFolder()) as folder:
        closed = folder.path / "data"
        closed.mkdir(mode=0o700)
        done = subprocess.run([sys.executable, "-c", program, str(closed)], capture_output=True, text=True, check=True)
    assert "belongs to another user" in done.stdout

"""Connections: what a session has pinned, and what is said when there is none."""

import socket
import time
from collections.abc import Callable, Iterator

import psycopg2
import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import PgwalError, SettingError, SlotBusy, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres import dsn
from pgwal_pipeline.postgres.connection import ReplicationConnection, plain_session, wait
from pgwal_pipeline_tests.support import Source, wait_for

SECRET = "hunter2-S3cret"


def test_output_settings_are_pinned_whatever_the_role_has(source: Source) -> None:
    source.sql("drop role if exists odd_role")
    source.sql("create role odd_role login")
    for setting in (
        "DateStyle = 'German'",
        "IntervalStyle = 'iso_8601'",
        "TimeZone = 'Asia/Tokyo'",
        "extra_float_digits = 0",
        "bytea_output = 'escape'",
        "search_path = 'public'",
        "client_encoding = 'LATIN1'",
        "statement_timeout = '1min'",
        "idle_session_timeout = '1min'",
    ):
        source.sql(f"alter role odd_role set {setting}")
    try:
        with dsn.connect(source.dsn_of("odd_role"), application="pgwal test") as conn:
            row = conn.execute(
                """select '2024-02-03'::date::text, '1 day 02:00'::interval::text, '2024-02-03 00:00+00'::timestamptz::text,
                          (0.1::float8 + 0.2)::text,
                          '\\xff'::bytea::text, current_setting('search_path'), current_setting('application_name'),
                          current_setting('statement_timeout'), current_setting('idle_session_timeout')"""
            ).fetchone()
            assert row == (
                "2024-02-03",
                "1 day 02:00:00",
                "2024-02-03 00:00:00+00",
                "0.30000000000000004",
                "\\xff",
                "pg_catalog",
                "pgwal test",
                "0",
                "0",
            )
            assert conn.encoding == "UTF8"
            assert conn.autocommit
    finally:
        source.sql("drop role odd_role")


def test_the_dsn_has_its_say(source: Source) -> None:
    with dsn.connect(source.dsn + "?application_name=theirs&connect_timeout=33") as conn:
        assert conn.execute("select current_setting('application_name')").fetchone() == ("theirs",)
        assert conn.info.dsn_parameters["connect_timeout"] == "33"
    with dsn.connect(source.dsn, connect_timeout=44, dbname="postgres") as conn:
        assert conn.info.dbname == "postgres"
        assert conn.info.dsn_parameters["connect_timeout"] == "44"


@pytest.mark.matrix
def test_a_replication_connection_takes_commands_and_sql(source_matrix: Source) -> None:
    walsender = dsn.replication_connection(source_matrix.dsn)
    answer = walsender.execute("IDENTIFY_SYSTEM").fetchall()
    assert answer[0][3] == source_matrix.database
    assert walsender.execute("SHOW DateStyle").fetchall() == [("ISO, YMD",)]
    walsender.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server that asks for passwords over TCP, as it comes."""
    server = Postgres(
        tmp_path_factory.mktemp("guarded") / "data", settings={"fsync": "off", "max_connections": "8", "max_wal_senders": "1"}
    )
    server.start()
    with plain_session(server.dsn()) as admin:
        admin.execute(f"create role alice login password '{SECRET}'".encode())
        admin.execute(b"create role sleeper password 'x'")
        admin.execute(b"create database closed")
        admin.execute(b"revoke connect on database closed from public")
    yield server
    server.destroy()


def _refusal(text: str, connect: Callable[[str], object] = dsn.connect) -> PgwalError:
    with pytest.raises(PgwalError) as caught:
        connect(text)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 400
    assert SECRET not in message
    assert SECRET not in repr(caught.value.__cause__)
    return caught.value


def test_wrong_password_role_database(guarded: Postgres) -> None:
    assert isinstance(error := _refusal(guarded.dsn(user="alice", password="wrong")), SourceRefused)
    assert "the password of alice is missing or wrong" in str(error)
    assert f"alice@127.0.0.1:{guarded.port}/postgres" in str(error)
    assert "password of alice" in str(_refusal(guarded.dsn(user="alice")))
    assert "password of nosuch" in str(_refusal(guarded.dsn(user="nosuch", password=SECRET)))  # the server does not tell them apart
    assert "there is no database nosuch" in str(_refusal(guarded.dsn("nosuch", user="alice", password=SECRET)))
    assert "GRANT CONNECT ON DATABASE closed TO alice" in str(_refusal(guarded.dsn("closed", user="alice", password=SECRET)))
    assert "ALTER ROLE sleeper LOGIN" in str(_refusal(guarded.dsn(user="sleeper", password="x")))
    assert dsn.connect(guarded.dsn(user="alice", password=SECRET)).info.user == "alice"


def test_no_such_role(source: Source) -> None:
    error = _refusal(source.dsn_of("nosuch_role"))
    assert isinstance(error, SourceRefused)
    assert "there is no role nosuch_role" in str(error)


def test_may_not_replicate(guarded: Postgres) -> None:
    error = _refusal(guarded.dsn(user="alice", password=SECRET), dsn.replication_connection)
    assert isinstance(error, SourceRefused)
    assert "ALTER ROLE alice REPLICATION" in str(error)
    first = wait_for(lambda: _walsender(guarded), what="the one walsender to be free")
    error = _refusal(guarded.dsn(), dsn.replication_connection)
    assert isinstance(error, SourceRefused)
    assert "max_wal_senders" in str(error)
    first.close()


def _walsender(server: Postgres) -> ReplicationConnection | None:
    """A connection to the walsender, None while the one of a moment ago has not ended."""
    try:
        return dsn.replication_connection(server.dsn())
    except SourceRefused:
        return None


def test_too_many_connections(guarded: Postgres) -> None:
    taken = []
    try:
        with pytest.raises(SourceUnavailable, match="accepts no connection now") as caught:
            for _ in range(20):
                taken.append(dsn.connect(guarded.dsn(user="alice", password=SECRET)))  # noqa: PERF401
        assert caught.value.transient
    finally:
        for connection in taken:
            connection.close()


def test_unreachable(guarded: Postgres) -> None:
    error = _refusal(f"postgresql://alice:{SECRET}@127.0.0.1:1/shop")
    assert isinstance(error, SourceUnavailable)
    assert error.transient
    assert "alice@127.0.0.1:1/shop cannot be reached: Connection refused" in str(error)
    error = _refusal(f"postgresql://alice:{SECRET}@no-such-host.invalid/shop")
    assert "its host name is not known" in str(error)
    error = _refusal(f"host=/no/such/folder user=alice password={SECRET}")
    assert "No such file or directory" in str(error)
    error = _refusal(f"host=127.0.0.1,127.0.0.1 port=1,2 user=alice password={SECRET}")
    assert "127.0.0.1:1,2" in str(error)
    error = _refusal(guarded.dsn(user="alice", password=SECRET) + "?sslmode=require")
    assert "SSL" in str(error)


def test_a_host_that_does_not_answer_is_given_up() -> None:

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        started = time.monotonic()
        error = _refusal(f"host=127.0.0.1 port={deaf.getsockname()[1]} user=alice password={SECRET} connect_timeout=2")
        assert time.monotonic() - started < 20
    assert isinstance(error, SourceUnavailable)
    assert "timeout" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        f"{SECRET}",
        f"host=a {SECRET}",
        f"host=a passw0rd={SECRET}",
        f"postgresql://alice:{SECRET}%zz@host/shop",
        f"postgresql://alice:{SECRET}/x@host/shop",
        "postgresql://alice:1234/hunter2-S3cret@host/shop",
        f"postgresql://alice:x@{SECRET}@host/shop",
        f"host=a port={SECRET}",
        "host=a port=0",
        f"host=127.0.0.1 sslmode={SECRET}",
        f"host=127.0.0.1 keepalives={SECRET}",
        f"service={SECRET}",
        f"host=a,b,c port=1,2 password={SECRET}",
        f"host=a..{SECRET}",
        f"host={'a' * 64} password={SECRET}",
        f"postgresql://alice@right\u202eleft.example/{SECRET}",
        f"host=127.0.0.1 password={SECRET}\udcff",
    ],
)
def test_a_dsn_that_cannot_be_used_names_the_setting(text: str) -> None:
    error = _refusal(text)
    assert isinstance(error, SettingError)
    assert error.exit_code == 2
    assert "PGWAL_SOURCE_DSN" in str(error)


def test_describe_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    assert dsn.describe_dsn(f"postgresql://alice:{SECRET}@db.example:6000/shop") == "alice@db.example:6000/shop"
    assert dsn.describe_dsn(f"host=db.example user=alice password={SECRET}") == "alice@db.example:5432/alice"
    monkeypatch.setenv("PGHOST", "elsewhere")
    monkeypatch.setenv("PGPASSWORD", SECRET)
    assert dsn.describe_dsn("user=bob dbname=x") == "bob@elsewhere:5432/x"
    monkeypatch.setenv("PGUSER", "b\udcf6b")
    assert dsn.describe_dsn("dbname=x") == "b\ufffdb@elsewhere:5432/x"


def test_errors_in_mid_work(source: Source) -> None:
    conn = dsn.connect(source.dsn)

    def error_of(statement: str) -> PgwalError:
        with pytest.raises(psycopg2.Error) as caught:
            conn.execute(statement.encode())
        translated = dsn.translate(caught.value, "doing this")
        assert "\n" not in str(translated) and "doing this" in str(translated)
        return translated

    refused = error_of("select * from public.nosuch")
    assert isinstance(refused, SourceRefused)
    assert 'relation "public.nosuch" does not exist' in str(refused)
    source.sql("create table locked (id int)")
    holder = source.connect(autocommit=False)
    holder.execute("lock table locked")
    conn.execute("set lock_timeout = '10ms'")
    assert isinstance(error_of("select * from public.locked"), SourceUnavailable)
    holder.rollback()
    source.value("select count(*) from pg_create_logical_replication_slot('taken', 'pgoutput')")
    reader = dsn.replication_connection(source.dsn)
    source.sql("create publication pub")
    cursor = reader.cursor()
    cursor.start_replication_expert(b"START_REPLICATION SLOT taken LOGICAL 0/0 (proto_version '1', publication_names 'pub')")
    wait(reader)
    assert isinstance(error_of("select pg_drop_replication_slot('taken')"), SlotBusy)
    reader.close()
    source.sql("select pg_terminate_backend(%s)", conn.info.backend_pid)
    lost = error_of("select 1")
    assert isinstance(lost, SourceUnavailable)
    assert lost.transient
    assert isinstance(error_of("select 1"), SourceUnavailable)  # and the closed connection too

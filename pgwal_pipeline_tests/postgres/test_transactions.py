"""Which transactions a read sees, on a standby too, and waiting for those that are open."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

import psycopg2
import psycopg2.errors
import pytest

from pgwal_pipeline.embedded.postgres import Postgres, servers
from pgwal_pipeline.messages.errors import BlockedByTransaction, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres import catalog, dsn, publication, transactions
from pgwal_pipeline.postgres.connection import Connection, plain_session
from pgwal_pipeline.postgres.transactions import begin_snapshot, older_transactions, wait_for_transactions
from pgwal_pipeline_tests.support import Source, start_server, wait_for


def begun(source: Source, statement: str = "select 1") -> tuple[Connection, int]:
    """An open transaction with a number."""
    source.sql("select 1")  # `sql` has a connection of its own
    connection = source.connect(autocommit=False, application_name="old one")
    row = connection.execute("select txid_current()").fetchone()
    assert row is not None
    connection.execute(statement.encode())
    return connection, row[0]


def never(_: str) -> None:
    raise AssertionError("nothing to warn of")


# ---- waiting


@pytest.mark.matrix
def test_waits_for_older_transactions_only(source_matrix: Source) -> None:
    source = source_matrix
    with dsn.connect(source.dsn) as conn:
        wait_for_transactions(conn, 3, 0, never)
        older, xid = begun(source)
        wait_for_transactions(conn, xid, 0, never)
        younger, _ = begun(source)
        threading.Timer(0.4, older.commit).start()
        started = time.monotonic()
        wait_for_transactions(conn, xid + 1, 20, never)
        assert 0.3 < time.monotonic() - started < 15
        assert older_transactions(conn, xid + 1) == []
        younger.rollback()


@pytest.mark.matrix
def test_names_who_is_waited_for(source_matrix: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_matrix
    monkeypatch.setattr(transactions, "_WARN_AFTER", 0.2)
    monkeypatch.setattr(transactions, "_LIST_EVERY", 0.2)
    old, xid = begun(source, "select 'the culprit', '" + "x" * 200 + "'")
    pid = old.info.backend_pid
    other, _ = begun(source, "select 'younger'")
    warnings: list[str] = []
    with dsn.connect(source.dsn) as conn:
        with pytest.raises(BlockedByTransaction) as caught:
            wait_for_transactions(conn, xid + 1, 1, warnings.append)
        message = str(caught.value)
        assert len(warnings) == 1  # nobody is named twice
        for text in (message, warnings[0]):
            assert f"pid {pid}" in text and "old one" in text and "the culprit" in text
            assert "xxxxx" in text and "x" * 100 not in text
            assert "younger" not in text
            assert "\n" not in text
        assert "PGWAL_BLOCKED_TIMEOUT" in message and "within 1 s" in message
        old.rollback()
        other.rollback()
        # A prepared one has no session.
        old.execute("create table t (id int)")
        row = old.execute("select txid_current()").fetchone()
        assert row is not None
        old.execute("prepare transaction 'left behind'")
        old.commit()
        with pytest.raises(BlockedByTransaction, match=f"prepared transaction 'left behind' in database {source.database}"):
            wait_for_transactions(conn, row[0] + 1, 0.3, warnings.append)
        source.sql("rollback prepared 'left behind'")
        wait_for_transactions(conn, row[0] + 1, 0, never)


def test_an_ordinary_role_names_them_too(source: Source) -> None:
    old, xid = begun(source)
    source.sql("drop role if exists onlooker; create role onlooker login")
    try:
        with dsn.connect(source.dsn_of("onlooker")) as conn:
            (blocker,) = older_transactions(conn, xid + 1)
            assert (blocker.pid, blocker.user, blocker.query) == (old.info.backend_pid, "postgres", None)
    finally:
        old.rollback()
        source.sql("drop role onlooker")


def test_numbers_go_round(source: Source) -> None:
    """Locks have 32 bits of a number: one of the last round is older, not younger."""
    old, xid = begun(source)
    with dsn.connect(source.dsn) as conn:
        assert len(older_transactions(conn, xid + 1)) == 1
        assert len(older_transactions(conn, xid)) == 0
        assert len(older_transactions(conn, (1 << 32) + xid + 1)) == 1
        assert len(older_transactions(conn, xid + 2_000_000_000)) == 1
        assert len(older_transactions(conn, (1 << 32) + xid - 5)) == 0
    old.rollback()


def test_a_lost_connection(source: Source) -> None:
    _, xid = begun(source)
    with dsn.connect(source.dsn) as conn:
        threading.Timer(0.3, lambda: source.sql("select pg_terminate_backend(%s)", conn.info.backend_pid)).start()
        with pytest.raises(SourceUnavailable, match="waiting for open transactions"):
            wait_for_transactions(conn, xid + 1, 20, never)


# ---- snapshots


@pytest.mark.matrix
def test_snapshot_of_a_primary(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table t (id int)")
    old, xid = begun(source, "insert into t values (1)")
    source.sql("insert into t values (2)")
    with dsn.connect(source.dsn) as conn:
        xmin, xmax, running = begin_snapshot(conn).split(":")
        assert int(xmin) <= xid < int(xmax)
        assert str(xid) in running.split(",")
        old.commit()
        assert conn.execute("select id from public.t").fetchall() == [(2,)]
        assert conn.execute("show transaction_isolation").fetchone() == ("repeatable read",)
        with pytest.raises(psycopg2.errors.ReadOnlySqlTransaction):
            conn.execute("create table public.u ()")
        conn.execute("ROLLBACK")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Source, Source]]:
    """A primary and a standby of it that follows at once."""
    installation = next((found for found in servers() if (found.bin / "pg_basebackup").exists()), None)
    if installation is None:
        pytest.skip("no pg_basebackup at hand")
    folder = tmp_path_factory.mktemp("pair")
    primary = start_server(folder / "primary", installation)
    copied = folder / "standby"
    owner = primary.data_dir.stat()
    if os.geteuid() == 0:  # the server runs as another user then, who is to read every file
        for path in primary.data_dir.iterdir():
            os.chown(path, owner.st_uid, owner.st_gid)
    subprocess.run(
        [installation.bin / "pg_basebackup", "-d", primary.dsn(), "-D", copied, "-R", "-X", "stream", "-c", "fast", "--no-sync"],
        check=True,
        capture_output=True,
    )
    for path in (copied, *copied.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid)
    (copied / "postmaster.pid").unlink(missing_ok=True)
    standby = Postgres(
        copied, installation, {"fsync": "off", "max_connections": "100", "max_wal_senders": "50", "max_prepared_transactions": "10"}
    )
    standby.start()
    yield Source(primary, "postgres", primary.dsn()), Source(standby, "postgres", standby.dsn())
    standby.destroy()
    primary.destroy()
    shutil.rmtree(folder, ignore_errors=True)


def _follows(primary: Source, standby: Source) -> None:
    lsn = primary.value("select pg_current_wal_insert_lsn()::text")
    primary.sql("select pg_logical_emit_message(true, 'pgwal', '')")  # so that it is flushed
    wait_for(lambda: standby.value("select pg_last_wal_replay_lsn() >= %s::pg_lsn", lsn), what="the standby to follow")


def test_snapshot_of_a_standby_lists_what_runs(pair: tuple[Source, Source]) -> None:
    """Postgres's own answer on a standby has no list: an open transaction would pass for one that is seen."""
    primary, standby = pair
    primary.sql("create table t (id int)")
    old, xid = begun(primary, "insert into t values (1)")
    primary.sql("insert into t values (2)")
    _follows(primary, standby)
    assert standby.value("select split_part(pg_current_snapshot()::text, ':', 3)") == ""
    with dsn.connect(standby.dsn) as conn:
        xmin, xmax, running = begin_snapshot(conn).split(":")
        assert running == str(xid)
        assert int(xmin) <= xid < int(xmax)
        assert conn.execute("select id from public.t").fetchall() == [(2,)]
    old.rollback()
    _follows(primary, standby)
    with dsn.connect(standby.dsn) as conn:
        assert begin_snapshot(conn).endswith(":")
    wait_for_transactions(standby.connect(), xid + 1, 5, never)


def test_snapshots_of_a_standby_are_exact_under_load(pair: tuple[Source, Source]) -> None:
    """Every row is seen if and only if the snapshot says that its transaction is."""
    primary, standby = pair
    primary.sql("create table busy (xid int8)")
    _follows(primary, standby)
    stop = threading.Event()

    def write(seconds: float) -> None:
        with plain_session(primary.dsn, autocommit=False) as conn:
            while not stop.is_set():
                conn.execute("insert into busy values (txid_current())")
                time.sleep(seconds)
                conn.commit()

    writers = [threading.Thread(target=write, args=[seconds]) for seconds in (0.001, 0.005, 0.01, 0.05, 0.1)]
    for writer in writers:
        writer.start()
    try:
        checked = 0
        for _ in range(20):
            with dsn.connect(standby.dsn) as conn:
                xmin, xmax, running = begin_snapshot(conn).split(":")
                seen = {row[0] for row in conn.execute("select xid from public.busy")}
                conn.execute("ROLLBACK")
            listed = {int(xid) for xid in running.split(",") if xid}
            assert not seen & listed
            assert all(xid < int(xmax) for xid in seen)
            _follows(primary, standby)
            every = {row[0] for row in standby.sql("select xid from busy")}
            assert {xid for xid in every if xid < int(xmax) and xid not in listed} == seen
            assert int(xmin) <= min(listed, default=int(xmax))
            checked += len(listed)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert checked > 0  # some were running


def test_a_standby_too_busy_to_tell(pair: tuple[Source, Source], monkeypatch: pytest.MonkeyPatch) -> None:
    _, standby = pair
    monkeypatch.setattr(transactions, "_SETTLE_TIMEOUT", -1.0)
    with dsn.connect(standby.dsn) as conn:
        monkeypatch.setattr(transactions, "_one", lambda *_: (5, 9, [5, 6], [5]) if len(_) > 2 else (True,))
        with pytest.raises(SourceUnavailable, match="set PGWAL_SOURCE_DSN to the primary"):
            begin_snapshot(conn)


def test_a_standby_is_not_altered(pair: tuple[Source, Source]) -> None:
    primary, standby = pair
    primary.sql("create table keyed (id int primary key)")
    _follows(primary, standby)
    with dsn.connect(standby.dsn) as conn, dsn.connect(primary.dsn) as at_primary:
        with pytest.raises(SourceRefused, match=r"is a standby, where none can be made; on its primary run CREATE PUBLICATION pgwal"):
            publication.ensure(conn, "pgwal", "public.keyed")
        made = publication.ensure(at_primary, "pgwal", "public.keyed")
        _follows(primary, standby)
        there = publication.ensure(conn, "pgwal", "public.keyed")
        assert (there.tables, there.added) == (made.tables, ())
        primary.sql("create table more (id int primary key)")
        _follows(primary, standby)
        with pytest.raises(SourceRefused, match=r"on its primary run ALTER PUBLICATION pgwal ADD TABLE ONLY public\.more"):
            publication.ensure(conn, "pgwal", "public.keyed,public.more")
        one, other = catalog.source_identity(conn), catalog.source_identity(at_primary)
        assert (one.system_identifier, one.timeline, one.database_oid) == (other.system_identifier, other.timeline, other.database_oid)
        assert catalog.flush_lsn(conn) <= catalog.insert_lsn(at_primary)
        assert catalog.insert_lsn(conn) == catalog.flush_lsn(conn)


def test_promotion_is_another_timeline(pair: tuple[Source, Source]) -> None:
    """Last: it ends the pair. The control file tells of the new timeline only after the next checkpoint."""
    _, standby = pair
    standby.sql("select pg_promote()")
    with dsn.connect(standby.dsn) as conn:
        assert catalog.source_identity(conn).timeline == 2

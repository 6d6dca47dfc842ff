"""Copies of the slot against real servers: they give what the slot gives from a position on, and go with their session."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import BlockedByTransaction, SlotBusy, SlotLost, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres import catalog, command, copies, slot, standbys, waiting
from pgwal_pipeline.postgres.copies import Room, SlotCopy
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.postgres.standby import standby_of
from pgwal_pipeline_tests.proxy import Proxy, proxied, tcp
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for


def make(source: Source) -> str:
    """A table, a publication and a slot of the test's own; the slot's name."""
    name = f"s_{source.database}"
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql("CREATE PUBLICATION p FOR TABLE t")
    slot.create(source.dsn, name, blocked_timeout=20, warn=lambda _: None)
    return name


def flushed(source: Source) -> int:
    return parse_lsn(source.value("SELECT pg_current_wal_flush_lsn()::text"))


def standing(source: Source, name: str) -> tuple[int, int]:
    """The restart and the confirmed position."""
    return source.sql("SELECT restart_lsn - '0/0', confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s", name)[0]


def inserts(stream: ReplicationStream, end_lsn: int) -> int:
    count = 0
    while stream.server_position < end_lsn:
        messages = stream.read(1 << 20, 0.2)
        count += sum(payload[0] == ord("I") for payload in messages.payloads)
        if not messages:
            stream.request_reply()
    return count


def test_a_copy_is_read_from_a_position_on_and_goes_with_its_session(source_matrix: Source) -> None:
    source = source_matrix
    name = make(source)
    before = standing(source, name)
    positions = []
    for number in range(6):
        source.sql(f"INSERT INTO t SELECT generate_series({number * 100}, {number * 100 + 99})")
        source.sql("CHECKPOINT")
        positions.append(flushed(source))
    middle = positions[3]
    version = source.connect().info.server_version
    with ReplicationStream.open(source.dsn, name, "p", 0, server_version=version) as whole:
        copy = SlotCopy.make(source.dsn, name)
        assert copy.name.startswith(f"{name}_w_")
        assert source.value("SELECT temporary FROM pg_replication_slots WHERE slot_name = %s", copy.name)
        with copy.stream("p", middle, server_version=version) as rest:
            assert inserts(rest, flushed(source)) == 200
            restart, confirmed = standing(source, copy.name)
            assert confirmed == middle
            # Read from a place near the position, not from where the slot itself would begin.
            assert restart > positions[1]
            with connect(source.dsn) as conn:
                assert set(copies.positions(conn, name)) == {middle, before[1]}
        assert inserts(whole, flushed(source)) == 600
    wait_for(lambda: not source.sql("SELECT FROM pg_replication_slots WHERE slot_name = %s", copy.name), what="the copy to be gone")
    assert standing(source, name) == before


def test_settling_confirms_the_slot_and_lets_go_of_the_wal(source_matrix: Source) -> None:
    source = source_matrix
    name = make(source)
    for number in range(5):
        source.sql(f"INSERT INTO t SELECT generate_series({number * 100}, {number * 100 + 99})")
        source.sql("CHECKPOINT")
    end = flushed(source)
    source.sql("INSERT INTO t VALUES (1000)")
    before = standing(source, name)
    with connect(source.dsn) as conn:
        copies.confirm_unread(conn, source.dsn, name, end, warn=print)
        restart, confirmed = standing(source, name)
        assert confirmed == end
        assert end - restart < (end - before[0]) // 2
        copies.confirm_unread(conn, source.dsn, name, end, warn=print)
        version = conn.info.server_version
        with ReplicationStream.open(source.dsn, name, "p", end, server_version=version) as stream:
            assert inserts(stream, flushed(source)) == 1
        with pytest.raises(SlotLost):
            copies.confirm_unread(conn, source.dsn, "missing", end, warn=print)


def test_a_slot_that_is_read_cannot_be_settled(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    name = make(source)
    monkeypatch.setattr(copies, "_LET_GO", 0.2)
    with connect(source.dsn) as conn, ReplicationStream.open(source.dsn, name, "p", 0, server_version=conn.info.server_version):
        end = flushed(source)
        with pytest.raises(SlotBusy, match=name):
            copies.confirm_unread(conn, source.dsn, name, end, warn=print)


_SETTLE = """
import sys
from pgwal_pipeline.postgres import copies
from pgwal_pipeline.postgres.dsn import connect
with connect(sys.argv[1]) as conn:
    copies.confirm_unread(conn, sys.argv[1], sys.argv[2], int(sys.argv[3]), warn=print)
"""


def test_settling_waits_for_a_standby_that_is_away_no_longer_than_it_should(
    make_server: Callable[..., Postgres], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standbys, "_CHECK_EVERY", 0.3)
    monkeypatch.setattr(standbys, "_HELD", 1.0)
    with fresh_source(make_server(synchronized_standby_slots="standby_1, standby_2")) as source:
        name = make(source)
        source.sql("SELECT pg_create_physical_replication_slot('standby_2', true)")
        source.sql("INSERT INTO t VALUES (1)")
        end, before, warnings = flushed(source), standing(source, name), []
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'WaitForStandbyConfirmation'"
        with connect(source.dsn) as conn:
            with pytest.raises(SourceUnavailable, match=r"\(standby_1, standby_2\) have .*: bring them back, or take them out of"):
                copies.confirm_unread(conn, source.dsn, name, end, warn=warnings.append)
            assert len(warnings) == 1
            assert f"Slot {name}" in warnings[0]
            # The server waits no longer either, and the connection is good for more.
            assert conn.execute(waiting).fetchone() == (0,)
            assert standing(source, name) == before
        with subprocess.Popen([sys.executable, "-c", _SETTLE, source.dsn, name, str(end)]) as killed:
            wait_for(lambda: source.value(waiting), what="the child to wait")
            killed.kill()
        wait_for(lambda: not source.value("SELECT active FROM pg_replication_slots WHERE slot_name = %s", name), what="the slot to be free")
        source.sql("SELECT pg_create_physical_replication_slot('standby_1', true)")
        source.sql(
            "SELECT pg_replication_slot_advance(name, pg_current_wal_flush_lsn()) FROM unnest('{standby_1, standby_2}'::text[]) name"
        )
        with connect(source.dsn) as conn:
            copies.confirm_unread(conn, source.dsn, name, end, warn=warnings.append)
        assert standing(source, name)[1] == end
        assert len(warnings) == 1


def test_room_and_its_end(make_server: Callable[..., Postgres]) -> None:
    server = make_server(max_replication_slots=2, max_wal_senders=3)
    with fresh_source(server) as source, connect(source.dsn) as conn:
        assert copies.room(conn) == Room(2, 3)
        name = make(source)
        copy = SlotCopy.make(source.dsn, name)
        assert copies.room(conn) == Room(0, 2)
        with pytest.raises(SourceRefused, match="max_replication_slots"):
            SlotCopy.make(source.dsn, name)
        copy.close()
        wait_for(lambda: copies.room(conn) == Room(1, 3), what="room again")


def test_on_a_standby(make_server: Callable[..., Postgres], tmp_path: Path) -> None:
    with fresh_source(make_server()) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY)")
        source.sql("CREATE PUBLICATION p FOR TABLE t")
        with standby_of(source, tmp_path / "standby") as standby, connect(standby.dsn) as conn:

            def hasten(_: str) -> None:
                source.sql("SELECT pg_log_standby_snapshot()")

            slot.create(standby.dsn, "followed", blocked_timeout=30, warn=hasten)
            ends = []
            for number in range(4):
                source.sql(f"INSERT INTO t SELECT generate_series({number * 100}, {number * 100 + 99})")
                source.sql("CHECKPOINT")
                ends.append(flushed(source))
            wait_for(lambda: catalog.flush_lsn(conn) >= ends[-1], what="the standby to replay")
            copy = SlotCopy.make(standby.dsn, "followed")
            with copy.stream("p", ends[1], server_version=conn.info.server_version) as stream:
                assert inserts(stream, ends[-1]) == 200
            copies.confirm_unread(conn, standby.dsn, "followed", ends[-1], warn=print)
            assert standing(standby, "followed")[1] == ends[-1]
            slot.drop(conn, "followed")


def test_a_slot_that_is_not_there(source: Source) -> None:
    with pytest.raises((SlotLost, SourceRefused)):
        SlotCopy.make(source.dsn, "missing")


_FILES = 50_000  # whose removal takes long enough to be caught in the middle


@contextmanager
def a_stopped_drop(server: Postgres, source: Source) -> Iterator[int]:
    """While it lasts, a session that drops a slot stands still in the middle of that, as on a disk that hangs; its pid.

    It holds the server's lock under which slots are made, and which no cancelling frees.
    """
    source.sql("SELECT pg_create_physical_replication_slot('stopped', true)")
    folder = server.data_dir / "pg_replslot"
    for number in range(_FILES):
        os.mknod(folder / "stopped" / f"file_{number}", 0o600)
    session = source.connect(application_name="the dropper")
    pid, going = session.info.backend_pid, folder / "stopped.tmp"
    dropping = threading.Thread(target=lambda: session.execute("SELECT pg_drop_replication_slot('stopped')"))
    dropping.start()
    while not going.exists():
        assert dropping.is_alive()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert any(going.iterdir()), "it was caught too late"
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)
        dropping.join()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_WARN_AFTER", 0.2)
    monkeypatch.setattr(waiting, "_CHECK_EVERY", 0.2)
    monkeypatch.setattr(command, "CANCEL_TIMEOUT", 0.5)


COPIES = "SELECT slot_name FROM pg_replication_slots WHERE starts_with(slot_name::text, %s || '_w_')"
WALSENDERS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'walsender'"


@pytest.mark.usefixtures("soon")
def test_copying_waits_for_whoever_holds_the_servers_lock_on_slots_and_no_longer_than_it_may(source: Source) -> None:
    name, warnings = make(source), []
    assert isinstance(source.server, Postgres)
    with a_stopped_drop(source.server, source) as pid:
        started = time.monotonic()
        with pytest.raises(BlockedByTransaction) as caught:
            SlotCopy.make(source.dsn, name, blocked_timeout=2, warn=warnings.append)
        assert 1.9 < time.monotonic() - started < 8
        named = rf"LWLock ReplicationSlotAllocation, which one of these has: pid {pid}, the dropper, "
        assert caught.match(rf"Slot {name}_w_\w+ could not be copied within 2 s \(PGWAL_BLOCKED_TIMEOUT\), as the source waits for {named}")
        assert "SELECT pg_drop_replication_slot('stopped')" in str(caught.value)
        (warning,) = warnings
        assert f"waits for LWLock ReplicationSlotAllocation, which one of these has: pid {pid}, the dropper" in warning
        # Neither is a slot that is made: it cannot be cancelled there, and is not waited for without end either.
        started = time.monotonic()
        with pytest.raises(BlockedByTransaction, match=f"could not be made within 1 s.*pid {pid}, the dropper"):
            slot.create(source.dsn, f"{name}_2", blocked_timeout=1, warn=warnings.append)
        assert time.monotonic() - started < 8
    wait_for(lambda: not source.sql(WALSENDERS), what="the session of the copy to end")
    assert source.sql(COPIES, name) == []
    assert source.sql("SELECT FROM pg_replication_slots WHERE slot_name = %s", f"{name}_2") == []
    SlotCopy.make(source.dsn, name).close()


@pytest.mark.usefixtures("soon")
def test_copying_goes_on_when_the_one_who_was_named_has_gone(source: Source) -> None:
    name, warnings = make(source), []
    blocker = source.connect(autocommit=False, application_name="vacuum full")

    def warn(text: str) -> None:
        warnings.append(text)
        blocker.rollback()

    blocker.execute("LOCK TABLE pg_catalog.pg_proc IN ACCESS EXCLUSIVE MODE")
    with closing(SlotCopy.make(source.dsn, name, blocked_timeout=30, warn=warn)) as copy:
        assert source.sql(COPIES, name) == [(copy.name,)]
    (warning,) = warnings
    assert f"Copying slot {copy.name} waits for " in warning
    # A lock on the catalog may keep a look from naming its holder; then it says that much.
    assert f"pid {blocker.info.backend_pid}, vacuum full" in warning or "a session that has locked a table of the catalog" in warning


@pytest.mark.usefixtures("soon")
def test_a_copy_whose_answer_never_comes_is_given_up(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    name, warnings = make(source), []
    with Proxy(*tcp(source)) as proxy:
        real = copies.replication_connection

        def walsender(dsn: str) -> object:
            made = real(proxied(source, proxy))
            proxy.frozen.set()
            return made

        monkeypatch.setattr(copies, "replication_connection", walsender)
        started = time.monotonic()
        with pytest.raises(BlockedByTransaction, match="could not be copied within 1 s"):
            SlotCopy.make(source.dsn, name, blocked_timeout=1, warn=warnings.append)
        assert time.monotonic() - started < 8
    assert "something that it does not show" in warnings[0]
    wait_for(lambda: not source.sql(WALSENDERS), what="the session of the copy to end")
    assert source.sql(COPIES, name) == []


def test_open_transactions_do_not_hold_a_copy_up(source_matrix: Source) -> None:
    """They hold up a slot that is made: the copy begins where the slot does."""
    source = source_matrix
    name = make(source)
    writer = source.connect(autocommit=False)
    writer.execute("INSERT INTO t VALUES (1)")

    def silent(text: str) -> None:
        raise AssertionError(text)

    SlotCopy.make(source.dsn, name, blocked_timeout=20, warn=silent).close()
    writer.rollback()

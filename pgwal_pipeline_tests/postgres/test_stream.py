"""The stream against real servers: what is read, what is reported, and how it ends."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from psycopg2.extensions import make_dsn

from pgwal_pipeline.embedded.postgres import Postgres, servers
from pgwal_pipeline.messages.errors import PgwalError, SlotBusy, SlotLost, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres import slot
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream, start_command
from pgwal_pipeline_tests.proxy import Proxy, proxied, tcp
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for

SLOT = "stream_test"
PUBLICATION = "stream_test"
_STATUS_UPDATE = 39  # bytes of it on the wire


def silent(text: str) -> None:
    raise AssertionError(f"nothing should wait: {text}")


def prepare(source: Source, publication: str = PUBLICATION, name: str = SLOT) -> str:
    """A table, its publication and a slot; the slot's name, made unlike those of other tests, for slots are the cluster's."""
    name = f"{name}_{source.database}"[-50:]
    source.sql("create table item (id int primary key, note text)")
    quoted = publication.replace('"', '""')
    source.sql(f'create publication "{quoted}" for table item')
    slot.create(source.dsn, name, blocked_timeout=20, warn=silent)
    return name


def open_stream(source: Source, name: str, publication: str = PUBLICATION, start: int = 0, dsn: str | None = None) -> ReplicationStream:
    version = source.connect().info.server_version
    return ReplicationStream.open(dsn or source.dsn, name, publication, start, server_version=version)


def flushed(source: Source) -> int:
    return int(source.value("select pg_current_wal_flush_lsn() - '0/0'"))


def confirmed(source: Source, name: str) -> int:
    state = slot.inspect(source.connect(), name)
    assert state is not None
    return state.confirmed_flush_lsn


def read_until(stream: ReplicationStream, lsn: int, seconds: float = 20.0) -> list[bytes]:
    """Everything up to the server's saying that it has read past `lsn`."""
    deadline = time.monotonic() + seconds
    messages: list[bytes] = []
    while stream.server_position < lsn:
        assert time.monotonic() < deadline, "the server never got there"
        messages += stream.read(1 << 20, 0.1).payloads
        stream.request_reply()
    return messages


def kinds(payloads: Sequence[bytes]) -> str:
    return "".join(chr(payload[0]) for payload in payloads)


def test_reads_what_was_written_and_moves_the_slot_by_confirm_alone(source_matrix: Source) -> None:
    source = source_matrix
    name = prepare(source)
    before = confirmed(source, name)
    source.sql("insert into item select n, repeat('x', n) from generate_series(1, 2000) n")
    source.sql("update item set note = 'y' where id = 7")
    end = flushed(source)
    with open_stream(source, name) as stream:
        messages = read_until(stream, end)
        assert kinds(messages).replace("R", "") == "B" + "I" * 2000 + "CB" + "UC"
        for _ in range(5):
            stream.request_reply()
            stream.read(1 << 20, 0.05)
        assert confirmed(source, name) == before
        stream.confirm(end)
        wait_for(lambda: confirmed(source, name) >= end, what="the confirmation")
        assert confirmed(source, name) == end
    with open_stream(source, name) as stream:
        source.sql("delete from item where id = 1")
        assert kinds(read_until(stream, flushed(source))).replace("R", "") == "BDC"


def test_a_stream_that_ends_without_a_confirm_gives_the_same_again(source: Source) -> None:
    name = prepare(source)
    source.sql("insert into item values (1, 'a'), (2, 'b')")
    end = flushed(source)
    with open_stream(source, name) as stream:
        first = read_until(stream, end)
    with open_stream(source, name) as stream:
        assert read_until(stream, end) == first


@pytest.mark.parametrize("publication", ['we"ird, "pub', "it's", "Ünï cødé", "a,b"])
def test_a_publication_may_have_any_name(source: Source, publication: str) -> None:
    name = prepare(source, publication)
    source.sql("insert into item values (1, 'a')")
    with open_stream(source, name, publication) as stream:
        assert "I" in kinds(read_until(stream, flushed(source)))


def test_the_newest_protocol_that_a_server_speaks_is_asked_for() -> None:
    assert [start_command("s", "p", 0, version).count(f"proto_version '{protocol}'") for version, protocol in
            ((130009, 1), (140001, 2), (150018, 3), (160014, 4), (180006, 4))] == [1] * 5  # fmt: skip
    assert start_command("s", "a\"b'c", 0x16_0000_00FF, 180000) == (
        "START_REPLICATION SLOT \"s\" LOGICAL 16/FF (proto_version '4', publication_names '\"a\"\"b''c\"')"
    )


def test_a_read_ends_at_its_bounds(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgwal_pipeline.postgres.stream._LINGER", 60.0)  # a busy server's pauses are no bound here
    name = prepare(source)
    source.sql("insert into item select n, repeat('x', 1000) from generate_series(1, 30000) n")
    end = flushed(source)
    with open_stream(source, name) as stream:
        small = wait_for(lambda: stream.read(10_000, 1), what="the first messages")
        assert 10_000 <= small.size < 12_000
        large = stream.read(1 << 30, 120)
        assert len(large) == 20_000
        monkeypatch.undo()
        rest = read_until(stream, end)
        assert kinds([*small.payloads, *large.payloads, *rest]).count("I") == 30_000
        started = time.monotonic()
        assert not stream.read(1 << 20, 0.3)
        assert 0.2 < time.monotonic() - started < 10
    source.sql("insert into item values (0, repeat('x', 3000000))")
    with open_stream(source, name) as stream:
        stream.confirm(end)
        assert max(map(len, read_until(stream, flushed(source)))) > 3_000_000


def test_an_idle_stream_does_not_move_the_slot(make_server: Callable[..., Postgres]) -> None:
    with fresh_source(make_server(wal_sender_timeout="600ms")) as source:
        name = prepare(source)
        source.sql("insert into item values (1, 'a')")
        with open_stream(source, name) as stream:
            read_until(stream, flushed(source))
            stream.confirm(middle := confirmed(source, name))
            source.sql("create table unseen (n int)")
            source.sql("insert into unseen select generate_series(1, 1000)")
            source.sql("insert into item values (2, 'b')")
            ended = time.monotonic() + 2
            while time.monotonic() < ended:
                stream.read(1 << 20, 0.5)
            assert stream.server_position >= flushed(source)
            assert confirmed(source, name) == middle
        assert confirmed(source, name) == middle


def test_a_sleeping_consumer_keeps_the_stream_alive(make_server: Callable[..., Postgres]) -> None:
    with fresh_source(make_server(wal_sender_timeout="2s")) as source:
        name = prepare(source)
        source.sql("insert into item select n, repeat('x', 500) from generate_series(1, 100000) n")
        end = flushed(source)
        with open_stream(source, name) as stream:
            seen = len(stream.read(10_000, 10))
            ended = time.monotonic() + 5
            while time.monotonic() < ended:
                stream.keep_alive()
                time.sleep(0.1)
            assert seen + len(read_until(stream, end)) >= 100_002
        name_2 = prepare_second_slot(source)
        with open_stream(source, name_2) as stream:
            time.sleep(3)
            with pytest.raises(SourceUnavailable):
                # The same without a sign of life: the server has hung up.
                read_until(stream, flushed(source) + (1 << 40), seconds=15)


def prepare_second_slot(source: Source) -> str:
    name = f"second_{source.database}"
    slot.create(source.dsn, name, blocked_timeout=20, warn=silent)
    return name


def test_a_terminated_walsender_is_an_error_that_stays(source_matrix: Source) -> None:
    source = source_matrix
    name = prepare(source)
    with open_stream(source, name) as stream:
        source.sql("select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", name)
        with pytest.raises(SourceUnavailable, match=f"slot {name}.*terminating connection") as first:
            read_until(stream, 1 << 60)
        with pytest.raises(SourceUnavailable) as second:
            stream.read(1, 0)
        with pytest.raises(SourceUnavailable):
            stream.confirm(1)
        assert second.value is first.value
    wait_for(lambda: not inspect(source, name).active, what="the slot to be free")
    with open_stream(source, name) as stream:
        read_until(stream, flushed(source))


def test_words_that_came_before_the_end_are_heard(source: Source) -> None:
    """Data, the server's FATAL and the end of the connection arrive together."""
    name = prepare(source)
    source.sql("insert into item values (1, 'a')")
    with open_stream(source, name) as stream:
        time.sleep(0.3)
        source.sql("select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", name)
        time.sleep(0.3)
        with pytest.raises(SourceUnavailable, match="terminating connection"):
            read_until(stream, 1 << 60)


def test_a_server_that_is_killed(make_server: Callable[..., Postgres]) -> None:
    server = make_server()
    with fresh_source(server) as source:
        name = prepare(source)
        with open_stream(source, name) as stream:
            read_until(stream, flushed(source))
            source.close()
            server.kill()
            with pytest.raises(SourceUnavailable, match=f"slot {name}"):
                read_until(stream, 1 << 60)
            with pytest.raises(SourceUnavailable):
                ReplicationStream.open(source.dsn, name, PUBLICATION, 0, server_version=180000)


def test_a_server_that_shuts_down_waits_for_the_confirmation_without_being_pestered(make_server: Callable[..., Postgres]) -> None:
    server = make_server()
    with fresh_source(server) as source:
        name = prepare(source)
        source.sql("insert into item values (1, 'a')")
        with Proxy(*tcp(source)) as proxy, open_stream(source, name, dsn=proxied(source, proxy)) as stream:
            read_until(stream, flushed(source))
            source.close()
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            before = proxy.sent
            ended = time.monotonic() + 2
            while time.monotonic() < ended:
                stream.read(1 << 20, 0.2)
            told = (proxy.sent - before) / _STATUS_UPDATE
            assert stopping.is_alive()
            assert 2 <= told <= 25
            # The server ends the stream, or the connection under it if the end does not come through in time.
            with pytest.raises(SourceUnavailable, match=r"shuts down|closed the connection"):
                while time.monotonic() < ended + 10:
                    stream.confirm(stream.server_position)
                    stream.read(1 << 20, 0.2)
            stopping.join(10)
            assert not stopping.is_alive()


def inspect(source: Source, name: str) -> slot.SlotState:
    state = slot.inspect(source.connect(), name)
    assert state is not None
    return state


def test_a_slot_that_is_read_already_is_busy(source_matrix: Source) -> None:
    source = source_matrix
    name = prepare(source)
    with open_stream(source, name) as stream:
        pid = inspect(source, name).active_pid
        with pytest.raises(SlotBusy, match=f"{name}.*pid {pid}, pgwal"):
            open_stream(source, name)
        read_until(stream, flushed(source))


def test_a_slot_that_is_not_there_or_not_ours(source_matrix: Source) -> None:
    source = source_matrix
    with pytest.raises(SlotLost, match=r"missing_slot.*resnapshot --all"):
        open_stream(source, "missing_slot")
    other = f"other_{source.database}"
    source.sql("select pg_create_physical_replication_slot(%s)", f"{other}_p")
    with pytest.raises(SourceRefused, match="physical"):
        open_stream(source, f"{other}_p")
    source.sql("select pg_drop_replication_slot(%s)", f"{other}_p")
    name = prepare(source)
    with fresh_source(source.server) as elsewhere:
        elsewhere.sql("create publication stream_test")
        with pytest.raises(SourceRefused, match=f"belongs to database {source.database}"):
            open_stream(elsewhere, name)


def test_a_publication_that_was_missing_at_a_point_of_the_wal_is_a_gap(source_matrix: Source) -> None:
    source = source_matrix
    name = prepare(source)
    source.sql(f"drop publication {PUBLICATION}")
    source.sql("insert into item values (1, 'a')")
    source.sql(f"create publication {PUBLICATION} for table item")
    source.sql("insert into item values (2, 'b')")
    with open_stream(source, name) as stream, pytest.raises(SlotLost, match=f"Publication {PUBLICATION} is missing"):
        read_until(stream, flushed(source))


@pytest.mark.parametrize("meanwhile", ["nothing", "keep_alive", "request_reply"])
@pytest.mark.parametrize("reset", [False, True])
def test_what_came_before_the_connection_broke_is_read_first(source: Source, *, reset: bool, meanwhile: str) -> None:
    name = prepare(source)
    source.sql("insert into item select n, repeat('x', 100) from generate_series(1, 1000) n")
    cut = 24_000  # bytes: fits into any socket
    with Proxy(*tcp(source)) as proxy:
        proxy.reset, proxy.cut_after = reset, cut
        with open_stream(source, name, dsn=proxied(source, proxy)) as stream:
            wait_for(lambda: proxy.cuts == 1, what="the connection to end")
            if meanwhile != "nothing":
                stream._due = 0.0
                for _ in range(3):
                    getattr(stream, meanwhile)()
                    time.sleep(0.05)
            came = 0
            with pytest.raises(SourceUnavailable):
                while True:
                    messages = stream.read(5_000, 0.1)
                    assert set(kinds(messages.payloads)) <= set("RBI")
                    came += messages.size
            # Each message has five bytes of its own before it, and the session's beginning counts as well.
            assert came > cut * 0.9 - 6000
            with pytest.raises(SourceUnavailable):
                stream.confirm(1)


def test_a_connection_that_died_without_a_word(source: Source) -> None:
    name = prepare(source)
    with Proxy(*tcp(source)) as proxy, open_stream(source, name, dsn=proxied(source, proxy)) as stream:
        source.sql("insert into item values (1, 'a')")
        read_until(stream, flushed(source))
        stream.silence_limit = 1.0
        # Another connection gets through: it is this one that is dead.
        stream.dsn = source.dsn
        proxy.frozen.set()
        started = time.monotonic()
        with pytest.raises(SourceUnavailable, match="connection is dead"):
            read_until(stream, 1 << 60)
        assert time.monotonic() - started < 10


def test_a_server_at_work_may_be_silent(source: Source) -> None:
    """A large transaction that is not published: nothing is sent while it is decoded, and that is no failure."""
    name = prepare(source)
    source.sql("create table unseen as select n, repeat('x', 200) note from generate_series(1, 300000) n")
    source.sql("insert into item values (1, 'a')")
    end = flushed(source)
    with open_stream(source, name) as stream:
        stream.silence_limit = 0.05
        looks = 0
        look = stream._mind_silence

        def counted() -> None:
            nonlocal looks
            looks += 1
            look()

        stream._mind_silence = counted
        messages: list[bytes] = []
        deadline = time.monotonic() + 60
        while not messages and time.monotonic() < deadline:
            messages += stream.read(1 << 20, 0.02).payloads
        assert "I" in kinds(messages + read_until(stream, end))
        assert looks > 3


def test_a_lost_slot_cannot_be_read(make_server: Callable[..., Postgres]) -> None:
    with fresh_source(make_server(max_slot_wal_keep_size="1MB", max_wal_size="32MB", min_wal_size="32MB")) as source:
        name = prepare(source)
        for _ in range(20):
            source.sql("insert into item select n, repeat('x', 1000) from generate_series(1, 10000) n")
            source.sql("truncate item")
            source.sql("select pg_switch_wal()")
            source.sql("checkpoint")
            if inspect(source, name).lost:
                break
        assert inspect(source, name).invalidation_reason == "wal_removed"
        with pytest.raises(SlotLost, match=f"Slot {name} is lost: the WAL it needs was removed.*max_slot_wal_keep_size"):
            open_stream(source, name)


def test_encrypted(make_server: Callable[..., Postgres]) -> None:
    """Libpq takes one record at a time then, and a record is one message: many come in one read all the same."""
    programs = [(found, found.bin / "pg_config") for found in servers()]
    able = [found for found, config in programs if config.exists() and b"openssl" in subprocess.check_output([config, "--configure"])]
    if not able or shutil.which("openssl") is None:
        pytest.skip("no server with TLS at hand")
    server = make_server(able[0])
    certificate, key = server.data_dir / "server.crt", server.data_dir / "server.key"
    options = ["-x509", "-days", "2", "-nodes", "-subj", "/CN=test"]
    subprocess.run(["openssl", "req", "-new", *options, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    owner = server.data_dir.stat()
    for path in (certificate, key):
        path.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid)
    server.settings["ssl"] = "on"
    server.restart()
    with fresh_source(server) as source:
        name = prepare(source)
        source.sql("insert into item select n, repeat('x', 100) from generate_series(1, 30000) n")
        with open_stream(source, name, dsn=make_dsn(source.dsn, sslmode="require")) as stream:
            assert stream._conn.info.ssl_in_use
            most, count = 0, 0
            end = flushed(source)
            while stream.server_position < end:
                count += kinds((messages := stream.read(1 << 20, 0.1)).payloads).count("I")
                most = max(most, len(messages))
            assert count == 30_000
            assert most > 1000
            for size in (9_000, 17_000, 40_000, 3_000_000):  # TLS records have 16 kB at most
                source.sql("insert into item values (%s, repeat('x', %s))", -size, size)
                end, started = flushed(source), time.monotonic()
                assert max(map(len, read_until(stream, end))) > size
                assert time.monotonic() - started < 5
                with connect(make_dsn(source.dsn, sslmode="require")) as conn:
                    assert conn.info.ssl_in_use
                    assert conn.execute("select repeat('y', %s) from generate_series(1, 3)", [size]).fetchall() == [("y" * size,)] * 3


def test_an_error_ends_the_connection(source: Source) -> None:
    with closing(source.connect()) as watching:
        mine = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        with pytest.raises(SlotLost):
            open_stream(source, "missing_slot")
        wait_for(lambda: count(watching, mine) <= 1, what="the walsender to go")


def count(conn: Any, query: str) -> int:
    return int(conn.execute(query).fetchone()[0])


def test_the_password_is_in_no_message(source: Source) -> None:
    source.sql("create role reader login replication password 'hunter2'")
    try:
        with pytest.raises(PgwalError) as caught:
            open_stream(source, "missing_slot", dsn=source.dsn_of("reader", "hunter2"))
        assert "hunter2" not in str(caught.value)
    finally:
        source.sql("drop role reader")


@pytest.mark.parametrize(
    ("notice", "missing"),
    [
        ('WARNING:  skipped loading publication "stream_test"\nDETAIL:  The publication does not exist.\n', True),
        ("WARNUNG:  Laden von Publikation »stream_test« übersprungen\n", True),
        ("ATTENTION :  publication « stream_test » ignorée\n", True),
        ('WARNING:  replication slot "stream_test" specified in parameter "synchronized_standby_slots" does not exist\n', False),
        ("WARNING:  terminating connection because of crash of another server process\n", False),
    ],
)
def test_the_warning_of_a_missing_publication_is_known_in_any_language(source: Source, notice: str, *, missing: bool) -> None:
    name = prepare(source)
    with open_stream(source, name) as stream:
        stream._conn.notices.append(notice)
        if missing:
            with pytest.raises(SlotLost, match="Publication stream_test is missing"):
                stream.read(1 << 20, 0.1)
        else:
            stream.read(1 << 20, 0.1)

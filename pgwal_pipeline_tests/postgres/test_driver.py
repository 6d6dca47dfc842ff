"""What is used of psycopg2 beyond what it documents: this fails when an upgrade takes it away."""

import time
from collections.abc import Callable

import pytest
from psycopg2.extras import ReplicationCursor

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.postgres import slot
from pgwal_pipeline.postgres.connection import ReplicationConnection, wait
from pgwal_pipeline.postgres.driver import reading_cursor
from pgwal_pipeline.postgres.dsn import replication_connection
from pgwal_pipeline.postgres.stream import start_command
from pgwal_pipeline_tests.support import Source, fresh_source

Made = Callable[[ReplicationConnection], ReplicationCursor]


def confirmed(source: Source, name: str) -> int:
    return int(source.value("select confirmed_flush_lsn - '0/0' from pg_replication_slots where slot_name = %s", name))


def flushed(source: Source) -> int:
    return int(source.value("select pg_current_wal_flush_lsn() - '0/0'"))


@pytest.mark.parametrize("published", [False, True])
def test_what_reads_a_stream_confirms_nothing(make_server: Callable[..., Postgres], *, published: bool) -> None:
    """The server asks for answers, and gets them, or it would end the stream."""
    with fresh_source(make_server(wal_sender_timeout="1s")) as source:
        before, after, messages = _read_for_a_while(source, reading_cursor, published)
        assert messages == (4 if published else 0)  # begin, relation, insert, commit
        assert after == before


def test_a_cursor_as_it_comes_confirms_what_it_only_received(make_server: Callable[..., Postgres]) -> None:
    """Should this fail, psycopg2 has mended it, and a cursor as it comes will do."""
    with fresh_source(make_server(wal_sender_timeout="1s")) as source:
        before, after, _ = _read_for_a_while(source, lambda conn: conn.cursor(), published=False)
        assert after > before


def _read_for_a_while(source: Source, make: Made, published: bool) -> tuple[int, int, int]:
    """Where the slot stood before, where it stands after a reading by a cursor that confirms nothing, and how many messages came."""
    source.sql("create table item (id int primary key)")
    source.sql("create publication p for table item")
    slot.create(source.dsn, "s", blocked_timeout=20, warn=lambda _: None)
    before = confirmed(source, "s")
    conn = replication_connection(source.dsn)
    cursor = make(conn)
    cursor.start_replication_expert(start_command("s", "p", 0, conn.info.server_version).encode(), decode=False, status_interval=2e9)
    wait(conn)
    source.sql("create table unseen as select generate_series(1, 1000)")
    if published:
        source.sql("insert into item values (1)")
    written = flushed(source)
    messages, ended = 0, time.monotonic() + 3
    while time.monotonic() < ended:
        messages += cursor.read_message() is not None
        time.sleep(0.001)
    assert cursor.wal_end >= written
    conn.close()
    return before, confirmed(source, "s"), messages

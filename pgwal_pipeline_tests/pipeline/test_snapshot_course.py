"""A snapshot on its way: chunks side by side, and the WAL flushed to where the table may be published."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake.snapshots import SnapshotWriter
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import READ, at_the_first
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for

TABLE = TableName("public", "t")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_as_many_chunks_of_a_table_are_read_at_once_as_there_are_workers(
    workers: int, source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server itself says how many COPYs run, while each is held up by a writer that takes no more than its first piece."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, body text)")
    source.sql("INSERT INTO t SELECT i, repeat('x', 1000000) FROM generate_series(1, 160) i; ANALYZE t")
    pipeline = make_pipeline(snapshot_chunk_rows=40, snapshot_workers=workers)
    drains.bootstrap(pipeline.settings, progress=Silent())
    most = 0
    write = SnapshotWriter.write

    def held_up(self: SnapshotWriter, attempt: str, pieces: Iterator[Any]) -> Any:
        nonlocal most
        with plain_session(source.dsn) as conn:

            def copies() -> int:
                running = "SELECT count(*) FROM pg_stat_progress_copy WHERE datname = current_database()"
                return conn.execute(running).fetchall()[0][0]

            first = next(pieces)
            try:
                wait_for(lambda: most >= 2 or copies() >= 2, seconds=20.0 if workers > 1 else 1.0)
            except AssertionError:
                most = max(most, copies())
            else:
                most = max(most, copies(), 2)
        return write(self, attempt, chain([first], pieces))

    monkeypatch.setattr(SnapshotWriter, "write", held_up)
    pipeline.snapshot()
    state = pipeline.ledger.tables()[TABLE]
    assert (state.state, state.generation is not None) == ("ready", True), state.reason
    assert len(pipeline.ledger.chunks(TABLE, state.generation or "")) == 4
    assert most == workers


def test_a_table_read_on_an_idle_server_is_in_the_publish_right_after(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written meanwhile without a flush lies before the LSN that the table waits for, and nobody else would flush it for long."""
    server = make_server(wal_writer_delay="10s", checkpoint_timeout="1h", autovacuum="off")
    with fresh_source(server) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 100)")
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source, pipeline.spark = source, lambda: spark
        drains.bootstrap(pipeline.settings, progress=Silent())
        ends = "SELECT pg_current_wal_insert_lsn() = pg_current_wal_flush_lsn()"
        writer = source.connect(options="-c synchronous_commit=off")

        def write() -> None:
            """Just after the WAL writer has looked for something to flush, which it does again in ten seconds."""
            writer.execute("INSERT INTO t VALUES (0)")
            wait_for(lambda: source.value(ends), what="the WAL writer")
            writer.execute("INSERT INTO t VALUES (-1)")
            assert not source.value(ends)

        at_the_first(monkeypatch, READ, write)
        pipeline.snapshot()
        monkeypatch.undo()
        required = pipeline.ledger.tables()[TABLE].required_lsn
        assert required is not None
        assert source.value("SELECT (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::int8") >= required
        pipeline.drain()
        assert TABLE in pipeline.publish().tables
        pipeline.assert_current("public.t")

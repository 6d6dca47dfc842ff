"""The slot is looked at while tables are read: what fills up is warned of, what is gone ends the read."""

import threading
from collections.abc import Callable

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SlotLost
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import slot_watch
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import WRITTEN, at_each_pass, at_the_first
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source, fresh_source

TABLE = TableName("public", "t")


def test_a_slot_that_fills_up_while_a_table_is_read_is_warned_of(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past half of what the server lets it keep, once a minute, with what to do; not before."""
    monkeypatch.setattr(slot_watch, "_CHECK_EVERY", 0.0)
    with fresh_source(make_server(max_slot_wal_keep_size="64MB", wal_keep_size="0")) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 1000); ANALYZE t")
        pipeline = make_pipeline(source_dsn=source.dsn, snapshot_chunk_rows=100, snapshot_workers=1)
        pipeline.source = source
        drains.bootstrap(pipeline.settings, progress=Silent())
        assert snapshots.snapshot(pipeline.settings, progress=Silent()).warnings == ()
        # Of at most 80 MB: a slot may keep the segment that it is in, too.
        write = "SELECT count(pg_logical_emit_message(false, 'noise', repeat('x', 1048576))) FROM generate_series(1, 48)"
        at_the_first(monkeypatch, WRITTEN, lambda: source.sql(write))
        (warning,) = snapshots.snapshot(pipeline.settings, [TABLE], progress=Silent()).warnings
        assert warning.startswith(f"Slot {pipeline.settings.slot} keeps ")
        assert "% of the WAL that the source allows it, and is lost in " in warning
        assert warning.endswith("at the present rate: drain it (`pgwal drain`), or raise max_slot_wal_keep_size.")


def test_a_slot_that_is_lost_ends_the_read(source: Source, make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 1000); ANALYZE t")
    pipeline = make_pipeline(snapshot_chunk_rows=100, snapshot_workers=1)
    drains.bootstrap(pipeline.settings, progress=Silent())
    monkeypatch.setattr("pgwal_pipeline.pipeline.slot_watch._CHECK_EVERY", 0.0)
    slow = threading.Event()

    def drop(passed: int) -> None:
        if passed == 2:
            source.drop_slot(pipeline.settings.slot)
        slow.wait(0.6 if passed >= 2 else 0)

    at_each_pass(monkeypatch, WRITTEN, drop)
    with pytest.raises(SlotLost, match="was dropped while tables were read"):
        pipeline.snapshot()
    (state,) = pipeline.ledger.tables().values()
    assert state.generation is None

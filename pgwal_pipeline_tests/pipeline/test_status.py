"""What is told of a lake: whether a publish is due, and the windows of a catch-up."""

from pathlib import Path

from pgwal_pipeline.pipeline import status
from pgwal_pipeline.pipeline.status import publish_due
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.pipeline.catching_up import DRAIN, catching_up, fill
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.support import Source, wait_for


def test_nothing_is_due_before_a_table_has_been_read_whole(source: Source, make_pipeline: MakePipeline) -> None:
    """A publish that would bring nothing is not asked for, or it would be at every look."""
    pipeline = make_pipeline()
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline.drain()
    source.sql("INSERT INTO t VALUES (1)")
    pipeline.drain()
    assert not publish_due(pipeline.ledger)
    assert not status.lag(pipeline.settings).drain_due
    source.sql("INSERT INTO t VALUES (2)")
    pipeline.snapshot()
    assert status.lag(pipeline.settings).drain_due
    assert not publish_due(pipeline.ledger)
    pipeline.drain()
    assert not status.lag(pipeline.settings).drain_due
    assert publish_due(pipeline.ledger)


def test_windows_under_way_are_shown(source: Source, make_pipeline: MakePipeline, tmp_path: Path) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline = catching_up(make_pipeline)
    fill(source)
    assert "windows" not in status.status(pipeline.settings)
    at_end = tmp_path / "copied"
    environment = {
        "PGWAL_CATCHUP_THRESHOLD": "512kB",
        "PGWAL_CATCHUP_SLOTS": "1",
        "PGWAL_FAILPOINTS": f"catch_up.after_files=touch:{at_end}",
    }
    with pipeline.started(DRAIN, environment=environment) as drain:
        wait_for(at_end.exists, seconds=60, what="the second window's files")
        wait_for(lambda: status.status(pipeline.settings)["windows"][0]["state"] == "read", seconds=60, what="the first window")
        first, second = status.status(pipeline.settings)["windows"]
        assert second["state"] == "reading"
        assert 0 <= second["done_bytes"] <= parse_lsn(second["end_lsn"]) - parse_lsn(second["start_lsn"])
        assert first["done_bytes"] == parse_lsn(first["end_lsn"]) - parse_lsn(first["start_lsn"])
        at_end.unlink()
        assert drain.wait(60) == 0
    assert "windows" not in status.status(pipeline.settings)

"""A source whose SQL tells positions of another sequence than its slot's: runs go as far as the stream does, and no further."""

from collections.abc import Callable

import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import status
from pgwal_pipeline.pipeline.doctor import examine
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.postgres.shifted_positions import FAR, flushed, shift_sql
from pgwal_pipeline_tests.support import Source

BY = [FAR, -(1 << 22)]


@pytest.mark.parametrize("by", BY)
def test_a_drain_ends_where_the_stream_does(
    by: int, source: Source, make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    shift_sql(monkeypatch, by)
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, i FROM generate_series(1, 100) i")
    pipeline = make_pipeline()
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    frontier = None
    for _ in range(2):
        source.sql("UPDATE t SET v = v + 1 WHERE id % 3 = 0; INSERT INTO t SELECT max(id) + 1 FROM t")
        before = flushed(source)
        assert pipeline.drain().changes in (34, 35)
        frontier = pipeline.ledger.frontier()
        assert frontier is not None
        assert before <= frontier <= flushed(source)
        assert status.lag(pipeline.settings).lag_bytes < 1 << 20
        assert pipeline.drain().changes == 0
    (state,) = pipeline.ledger.tables().values()
    assert state.required_lsn is not None
    assert frontier is not None
    assert state.required_lsn <= frontier, "read whole, and the stream has passed that"
    assert [check.name for check in examine(pipeline.environment()) if not check.ok] == []


@pytest.mark.soak
@pytest.mark.parametrize("by", BY)
def test_what_is_published_is_the_source(by: int, source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_sql(monkeypatch, by)
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, i FROM generate_series(1, 100) i")
    for _ in range(3):
        source.sql("UPDATE t SET v = v + 1 WHERE id % 3 = 0; INSERT INTO t SELECT max(id) + 1 FROM t")
        pipeline.sync()
        pipeline.assert_current("public.t")

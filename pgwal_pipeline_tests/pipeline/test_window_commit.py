"""Windows that a drain left prepared are completed by the next one, whatever became of tables and files."""

from pathlib import Path

import polars as pl

from pgwal_pipeline.lake.raw import commit_window
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import DRAIN, MakePipeline, ids_in_raw, killed, read_once
from pgwal_pipeline_tests.support import Source


def test_what_a_drain_left_prepared_and_a_table_made_anew_since(source: Source, make_pipeline: MakePipeline) -> None:
    """Its column has another type now; both are in raw, under the names that they have there."""
    pipeline = make_pipeline()
    read_once(source, pipeline)
    pipeline.drain()
    source.sql("ALTER TABLE t ADD c int; INSERT INTO t VALUES (12, 0, 7)")
    killed(pipeline, DRAIN, "drain.after_prepared")
    source.sql("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, c text)")
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO t VALUES (13, 'seven')")
    pipeline.drain()
    assert ids_in_raw(pipeline) == [11, 12, 13]


def test_a_prepared_file_that_is_gone_is_read_again(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    source.sql("CREATE TABLE other (id int PRIMARY KEY)")
    read_once(source, pipeline)
    source.sql("INSERT INTO other VALUES (1)")
    pipeline.drain()
    source.sql("INSERT INTO t VALUES (12, 0); INSERT INTO other VALUES (2)")
    killed(pipeline, DRAIN, "drain.after_prepared")
    (window,) = pipeline.ledger.prepared()
    done, gone = sorted(window.tables, key=lambda write: write.table)
    commit_window(pipeline.lake, window.key, [done])
    Path(gone.path, gone.files[0].path).unlink()
    source.sql("INSERT INTO t VALUES (13, 0)")
    report = pipeline.drain()
    assert any("is missing from" in warning for warning in report.warnings)
    assert ids_in_raw(pipeline) == [11, 12, 13]
    assert sorted(pl.read_delta(pipeline.lake.raw(TableName("public", "other")))["id"].to_list()) == [1, 2]
    assert pipeline.ledger.prepared() == ()

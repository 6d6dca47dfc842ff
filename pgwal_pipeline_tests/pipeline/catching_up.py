"""A backlog to catch up on, and what has to be so afterwards."""

from pathlib import Path
from typing import Any

import polars as pl

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source

FOUR_CORES = "import pgwal_pipeline.pipeline.catch_up as c\nc.cores = lambda: 4\n"
DRAIN = FOUR_CORES + "from pgwal_pipeline.pipeline.drain import drain\ndrain(settings, progress=progress)"


def catching_up(make_pipeline: MakePipeline, **overrides: Any) -> Pipeline:
    pipeline = make_pipeline(**({"catchup_threshold": "512kB", "catchup_slots": 2} | overrides))
    drains.bootstrap(pipeline.settings, progress=Silent())
    return pipeline


def alone(make_pipeline: MakePipeline, tmp_path: Path) -> Pipeline:
    """A pipeline with a lake and a slot of its own, whose one reader drains everything."""
    pipeline = make_pipeline(lake=str(tmp_path / "alone"), catchup_slots=0)
    drains.bootstrap(pipeline.settings, progress=Silent())
    return pipeline


def raw_rows(pipeline: Pipeline, table: str) -> list[dict[str, Any]]:
    """Raw's rows without their windows, in the order of their positions."""
    frame = pl.read_delta(pipeline.lake.raw(TableName.parse(table)))
    frame = frame.sort("_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op").drop("_pgwal_window")
    return frame.select(sorted(frame.columns)).to_dicts()


def assert_same_raw(one: Pipeline, other: Pipeline, *tables: str) -> None:
    for table in tables:
        found, wanted = raw_rows(one, table), raw_rows(other, table)
        assert len(found) == len(wanted), table
        assert found == wanted, next((pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]), table)


def windows(pipeline: Pipeline) -> list[tuple[int, int]]:
    return [(window.start_lsn, window.end_lsn) for window in pipeline.ledger.windows() if window.start_lsn < window.end_lsn]


def assert_settled(pipeline: Pipeline, *others: str) -> None:
    """Everything up to the frontier is confirmed and counted, and there are no slots but the pipeline's one and `others`."""
    slot, source = pipeline.settings.slot, pipeline.source
    assert pipeline.ledger.plan() is None
    assert source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", slot) == format_lsn(
        pipeline.ledger.frontier() or 0
    )
    assert slots(source, slot) == {slot, *others}


def slots(source: Source, name: str) -> set[str]:
    return {row[0] for row in source.sql("SELECT slot_name FROM pg_replication_slots WHERE starts_with(slot_name, %s)", name)}


def fill(source: Source, transactions: int = 30, rows: int = 200, first: int = 0) -> None:
    """About 100 kB of WAL for each transaction."""
    for number in range(first, first + transactions):
        source.sql(f"INSERT INTO t (id, v) SELECT i, repeat('v', 300) FROM generate_series({number * rows}, {number * rows + rows - 1}) i")

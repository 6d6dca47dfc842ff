"""Two tables that are written to while a drain's connections break, and what raw must hold of them."""

import random
from collections.abc import Callable

import polars as pl
import pytest

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.pipeline.reports import DrainReport
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source


def fill(source: Source, transactions: int, seed: int = 0) -> None:
    """Transactions of one to a hundred rows over two tables; every tenth one is taken back."""
    rng = random.Random(seed)
    for _ in range(transactions):
        table, rows = rng.choice("ab"), rng.choice((1, 10, 100))
        source.sql(
            f"BEGIN; INSERT INTO {table} (body) SELECT repeat(md5(random()::text), 30) FROM generate_series(1, {rows}); "
            f"UPDATE {table} SET n = n + 1 WHERE id % 17 = 0; {'ROLLBACK' if rng.random() < 0.1 else 'COMMIT'}"
        )


def assert_raw_is_whole(source: Source, lake: str) -> int:
    """Raw, replayed in its order, is what the source holds; no position stands there twice. Gives the number of changes."""
    changes = 0
    for table in "ab":
        raw = pl.scan_delta(Lake(lake).raw(TableName("public", table))).collect().sort("_pgwal_commit_lsn", "_pgwal_ordinal")
        assert raw.select("_pgwal_commit_lsn", "_pgwal_ordinal").is_duplicated().sum() == 0
        rows: dict[int, int] = {}
        for op, key, n in raw.select("_pgwal_op", "id", "n").iter_rows():
            assert (key in rows) == (op == "U")
            rows[key] = n
        assert rows == dict(source.sql(f"SELECT id, n FROM {table}"))
        changes += raw.height
    return changes


def prepared(source: Source) -> None:
    for table in "ab":
        source.sql(f"CREATE TABLE {table} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int DEFAULT 0, body text)")


def drained(pipeline: Pipeline) -> DrainReport:
    report = pipeline.drain()
    frontier = pipeline.ledger.frontier()
    assert frontier is not None
    confirmed = pipeline.source.value(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", pipeline.settings.slot
    )
    assert confirmed == format_lsn(frontier)
    assert pipeline.ledger.plan() is None
    return report


def at_reads(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    passed = 0

    def hit(name: str) -> None:
        nonlocal passed
        if name == "drain.read":
            passed += 1
            act(passed)

    monkeypatch.setattr(failpoints, "hit", hit)

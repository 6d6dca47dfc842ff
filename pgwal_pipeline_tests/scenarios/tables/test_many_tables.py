"""Some hundred tables in one publication: one pass of the WAL feeds them all, and a publish costs what has changed."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

TABLES = 300
ALL = tuple(range(1, TABLES + 1))


def _each(source: Source, *statements: str) -> None:
    """Run statements for every table, its number for %s, all in one transaction."""
    executed = "; ".join(f"EXECUTE format('{statement}', i)" for statement in statements)
    source.sql(f"DO $$ BEGIN FOR i IN 1..{TABLES} LOOP {executed}; END LOOP; END $$")


@pytest.mark.parametrize("numbers", [pytest.param((1, 150, 300), id="three"), pytest.param(ALL, id="all", marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_many_tables(numbers: tuple[int, ...], source: Source, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    """Those of `numbers` are read and published; the others would be just so."""
    followed = [TableName("public", f"t{number}") for number in numbers]
    _each(source, "CREATE TABLE t%s (id int PRIMARY KEY, v text, n numeric(8, 2))")
    pipeline = make_pipeline()
    pipeline.spark = lambda: spark
    drains.bootstrap(pipeline.settings, progress=Silent())
    snapshots.snapshot(pipeline.settings, followed, progress=Silent())
    states = Counter(state.state for state in pipeline.ledger.tables().values())
    assert states == Counter({"ready": len(followed), "pending": TABLES - len(followed)})
    _each(source, "INSERT INTO t%1$s SELECT g, %1$s, g / 4.0 FROM generate_series(1, 4) g", "UPDATE t%s SET id = 9 WHERE id = 1")
    _each(source, "DELETE FROM t%s WHERE id = 2")
    report = pipeline.drain()
    assert len(report.windows) == 1
    assert report.windows[0].transactions == 2
    assert {(counts.rows, counts.key_changes, counts.deletes) for counts in report.tables.values()} == {(7, 1, 1)}
    assert len(report.tables) == TABLES
    started = time.monotonic()
    assert sum(window.changes for window in pipeline.drain().windows) == 0
    assert time.monotonic() - started < 10, "a drain without a change looks at each of them once"
    found = pipeline.publish()
    assert set(found.tables) == set(followed)
    pipeline.assert_current(*map(str, followed))
    # What has no change is not looked at again.
    source.sql("INSERT INTO t150 VALUES (10)")
    pipeline.drain()
    again = pipeline.publish()
    changed = {table for table in followed if again.tables[table].version != found.tables[table].version}
    assert changed == {TableName("public", "t150")}
    pipeline.assert_current(*map(str, followed))

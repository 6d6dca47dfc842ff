"""Maintenance of a pipeline's lake: what it cannot do now it says, and goes on."""

import json
import os
import time
from pathlib import Path
from typing import Any

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import maintenance
from pgwal_pipeline.published.state import open_state
from pgwal_pipeline_tests.faults import at_tables, injected
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.faults.three_tables import TABLES, create, insert


def test_maintenance_goes_on_beside_a_table_that_it_fails_for(pipeline: Pipeline, spark: Any) -> None:
    create(pipeline.source)
    insert(pipeline.source, TABLES, 1)
    pipeline.sync()
    for number in range(2, 6):
        insert(pipeline.source, TABLES, number)
        pipeline.drain()
    pipeline.publish()
    with injected(at_tables("maintain", ["public.b"], "DeltaError")):
        report = maintenance.maintain(pipeline.settings, lambda: spark, progress=Silent())
    assert any("public.b" in warning for warning in report.warnings)
    assert report.upkeep.tables == 3
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}
    pipeline.assert_current(*TABLES)


def _made_earlier(path: str, version: int, days: int) -> None:
    """Make a commit of a Delta table as old as if it was made `days` ago, for every reader of its log."""
    commit = Path(path, "_delta_log", f"{version:020}.json")
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        if "commitInfo" in action:
            action["commitInfo"]["timestamp"] -= days * 86_400_000
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))
    commit.with_name(f".{commit.name}.crc").unlink(missing_ok=True)
    then = time.time() - days * 86_400
    os.utime(commit, (then, then))


def test_what_a_publish_names_stays_readable_however_old_the_version_is(pipeline: Pipeline, spark: Any) -> None:
    """A table that did not change for months has an old version in the newest publish; then it changes."""
    pipeline.source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 1000) i")
    pipeline.sync()
    before = open_state(pipeline.settings)
    _made_earlier(*before.tables["public.t"], days=60)
    pipeline.source.sql("TRUNCATE t; INSERT INTO t VALUES (1, 1)")
    pipeline.drain()
    pipeline.publish()
    report = maintenance.maintain(pipeline.settings, lambda: spark, progress=Silent())
    path, _ = before.tables["public.t"]
    old = sum(file.stat().st_size for file in Path(path).glob("*.parquet")) - open_state(pipeline.settings).dataset("public.t").bytes
    assert report.kept_bytes == report.to_json()["maintenance"]["kept_bytes"] == old > 0
    for number in range(12):  # past a checkpoint, after which Delta removes what its log need not keep
        pipeline.source.sql(f"UPDATE t SET v = {number}")
        pipeline.drain()
        pipeline.publish()
    assert before.spark("public.t", spark).count() == before.arrow("public.t").num_rows == 1000
    assert before.polars("public.t").collect().height == 1000

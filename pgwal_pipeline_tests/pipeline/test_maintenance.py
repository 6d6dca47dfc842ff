"""Maintenance of a pipeline's lake: what it cannot do now it says, and goes on."""

from typing import Any

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import maintenance
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
    assert report.optimized == 3
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}
    pipeline.assert_current(*TABLES)

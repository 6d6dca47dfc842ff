"""The sensor for maintenance: it asks when tables have changed often, for one run at a time, and again after one that failed."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.components.jobs import Steps, build_jobs
from pgwal_pipeline.components.resources import ReplicationSlot
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.components.upkeep import evaluate_maintenance
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import Publish, TablePointer
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.components.projects import table

_NOW = 1_800_000_000.0


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dagster_instance() as made:
        yield made


def _publish(ledger: Ledger, lsn: int, version: int) -> None:
    pointers = {TableName("public", name): TablePointer(name, number) for name, number in (("orders", version), ("quiet", 3))}
    ledger.record_publish(Publish(lsn=lsn, published_at=datetime.now(UTC), tables=pointers))


def test_maintenance_is_asked_for_where_tables_change(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    settings = Settings(lake=str(tmp_path))
    source = CdcSource("", settings, AssetSpecs(AssetNames("pgwal"), Lake(settings.lake)), (table("public.orders"),))
    jobs, ledger = build_jobs(source, Steps.of(source)), Ledger(Lake(settings.lake))
    cursor: str | None = "[of another version]"

    def tick(after: float) -> dg.SensorResult:
        nonlocal cursor
        context = dg.build_sensor_context(instance=instance, cursor=cursor)
        result = evaluate_maintenance(context, source, jobs, ReplicationSlot(), _NOW + after)
        cursor = result.cursor or cursor
        return result

    assert tick(0).skip_reason
    _publish(ledger, 1, 0)
    assert tick(60).skip_reason
    _publish(ledger, 2, 19)
    assert tick(120).skip_reason
    _publish(ledger, 3, 21)
    run = instance.create_run_for_job(jobs.maintenance, tags=source.maintenance_tags, status=dg.DagsterRunStatus.STARTED)
    assert "is started" in str(tick(180).skip_reason)
    instance.delete_run(run.run_id)
    (request,) = list(tick(4000).run_requests or [])
    assert request.run_config == {"ops": {"maintain_lake": {"config": {"tables": ["public.orders"]}}}}
    assert dg.validate_run_config(jobs.maintenance, request.run_config)
    assert tick(4060).skip_reason
    (whole,) = list(tick(90_000).run_requests or [])
    assert whole.run_config == {}
    assert whole.run_key != request.run_key

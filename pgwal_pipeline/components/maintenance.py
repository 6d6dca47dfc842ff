"""Maintenance: compact small files, remove old ones, and delete Dagster's partitions and runs of what the lake no longer has."""

import time
from typing import TYPE_CHECKING

import dagster as dg

from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.requests import ENDED
from pgwal_pipeline.components.source import (
    MAINTENANCE_TAG,
    SLOT_TAG,
    SNAPSHOT_TAG,
    CdcSource,
    StepContext,
    observe_slot,
    session_of,
    slot_of,
)
from pgwal_pipeline.messages import progress

if TYPE_CHECKING:
    from pgwal_pipeline.pipeline.maintenance import MaintenanceReport

TABLES = "tables"
"""The op's config that names tables."""
_DELETED_AT_ONCE = 200


def build_maintenance(source: CdcSource) -> dg.OpDefinition:
    """Build the op `maintain_lake`: it maintains the lake's tables, then deletes the partitions and runs of what is gone."""

    @dg.op(
        name=source.named("maintain_lake"),
        description="Compacts and vacuums the lake, prunes raw windows past PGWAL_RAW_RETENTION and their partitions, deletes old runs.",
        required_resource_keys={source.slot_key, source.spark_key},
        config_schema={
            TABLES: dg.Field(
                [str],
                is_required=False,
                description="Names of tables: only the files of their current tables are looked at. Without it everything is maintained.",
            )
        },
    )
    def maintain_lake(context: dg.OpExecutionContext) -> None:
        from pgwal_pipeline.pipeline.maintenance import maintain, maintain_tables

        settings = slot_of(context, source).settings
        spark, told, tables = session_of(context, source), progress.for_run(context.log), context.op_config.get(TABLES)
        with at_work(context, source.maintenance_tags):
            if tables is not None:
                report = maintain_tables(settings, spark, tables, progress=told)
                observe_slot(context, source, _numbers(report), report.to_json())
                return
            report = maintain(settings, spark, progress=told)
        for key in report.removed_keys:
            context.instance.delete_dynamic_partition(source.windows_name, key)
        stale = _delete_stale_partitions(context, source, report.oldest_key)
        runs = _delete_old_runs(context, source, settings.raw_retention)
        numbers = {"pruned_windows": len(report.removed_keys), "deleted_partitions": len(report.removed_keys) + stale, "deleted_runs": runs}
        observe_slot(context, source, numbers | _numbers(report), report.to_json())

    return maintain_lake


def _numbers(report: "MaintenanceReport") -> dict[str, float]:
    stages = {f"{stage}_seconds": round(spent, 3) for stage, spent in report.seconds.items()}
    return {"rewritten_tables": report.upkeep.rewritten, "rewritten_files": report.upkeep.files} | stages


def _delete_stale_partitions(context: StepContext, source: CdcSource, oldest_key: str | None) -> int:
    """Delete the partitions older than the oldest window in the lake; return how many.

    Their windows were pruned by another process, or never drained by the run they were made for.
    """
    if oldest_key is None:
        return 0
    stale = [key for key in context.instance.get_dynamic_partitions(source.windows_name) if key < oldest_key]
    for key in stale:
        context.instance.delete_dynamic_partition(source.windows_name, key)
    return len(stale)


def _delete_old_runs(context: StepContext, source: CdcSource, older_than: float) -> int:
    """Delete this source's ended runs that were created more than `older_than` seconds ago; return how many.

    The latest materialization that an asset shows stays.
    """
    from datetime import UTC, datetime

    before = datetime.fromtimestamp(time.time() - older_than, UTC)
    deleted = 0
    for tag in (SLOT_TAG, SNAPSHOT_TAG, MAINTENANCE_TAG):
        old = dg.RunsFilter(tags={tag: source.tag}, statuses=list(ENDED), created_before=before)
        while runs := context.instance.get_runs(old, limit=_DELETED_AT_ONCE):
            for run in runs:
                context.instance.delete_run(run.run_id)
            deleted += len(runs)
    return deleted

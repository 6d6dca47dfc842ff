"""Maintenance: compact small files, remove old ones, and delete Dagster's partitions and runs of what the lake no longer has."""

import time
from typing import TYPE_CHECKING

import dagster as dg

from pgwal_pipeline.components import windows
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
        from pgwal_pipeline.lake.layout import Lake
        from pgwal_pipeline.lake.ledger import Ledger
        from pgwal_pipeline.pipeline.maintenance import maintain, maintain_tables

        settings = slot_of(context, source).settings
        spark, told, tables = session_of(context, source), progress.for_run(context.log), context.op_config.get(TABLES)
        with at_work(context, source.maintenance_tags):
            if tables is not None:
                report = maintain_tables(settings, spark, tables, progress=told)
                observe_slot(context, source, _numbers(report), report.to_json())
                return
            report = maintain(settings, spark, progress=told)
        # Those before the oldest window were pruned by another process, or never drained by the run they were made for.
        known_tables = {*Ledger(Lake(settings.lake)).tables(), *(known.table for known in source.tables)}
        deleted = windows.delete(context.instance, source, known_tables, frozenset(report.removed_keys), report.oldest_key)
        runs = _delete_old_runs(context, source, settings.raw_retention)
        numbers = {"pruned_windows": len(report.removed_keys), "deleted_partitions": deleted, "deleted_runs": runs}
        observe_slot(context, source, numbers | _numbers(report), report.to_json())

    return maintain_lake


def _numbers(report: "MaintenanceReport") -> dict[str, float]:
    stages = {f"{stage}_seconds": round(spent, 3) for stage, spent in report.seconds.items()}
    return {"rewritten_tables": report.upkeep.rewritten, "rewritten_files": report.upkeep.files} | stages


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

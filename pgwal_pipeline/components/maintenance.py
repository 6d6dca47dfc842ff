"""Maintenance: compact small files, remove old ones, and delete Dagster's partitions and runs of what the lake no longer has."""

import time
from collections.abc import Mapping

import dagster as dg

from pgwal_pipeline.components import windows
from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.requests import ENDED
from pgwal_pipeline.components.source import SLOT_TAG, SNAPSHOT_TAG, CdcSource, StepContext, observe_slot, session_of, slot_of
from pgwal_pipeline.messages import progress

_DELETED_AT_ONCE = 200


def build_maintenance(source: CdcSource) -> dg.OpDefinition:
    """Build the op `maintain_lake`: it maintains the lake's tables, then deletes the partitions and runs of what is gone."""

    @dg.op(
        name=source.named("maintain_lake"),
        description="Compacts and vacuums the lake, prunes raw windows past PGWAL_RAW_RETENTION and their partitions, deletes old runs.",
        required_resource_keys={source.slot_key, source.spark_key},
    )
    def maintain_lake(context: dg.OpExecutionContext) -> None:
        from pgwal_pipeline.lake.layout import Lake
        from pgwal_pipeline.lake.ledger import Ledger
        from pgwal_pipeline.pipeline.maintenance import maintain

        settings = slot_of(context, source).settings
        with at_work(context, source.slot_tags):
            report = maintain(settings, session_of(context, source), progress=progress.for_run(context.log))
        # Those before the oldest window were pruned by another process, or never drained by the run they were made for.
        tables = {*Ledger(Lake(settings.lake)).tables(), *(known.table for known in source.tables)}
        deleted = windows.delete(context.instance, source, tables, frozenset(report.removed_keys), report.oldest_key)
        runs = _delete_old_runs(context, source, settings.raw_retention)
        numbers = {"pruned_windows": len(report.removed_keys), "deleted_partitions": deleted, "deleted_runs": runs}
        observe_slot(context, source, numbers | _stage_numbers(report.seconds), report.to_json())

    return maintain_lake


def _stage_numbers(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{stage}_seconds": round(spent, 3) for stage, spent in seconds.items()}


def _delete_old_runs(context: StepContext, source: CdcSource, older_than: float) -> int:
    """Delete this source's ended runs that were created more than `older_than` seconds ago; return how many.

    The latest materialization that an asset shows stays.
    """
    from datetime import UTC, datetime

    before = datetime.fromtimestamp(time.time() - older_than, UTC)
    deleted = 0
    for tag in (SLOT_TAG, SNAPSHOT_TAG):
        old = dg.RunsFilter(tags={tag: source.tag}, statuses=list(ENDED), created_before=before)
        while runs := context.instance.get_runs(old, limit=_DELETED_AT_ONCE):
            for run in runs:
                context.instance.delete_run(run.run_id)
            deleted += len(runs)
    return deleted

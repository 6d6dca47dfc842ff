"""Snapshots as assets: one step reads the tables that need it, while drains go on."""

from collections.abc import Iterator

import dagster as dg

from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.observations import observe_tables
from pgwal_pipeline.components.source import CdcSource, StepContext, observe_slot, slot_of
from pgwal_pipeline.components.steps import Step
from pgwal_pipeline.messages import progress
from pgwal_pipeline.pipeline.reports import SnapshotReport, SnapshotsReport
from pgwal_pipeline.values.relation import TableName


def build_snapshots(source: CdcSource) -> Step:
    """Build the step `take_snapshots`, which materializes the snapshot tables.

    A run that selects all of them reads those that have joined and are not read whole yet. A run that selects some, or whose config names
    tables, reads exactly these again from the start. The step does not wait: a table that has to wait for old transactions is left to a
    later run.
    """

    def work(context: StepContext, tables: tuple[TableName, ...] | None) -> Iterator[dg.MaterializeResult]:
        from pgwal_pipeline.pipeline.source_tables import newest_commits

        reports = _snapshot(context, source, tables).tables
        if reports:
            newest = newest_commits(slot_of(context, source).settings)
            observe_tables(context, source, {report.table: newest.get(report.table) for report in reports})
        for report in reports:
            yield dg.MaterializeResult(asset_key=source.names.snapshot(report.table), metadata=_metadata(report))

    return Step(
        source,
        "take_snapshots",
        "materialize_snapshots",
        "Reads the rows that were there before the stream, in chunks. A read that was interrupted goes on after its last chunk.",
        frozenset({source.slot_key}),
        work,
        asset=source.assets.snapshot,
        tables_config="Tables to read again from the start, as schema.table. Empty: those that need it.",
    )


def _snapshot(context: StepContext, source: CdcSource, tables: tuple[TableName, ...] | None) -> SnapshotsReport:
    """Read `tables` again, or with None those that need it; record the numbers on the slot's asset."""
    from pgwal_pipeline.pipeline.snapshot import snapshot

    with at_work(context, source.snapshot_tags):
        done = snapshot(slot_of(context, source).settings, tables, progress=progress.for_run(context.log))
    observe_slot(
        context,
        source,
        {
            "snapshot_tables": len(done.tables),
            "snapshot_rows": sum(report.rows for report in done.tables),
            "snapshot_bytes": sum(report.bytes for report in done.tables),
            "snapshot_seconds": round(done.seconds, 3),
        },
        done.to_json(),
    )
    return done


def _metadata(report: SnapshotReport) -> dict[str, int | float]:
    return {
        "dagster/row_count": report.rows,
        "pgwal/bytes": report.bytes,
        "pgwal/chunks": report.chunks,
        "pgwal/seconds": round(report.seconds, 3),
        "pgwal/rows_per_second": round(report.rows / max(report.seconds, 0.001)),
    }

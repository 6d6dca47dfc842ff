"""Snapshots as assets: one step reads the tables that need it, beside the stream."""

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from pgwal_pipeline import progress
from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.source import CdcSource, StepContext, observe_slot, op_safe, slot_of
from pgwal_pipeline.pipeline.reports import SnapshotReport, SnapshotsReport
from pgwal_pipeline.relation import TableName


class SnapshotConfig(dg.Config):
    """What a snapshot run may be told."""

    tables: list[str] = Field(default=[], description="Tables to read again from the start, as schema.table. Empty: those that need it.")


def build_snapshots(source: CdcSource) -> dg.AssetsDefinition | dg.OpDefinition:
    """The step `take_snapshots`: a `multi_asset` of all snapshot tables, or an op while no table is known.

    Run for all of them it reads those that have joined and are not read whole yet. Run for some of them, or told tables by its config,
    it reads just these again from the start. It waits for nobody: a table that has to wait for old transactions is left to a later run.
    """
    description = "Reads the rows that were there before the stream, in chunks; a read that was cut short goes on where it stood."
    if not source.tables:

        @dg.op(
            name=source.named("take_snapshots"),
            description=description,
            required_resource_keys={source.slot_key},
        )
        def snapshot_unknown(context: dg.OpExecutionContext, config: SnapshotConfig) -> None:
            done = _snapshot(context, source, _parsed(config.tables))
            for report in done.tables:
                context.log_event(dg.AssetMaterialization(source.names.snapshot(report.table), metadata=_metadata(report)))

        return snapshot_unknown

    specs, real_keys = op_safe([source.assets.snapshot(known) for known in source.tables])

    @dg.multi_asset(
        name=source.named("take_snapshots"),
        description=description,
        specs=specs,
        can_subset=True,
        required_resource_keys={source.slot_key},
    )
    def take_snapshots(context: dg.AssetExecutionContext, config: SnapshotConfig) -> Iterator[dg.MaterializeResult]:
        tables = _parsed(config.tables)
        chosen = [known.table for known in source.tables if source.names.snapshot(known.table) in context.selected_asset_keys]
        if not tables and len(chosen) < len(source.tables):
            tables = tuple(chosen)
        done = _snapshot(context, source, tables)
        for report in done.tables:
            key = source.names.snapshot(report.table)
            if key in context.selected_asset_keys:
                yield dg.MaterializeResult(asset_key=key, metadata=_metadata(report))
            else:
                context.log_event(dg.AssetMaterialization(key, metadata=_metadata(report)))

    return take_snapshots.with_attributes(asset_key_replacements=real_keys) if real_keys else take_snapshots


def _parsed(names: list[str]) -> tuple[TableName, ...]:
    try:
        return tuple(TableName.parse(name) for name in names)
    except ValueError as error:
        raise dg.Failure(f"{error}.", allow_retries=False) from None


def _snapshot(context: StepContext, source: CdcSource, tables: tuple[TableName, ...]) -> SnapshotsReport:
    """Read `tables` again, or those that need it where none are named, and leave the numbers on the slot."""
    from pgwal_pipeline.pipeline.snapshot import snapshot

    with at_work(context, source.snapshot_tags):
        done = snapshot(slot_of(context, source).settings, tables or None, progress=progress.for_run(context.log))
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

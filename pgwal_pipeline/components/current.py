"""The publish as assets: one step brings every current table to one position, in one Spark session."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import dagster as dg

from pgwal_pipeline import progress
from pgwal_pipeline.asset_specs import FOLLOWED_CHECK
from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.source import CdcSource, StepContext, observe_slot, op_safe, session_of, slot_of
from pgwal_pipeline.errors import LakeError
from pgwal_pipeline.lsn import format_lsn
from pgwal_pipeline.pipeline.reports import PublishReport, TablePublish, publish_json
from pgwal_pipeline.relation import TableName
from pgwal_pipeline.settings import Settings

_VERSION = "pgwal/delta_version"


def build_publish(source: CdcSource) -> dg.AssetsDefinition | dg.OpDefinition:
    """The step `publish_current`: a `multi_asset` of all current tables, or an op while no table is known.

    Only tables with a new Delta version are materialized; the others stand at the publish's position as they are. A table that cannot be
    followed fails its check and holds up no other.
    """
    description = "Merges what raw holds into every current table, up to one position for all of them."
    resources = {source.slot_key, source.spark_key}
    if not source.tables:

        @dg.op(
            name=source.named("publish_current"),
            description=description,
            required_resource_keys=resources,
            ins={"drained": dg.In(dg.Nothing)},
        )
        def publish_unknown(context: dg.OpExecutionContext) -> None:
            for key, metadata in _changed(context, source, _publish(context, source, None)):
                context.log_event(dg.AssetMaterialization(key, metadata=metadata))

        return publish_unknown

    specs, real_keys = op_safe([source.assets.current(known) for known in source.tables])
    stand_ins = {real: stand_in for stand_in, real in real_keys.items()}

    @dg.multi_asset(
        name=source.named("publish_current"),
        description=description,
        specs=specs,
        check_specs=[
            dg.AssetCheckSpec(
                FOLLOWED_CHECK,
                asset=stand_ins.get(source.names.current(known.table), source.names.current(known.table)),
                description="Fails where the table's changes cannot be merged; the other tables go on.",
            )
            for known in source.tables
        ],
        can_subset=True,
        required_resource_keys=resources,
    )
    def publish_current(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
        selected = context.selected_asset_keys
        chosen = [known.table for known in source.tables if source.names.current(known.table) in selected]
        report = _publish(context, source, None if len(chosen) == len(source.tables) else chosen)
        yield from _results(context, source, report)

    return publish_current.with_attributes(asset_key_replacements=real_keys) if real_keys else publish_current


def _publish(context: StepContext, source: CdcSource, tables: Iterable[TableName] | None) -> PublishReport:
    """Publish, and leave the numbers on the slot."""
    from pgwal_pipeline.pipeline.publish import publish

    chosen = None if tables is None else frozenset(tables)
    with at_work(context, source.slot_tags):
        report = publish(
            slot_of(context, source).settings, session_of(context, source), tables=chosen, progress=progress.for_run(context.log)
        )
    numbers: dict[str, float | int | str] = {
        "published_tables": sum(table.version is not None for table in report.tables.values()),
        "merged_rows": sum(table.rows_changed or 0 for table in report.tables.values()),
        "failed_tables": len(report.errors),
        **{f"{stage}_seconds": round(seconds, 3) for stage, seconds in report.seconds.items()},
    }
    if report.lsn is not None:
        numbers["published_lsn"] = format_lsn(report.lsn)
    observe_slot(context, source, numbers, publish_json(report))
    return report


def _results(
    context: dg.AssetExecutionContext, source: CdcSource, report: PublishReport
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    for key, metadata in _changed(context, source, report):
        if key in context.selected_asset_keys:
            yield dg.MaterializeResult(asset_key=key, metadata=metadata)
        else:
            context.log_event(dg.AssetMaterialization(key, metadata=metadata))
    reasons = _errors(slot_of(context, source).settings)
    for table in {*report.tables, *reasons}:
        key = source.names.current(table)
        if dg.AssetCheckKey(key, FOLLOWED_CHECK) in context.selected_asset_check_keys:
            yield dg.AssetCheckResult(asset_key=key, check_name=FOLLOWED_CHECK, passed=table not in reasons, description=reasons.get(table))


def _errors(settings: Settings) -> dict[TableName, str]:
    """The tables that cannot be followed, each with its reason."""
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger

    states = Ledger(Lake(settings.lake)).tables().values()
    return {state.table: state.reason or "No reason was given." for state in states if state.state == "error"}


def _changed(context: StepContext, source: CdcSource, report: PublishReport) -> Iterator[tuple[dg.AssetKey, dict[str, Any]]]:
    """The current tables that have another Delta version than Dagster knows of, each with what to tell of it."""
    recorded = _recorded_versions(context, source, report.tables)
    for table, publish in sorted(report.tables.items()):
        key = source.names.current(table)
        if publish.version is not None and not publish.errors and recorded.get(key) != (publish.path, publish.version):
            yield key, _metadata(report, publish)


def _recorded_versions(context: StepContext, source: CdcSource, tables: Iterable[TableName]) -> dict[dg.AssetKey, tuple[str, int]]:
    """The path and Delta version that each table's newest materialization names."""
    recorded: dict[dg.AssetKey, tuple[str, int]] = {}
    for record in context.instance.get_asset_records([source.names.current(table) for table in tables]):
        newest = record.asset_entry.last_materialization
        if newest is not None and newest.asset_materialization is not None:
            metadata: dict[str, Any] = {name: value.value for name, value in newest.asset_materialization.metadata.items()}
            recorded[record.asset_entry.asset_key] = (metadata.get("pgwal/path", ""), metadata.get(_VERSION, -1))
    return recorded


def _metadata(report: PublishReport, publish: TablePublish) -> dict[str, Any]:
    from pgwal_pipeline.lake.current import row_count

    metadata: dict[str, Any] = {"pgwal/path": dg.MetadataValue.path(publish.path), _VERSION: publish.version}
    if publish.version is not None:
        with suppress(LakeError):  # damaged since; the next publish of the table says so
            metadata["dagster/row_count"] = row_count(publish.path, publish.version)
    if publish.rows_changed is not None:
        metadata["pgwal/rows_changed"] = publish.rows_changed
    if report.lsn is not None:
        metadata["pgwal/published_lsn"] = format_lsn(report.lsn)
    return metadata

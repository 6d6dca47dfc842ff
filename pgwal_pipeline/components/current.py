"""The publish as assets: one step brings every current table to one LSN, in one Spark session."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import dagster as dg

from pgwal_pipeline.asset_specs import FOLLOWED_CHECK
from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.source import CdcSource, StepContext, observe_slot, session_of, slot_of
from pgwal_pipeline.components.steps import Result, Step
from pgwal_pipeline.messages import progress
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.pipeline.reports import PublishReport, TablePublish, publish_json
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName

_VERSION = "pgwal/delta_version"


def build_publish(source: CdcSource) -> Step:
    """Build the step `publish_current`, which materializes the current tables.

    Only tables with a new Delta version are materialized: the others had no changes and are at the publish's LSN as they are. A table that
    cannot be followed fails its check and does not hold up the others.
    """

    def work(context: StepContext, tables: tuple[TableName, ...] | None) -> Iterator[Result]:
        report = _publish(context, source, tables)
        yield from _changed(context, source, report)
        yield from _followed(context, source, report)

    return Step(
        source,
        "publish_current",
        "Merges the changes in raw into every current table, up to one LSN for all of them.",
        frozenset({source.slot_key, source.spark_key}),
        work,
        assets=[source.assets.current(known) for known in source.tables],
        checks=[
            dg.AssetCheckSpec(
                FOLLOWED_CHECK,
                asset=source.names.current(known.table),
                description="Fails when the table's changes cannot be merged. The other tables go on.",
            )
            for known in source.tables
        ],
    )


def _publish(context: StepContext, source: CdcSource, tables: Iterable[TableName] | None) -> PublishReport:
    """Publish, and record the numbers on the slot's asset."""
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


def _followed(context: StepContext, source: CdcSource, report: PublishReport) -> Iterator[dg.AssetCheckResult]:
    """Yield the result of the check `followed` for each table. A table in state `error` fails it with the reason."""
    reasons = _errors(slot_of(context, source).settings)
    for table in sorted({*report.tables, *reasons}):
        yield dg.AssetCheckResult(
            asset_key=source.names.current(table),
            check_name=FOLLOWED_CHECK,
            passed=table not in reasons,
            description=reasons.get(table),
        )


def _errors(settings: Settings) -> dict[TableName, str]:
    """Return the tables in state `error`, each with its reason."""
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger

    states = Ledger(Lake(settings.lake)).tables().values()
    return {state.table: state.reason or "No reason was given." for state in states if state.state == "error"}


def _changed(context: StepContext, source: CdcSource, report: PublishReport) -> Iterator[dg.MaterializeResult]:
    """Yield a materialization for each current table whose Delta version is not the one of its newest materialization."""
    recorded = _recorded_versions(context, source, report.tables)
    for table, publish in sorted(report.tables.items()):
        key = source.names.current(table)
        if publish.version is not None and not publish.errors and recorded.get(key) != (publish.path, publish.version):
            yield dg.MaterializeResult(asset_key=key, metadata=_metadata(report, publish))


def _recorded_versions(context: StepContext, source: CdcSource, tables: Iterable[TableName]) -> dict[dg.AssetKey, tuple[str, int]]:
    """Return the path and Delta version that each table's newest materialization names."""
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
        with suppress(LakeError):  # damaged since the merge; the table's next publish reports it
            metadata["dagster/row_count"] = row_count(publish.path, publish.version)
    if publish.rows_changed is not None:
        metadata["pgwal/rows_changed"] = publish.rows_changed
    if report.lsn is not None:
        metadata["pgwal/published_lsn"] = format_lsn(report.lsn)
    return metadata

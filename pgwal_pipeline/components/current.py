"""The publish as assets: one step brings every current table to one LSN, in one Spark session."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from pgwal_pipeline.asset_specs import FOLLOWED_CHECK, current_schema
from pgwal_pipeline.components.events import DATA_VERSION_TAG, announce, visible_metadata
from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.observations import first_readings
from pgwal_pipeline.components.schema_checks import schema_checks, schema_results, verdicts
from pgwal_pipeline.components.source import CdcSource, StepContext, observe_slot, session_of, slot_of
from pgwal_pipeline.components.steps import Result, Step
from pgwal_pipeline.known_tables import known
from pgwal_pipeline.lake.records import TablePointer, TableState
from pgwal_pipeline.messages import progress
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.pipeline.reports import PublishReport, publish_json
from pgwal_pipeline.pipeline.schema_policy import Difference, frozen_difference, summary
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName

_VERSION = "pgwal/delta_version"
_RECORDED = "pgwal/recorded"  # the entry of the slot's observations that names the publish that was recorded, and the tables in error
_OBSERVATIONS = 20  # of the slot's newest, among which the last publish is searched


def build_publish(source: CdcSource) -> Step:
    """Build the step `publish_current`, which materializes the current tables.

    Only tables whose content changed are materialized: the others are at the publish's LSN as they are. A table that cannot be followed
    fails its check and does not hold up the others. A check is recorded when its verdict changes.
    """

    def work(context: StepContext, tables: tuple[TableName, ...] | None) -> Iterator[Result]:
        from pgwal_pipeline.lake.delta import side_by_side

        last = _last_recorded(context, source)
        report = _publish(context, source, tables)
        changed = _changed(context, source, report, last)
        states = _states(slot_of(context, source).settings)
        results = side_by_side(lambda one: _result(source, report, *one, states, whole=tables is None), list(changed.items()))
        pasts = _changed_histories(context, source, report, last)
        if tables is None and not last.seen:
            first_readings(context, source)
        announce(context, [*(source.names.current(table) for table in changed), *(source.names.history(table) for table in pasts)])
        yield from results
        for table, version in pasts.items():
            yield _history_result(source, report, table, version)
        reasons = {table: state.trouble for table, state in states.items() if state.trouble is not None}
        yield from _followed(source, report, reasons, last)
        schemas = verdicts(states)
        yield from schema_results(source, schemas, last.schemas)
        _observe(context, source, report, changed, reasons if tables is None else None, schemas)

    return Step(
        source,
        "publish_current",
        "materialize_current",
        "Merges the changes in raw into every current table, up to one LSN for all of them.",
        frozenset({source.slot_key, source.spark_key}),
        work,
        asset=source.assets.current,
        second=lambda found: source.assets.history(found) if source.assets.options.of(found.table).history else None,
        check=lambda found: dg.AssetCheckSpec(
            FOLLOWED_CHECK,
            asset=source.names.current(found.table),
            description="Fails when the table's changes cannot be merged. The other tables go on.",
        ),
        more_checks=lambda found: schema_checks(source, found),
    )


def _publish(context: StepContext, source: CdcSource, tables: Iterable[TableName] | None) -> PublishReport:
    from pgwal_pipeline.pipeline.publish import publish

    chosen = None if tables is None else frozenset(tables)
    with at_work(context, source.slot_tags):
        return publish(
            slot_of(context, source).settings, session_of(context, source), tables=chosen, progress=progress.for_run(context.log)
        )


@dataclass(frozen=True)
class _Recorded:
    """What Dagster has of a publish: where its tables stood, and the quoted names of the tables whose check failed, with the reasons.

    `seen`: whether first readings were recorded, by that publish or before. `schemas` are the verdicts of the check `schema`.
    """

    tables: Mapping[TableName, TablePointer] = field(default_factory=dict)
    histories: Mapping[TableName, TablePointer] = field(default_factory=dict)
    failing: Mapping[str, str] = field(default_factory=dict)
    seen: bool = False
    schemas: Mapping[str, str] = field(default_factory=dict)


def _last_recorded(context: StepContext, source: CdcSource) -> _Recorded:
    """Return what is recorded of the ledger's newest publish; nothing if that publish was not recorded, or not of all tables."""
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger

    publish = Ledger(Lake(slot_of(context, source).settings.lake)).publish()
    if publish is None:
        return _Recorded()
    for record in context.instance.fetch_observations(source.names.slot, limit=_OBSERVATIONS).records:
        entry = None if record.asset_observation is None else record.asset_observation.metadata.get(_RECORDED)
        if isinstance(entry, dg.JsonMetadataValue) and isinstance(entry.data, dict):
            same = entry.data["publish"] == _digest(publish.tables, publish.histories)
            seen = bool(entry.data.get("seen"))
            if not same:
                return _Recorded(seen=seen)
            return _Recorded(publish.tables, publish.histories, entry.data["failing"], seen, entry.data.get("schemas", {}))
    return _Recorded()


def _digest(tables: Mapping[TableName, TablePointer], histories: Mapping[TableName, TablePointer]) -> str:
    """Return what tells where the tables of a publish stand from any other."""
    listed = sorted((str(table), pointer.path, pointer.version) for table, pointer in [*tables.items(), *histories.items()])
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _observe(
    context: StepContext,
    source: CdcSource,
    report: PublishReport,
    changed: Collection[TableName],
    failing: Mapping[TableName, str] | None,
    schemas: Mapping[TableName, tuple[Difference, ...]],
) -> None:
    """Record the numbers on the slot's asset, after everything else; the report names only the tables that changed or failed.

    `failing` is None for a publish of some tables only, which the next publish does not go by.
    """
    numbers: dict[str, float | int | str] = {
        "published_tables": sum(table.version is not None for table in report.tables.values()),
        "merged_rows": sum(table.rows_changed or 0 for table in report.tables.values()),
        "failed_tables": len(report.errors),
        **({"unregistered_tables": len(report.unregistered)} if report.unregistered else {}),
        **{f"{stage}_seconds": round(seconds, 3) for stage, seconds in report.seconds.items()},
    }
    more: dict[str, dg.MetadataValue] = {}
    if report.lsn is not None:
        numbers["published_lsn"] = format_lsn(report.lsn)
        if failing is not None:
            reasons = {str(table): reason for table, reason in failing.items()}
            pointers = {name: TablePointer(found.path, found.version) for name, found in report.tables.items() if found.version is not None}
            differing = {str(table): summary(found) for table, found in schemas.items()}
            told = {"publish": _digest(pointers, report.histories), "failing": reasons, "seen": True, "schemas": differing}
            more[_RECORDED] = dg.MetadataValue.json(told)
    shown = {table: publish for table, publish in report.tables.items() if table in changed or publish.errors}
    observe_slot(context, source, numbers, publish_json(replace(report, tables=shown)), more)


def _followed(source: CdcSource, report: PublishReport, reasons: Mapping[TableName, str], last: _Recorded) -> Iterator[dg.AssetCheckResult]:
    """Yield the check `followed` of each table whose verdict is not the recorded one. A table in state `error` fails it with the reason."""
    for table in sorted({*report.tables, *reasons}):
        reason = reasons.get(table)
        if reason != last.failing.get(str(table)) or (reason is None and table not in last.tables):
            yield dg.AssetCheckResult(
                asset_key=source.names.current(table), check_name=FOLLOWED_CHECK, passed=reason is None, description=reason
            )


def _states(settings: Settings) -> dict[TableName, TableState]:
    """Return the states of all tables."""
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger

    return Ledger(Lake(settings.lake)).tables()


def _changed(context: StepContext, source: CdcSource, report: PublishReport, last: _Recorded) -> dict[TableName, str]:
    """Return the tables whose content is not that of their newest materialization, with the data versions that tell it.

    Dagster is asked only about those that do not stand where the publish before left them.
    """
    moved = {
        source.names.current(table): table
        for table, publish in sorted(report.tables.items())
        if publish.version is not None and not publish.errors and last.tables.get(table) != TablePointer(publish.path, publish.version)
    }
    at = {table: TablePointer(found.path, found.version) for table, found in report.tables.items() if found.version is not None}
    return _unrecorded(context, moved, at)


def _changed_histories(context: StepContext, source: CdcSource, report: PublishReport, last: _Recorded) -> dict[TableName, str]:
    """Return the same of the tables' histories."""
    moved = {source.names.history(table): table for table, at in sorted(report.histories.items()) if last.histories.get(table) != at}
    return _unrecorded(context, moved, report.histories)


def _unrecorded(context: StepContext, moved: Mapping[dg.AssetKey, TableName], at: Mapping[TableName, TablePointer]) -> dict[TableName, str]:
    """Return the data versions of those of `moved` whose newest materialization has another one."""
    from pgwal_pipeline.lake.delta import side_by_side

    recorded = _recorded_versions(context, moved) if moved else {}
    versions = side_by_side(_data_version, [at[table] for table in moved.values()])
    found = dict(zip(moved, versions, strict=True))
    return {table: found[key] for key, table in moved.items() if recorded.get(key) != found[key]}


def _data_version(at: TablePointer) -> str:
    from pgwal_pipeline.lake.standing import content_version

    try:
        return content_version(at.path, at.version)
    except LakeError:  # damaged since the merge; the table's next publish reports it
        return str(at.version)


def _recorded_versions(context: StepContext, keys: Iterable[dg.AssetKey]) -> dict[dg.AssetKey, str]:
    """Return the data version of the newest materialization of each asset."""
    recorded: dict[dg.AssetKey, str] = {}
    for record in context.instance.get_asset_records(list(keys)):
        newest = record.asset_entry.last_materialization
        if newest is not None and newest.asset_materialization is not None:
            recorded[record.asset_entry.asset_key] = (newest.asset_materialization.tags or {}).get(DATA_VERSION_TAG, "")
    return recorded


def _result(
    source: CdcSource, report: PublishReport, table: TableName, version: str, states: Mapping[TableName, TableState], *, whole: bool
) -> dg.MaterializeResult:
    metadata = _metadata(report, table, whole=whole)
    state = states.get(table)
    if state is not None and state.accepted is not None and frozen_difference(state):
        metadata["dagster/column_schema"] = current_schema(known(state.accepted, {}), deleted=source.assets.options.of(table).keeps_deleted)
    return dg.MaterializeResult(asset_key=source.names.current(table), metadata=metadata, data_version=dg.DataVersion(version))


def _history_result(source: CdcSource, report: PublishReport, table: TableName, version: str) -> dg.MaterializeResult:
    metadata: dict[str, Any] = {_VERSION: report.histories[table].version}
    if report.lsn is not None:
        metadata["pgwal/published_lsn"] = format_lsn(report.lsn)
    return dg.MaterializeResult(asset_key=source.names.history(table), metadata=metadata, data_version=dg.DataVersion(version))


def _metadata(report: PublishReport, table: TableName, *, whole: bool) -> dict[str, Any]:
    """Return a table's metadata. Only a `whole` publish, of all tables, has its time from the ledger."""
    from pgwal_pipeline.lake.current import row_count

    publish = report.tables[table]
    metadata: dict[str, Any] = {_VERSION: publish.version}
    if publish.version is not None:
        with suppress(LakeError):  # damaged since the merge; the table's next publish reports it
            metadata["dagster/row_count"] = row_count(publish.path, publish.version)
    if publish.rows_changed is not None:
        metadata["pgwal/rows_changed"] = publish.rows_changed
    if report.lsn is not None:
        metadata["pgwal/published_lsn"] = format_lsn(report.lsn)
    if table in report.unregistered:
        metadata["pgwal/not_in_catalog"] = report.unregistered[table]
    return metadata | visible_metadata(publish.newest, report.published_at if whole else None)

"""The source's tables as observed assets: what a step has learned of them is recorded when they are first seen and when they changed.

Dagster's lineage marks an asset orange for which nothing was ever recorded. A table that does not change is recorded once: what a run
writes follows what changed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg

from pgwal_pipeline.components.events import NEWEST_COMMIT_AT, version_tags
from pgwal_pipeline.components.source import CdcSource, StepContext, op_safe, slot_of
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.pipeline.reports import NewestCommit
from pgwal_pipeline.values.relation import TableName

Newest = Mapping[TableName, NewestCommit | None]


def observe_tables(context: StepContext, source: CdcSource, tables: Newest) -> None:
    """Log an observation of each of the source's tables, with its newest commit (None if none is known) and its size.

    While the source is away the sizes are left out.
    """
    for key, metadata, tags in _observations(context, source, tables):
        context.log_event(dg.AssetObservation(key, metadata=metadata, tags=tags))


def first_readings(context: StepContext, source: CdcSource) -> None:
    """Record what this Dagster instance lacks of a lake: source tables never observed, snapshots, and the slot where no sensor is on."""
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger
    from pgwal_pipeline.pipeline.source_tables import newest_commits

    settings = slot_of(context, source).settings
    ledger = Ledger(Lake(settings.lake))
    states = {table: state for table, state in ledger.tables().items() if state.followed}
    newest = newest_commits(settings)
    named = {*states, *(known.table for known in source.tables)}
    unseen = [table for table in named if not context.instance.fetch_observations(source.names.source(table), limit=1).records]
    if unseen:
        observe_tables(context, source, {table: newest.get(table) for table in unseen})
    snapshots = {source.names.snapshot(table): state for table, state in states.items() if state.generation is not None}
    recorded = context.instance.get_latest_materialization_events([*snapshots, source.names.slot])
    if recorded.get(source.names.slot) is None:
        context.log_event(dg.AssetMaterialization(source.names.slot))
    for key, state in sorted(snapshots.items()):
        if recorded.get(key) is None:
            chunks = [chunk for chunk in ledger.chunks(state.location, state.generation or "") if chunk.attempt is not None]
            metadata = {
                "dagster/row_count": sum(chunk.rows for chunk in chunks),
                "pgwal/bytes": sum(chunk.bytes for chunk in chunks),
                "pgwal/chunks": len(chunks),
            }
            context.log_event(dg.AssetMaterialization(key, metadata=metadata))


def build_source_assets(source: CdcSource) -> dg.AssetsDefinition:
    """Build the source's tables as assets that can be observed. At least one table must be known."""
    specs, real_keys = op_safe([source.assets.source(known) for known in source.tables])
    tables = {source.names.source(known.table): known.table for known in source.tables}

    @dg.multi_observable_source_asset(
        name=source.named("observe_source"),
        description="Reads how large the tables are, and when they last changed. Runs do so by themselves for tables that changed.",
        specs=specs,
        can_subset=True,
        required_resource_keys={source.slot_key},
    )
    def work(context: dg.AssetExecutionContext) -> Iterator[dg.ObserveResult]:
        from pgwal_pipeline.pipeline.source_tables import newest_commits

        newest = newest_commits(slot_of(context, source).settings)
        selected = {tables[key]: newest.get(tables[key]) for key in sorted(context.selected_asset_keys)}
        for key, metadata, tags in _observations(context, source, selected):
            yield dg.ObserveResult(asset_key=key, metadata=metadata, tags=tags)

    return work.with_attributes(asset_key_replacements=real_keys) if real_keys else work


def _observations(
    context: StepContext, source: CdcSource, tables: Newest
) -> Iterator[tuple[dg.AssetKey, dict[str, Any], dict[str, str] | None]]:
    """Yield for each table its asset's key, and an observation's metadata and tags."""
    from pgwal_pipeline.pipeline.source_tables import sizes

    try:
        found = sizes(slot_of(context, source).settings, list(tables)) if tables else {}
    except PgwalError as error:
        context.log.info(f"The tables' sizes are left out: {error}")
        found = {}
    for table, newest in sorted(tables.items()):
        # The newest commit's LSN is the data version.
        metadata: dict[str, Any] = {} if newest is None or newest.at is None else {NEWEST_COMMIT_AT: dg.MetadataValue.timestamp(newest.at)}
        if (size := found.get(table)) is not None:
            metadata |= {"pgwal/bytes": size.bytes} | ({} if size.rows is None else {"pgwal/estimated_rows": size.rows})
        yield source.names.source(table), metadata, None if newest is None else version_tags(f"{newest.lsn:016X}")

"""What materializations and observations say of a table's data: its version, its newest commit, and how soon that was visible.

Automation conditions go by these events. The tables that a publish changed are announced before the first one is materialized: a condition
that waits while a dependency is in progress, as `eager()` does, then sees all of them updated at once.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from pgwal_pipeline.components.dagster_internals import report_planned
from pgwal_pipeline.components.source import StepContext
from pgwal_pipeline.pipeline.reports import NewestCommit
from pgwal_pipeline.values.lsn import format_lsn

DATA_VERSION_TAG = "dagster/data_version"
"""The tag of an event that holds the data version, as Dagster has it."""

NEWEST_COMMIT_LSN = "pgwal/newest_commit_lsn"
NEWEST_COMMIT_AT = "pgwal/newest_commit_at"
SECONDS_TO_VISIBLE = "pgwal/seconds_to_visible"
"""How long after the newest commit, by the source's clock, its change could be read in the lake."""


def materialization(result: dg.MaterializeResult, partition: str | None = None) -> dg.AssetMaterialization:
    """Return a step's result as the event that an op logs."""
    assert result.asset_key is not None
    tags = None if result.data_version is None else version_tags(result.data_version.value)
    return dg.AssetMaterialization(result.asset_key, metadata=result.metadata, partition=partition, tags=tags)


def version_tags(version: str) -> dict[str, str]:
    """Return the tags that give an event a data version."""
    return {DATA_VERSION_TAG: version}


def visible_metadata(newest: NewestCommit | None, visible_at: datetime | None) -> dict[str, Any]:
    """Return the metadata of a table's newest commit, which became visible in the lake at `visible_at` (None: now)."""
    if newest is None:
        return {}
    metadata: dict[str, Any] = {NEWEST_COMMIT_LSN: format_lsn(newest.lsn)}
    if newest.at is not None:
        metadata[NEWEST_COMMIT_AT] = dg.MetadataValue.timestamp(newest.at)
        seconds = ((visible_at or datetime.now(UTC)) - newest.at).total_seconds()
        metadata[SECONDS_TO_VISIBLE] = round(max(0.0, seconds), 3)
    return metadata


def announce(context: StepContext, keys: Sequence[dg.AssetKey]) -> None:
    """Record that the run is about to materialize these assets, in this order. The first is next, and need not be announced.

    For a step of assets Dagster has recorded it.
    """
    if not isinstance(context, dg.AssetExecutionContext):
        report_planned(context.instance, context.run, str(context.op_handle), keys[1:])

"""What all definitions of one source share: names, tables and tags."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgwal_pipeline.asset_specs import REPORT, AssetNames, AssetSpecs
from pgwal_pipeline.known_tables import KnownTable, refresh
from pgwal_pipeline.messages import progress
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.messages.printable import printable
from pgwal_pipeline.partitions import wal_windows
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgwal_pipeline.components.resources import LakeSpark, ReplicationSlot

StepContext = dg.AssetExecutionContext | dg.OpExecutionContext

SLOT_TAG = "pgwal/slot"
"""The tag of runs that read the slot or write what is read from it. One run at a time for each value."""

SNAPSHOT_TAG = "pgwal/snapshot"
"""The tag of runs that read tables whole. One run at a time for each value, alongside those of the slot."""


MAINTENANCE_TAG = "pgwal/maintenance"
"""The tag of runs that maintain the lake. One run at a time for each value, alongside those of the slot and of snapshots."""


@dataclass(frozen=True)
class CdcSource:
    """One source in one code location. `name` is the prefix of its jobs and ops; empty for the only source."""

    name: str
    settings: Settings
    assets: AssetSpecs
    tables: tuple[KnownTable, ...]

    def named(self, what: str) -> str:
        """Return `what` with the source's name before it: `sync`, or `shop_sync`."""
        return f"{self.name}_{what}" if self.name else what

    @property
    def names(self) -> AssetNames:
        """The keys of its assets."""
        return self.assets.names

    @property
    def windows(self) -> dg.DynamicPartitionsDefinition:
        """The partitions of the jobs that drain, one for each window."""
        return wal_windows(self.name)

    def windows_of(self, table: TableName) -> dg.DynamicPartitionsDefinition:
        """Return the partitions of a raw table, one for each window in which it has rows."""
        return wal_windows(self.name, str(table))

    @property
    def windows_name(self) -> str:
        """The name of `windows` in the Dagster instance."""
        assert self.windows.name is not None
        return self.windows.name

    @property
    def slot_key(self) -> str:
        """The key of the ReplicationSlot resource."""
        return self.named("slot")

    @property
    def spark_key(self) -> str:
        """The key of the Spark resource."""
        return self.named("spark")

    @property
    def lake_key(self) -> str:
        """The key of the PublishedLake resource."""
        return self.named("lake")

    @property
    def tag(self) -> str:
        """The value of this source's run tags."""
        return f"{self.name}.{self.settings.slot}" if self.name else self.settings.slot

    @property
    def slot_tags(self) -> dict[str, str]:
        """The tags of jobs that read the slot or write what is read from it."""
        return {SLOT_TAG: self.tag}

    @property
    def snapshot_tags(self) -> dict[str, str]:
        """The tags of the job that reads tables whole."""
        return {SNAPSHOT_TAG: self.tag}

    @property
    def maintenance_tags(self) -> dict[str, str]:
        """The tags of the job that maintains the lake."""
        return {MAINTENANCE_TAG: self.tag}


def op_safe(specs: Sequence[dg.AssetSpec]) -> tuple[list[dg.AssetSpec], dict[dg.AssetKey, dg.AssetKey]]:
    """Return the specs with stand-in keys (see `stand_ins`) where needed, and the real key of each stand-in."""
    given = stand_ins(key for spec in specs for key in (spec.key, *(dep.asset_key for dep in spec.deps)))
    if not given:
        return list(specs), {}
    safe = [
        spec.replace_attributes(
            key=given.get(spec.key, spec.key),
            deps=[dg.AssetDep(given.get(dep.asset_key, dep.asset_key), partition_mapping=dep.partition_mapping) for dep in spec.deps],
        )
        for spec in specs
    ]
    return safe, {stand_in: key for key, stand_in in given.items()}


def stand_ins(keys: Iterable[dg.AssetKey]) -> dict[dg.AssetKey, dg.AssetKey]:
    """Return a stand-in for each key from which Dagster cannot derive the name of an op's input or output.

    Postgres allows any character in a name, Dagster only letters, digits and underscores, and it derives the same name from `a_b.c` and
    `a.b_c`. Assets are defined under the stand-ins, which name the inputs and outputs; `with_attributes(asset_key_replacements=…)` then
    gives the assets their real keys.
    """
    found: dict[dg.AssetKey, dg.AssetKey] = {}
    taken: set[str] = set()
    for key in sorted(set(keys), key=lambda key: (_plain(key) != key, key)):
        path = list(_plain(key).path)
        attempt, number = path, 1
        while (name := re.sub("_+", "_", "_".join(attempt))) in taken:
            number += 1
            attempt = [*path[:-1], f"{path[-1]}_{number}"]
        taken.add(name)
        if attempt != list(key.path):
            found[key] = dg.AssetKey(attempt)
    return found


def _plain(key: dg.AssetKey) -> dg.AssetKey:
    return dg.AssetKey([re.sub(r"[^A-Za-z0-9_]", "_", part) or "_" for part in key.path])


def slot_of(context: StepContext, source: CdcSource) -> "ReplicationSlot":
    """Return the run's ReplicationSlot resource for this source."""
    return getattr(context.resources, source.slot_key)


def session_of(context: StepContext, source: CdcSource) -> "Callable[[], SparkSession]":
    """Return a function that starts the run's Spark session for this source, or returns the started one."""
    spark = spark_of(context, source)
    return lambda: spark.session(progress.for_run(context.log).say)


def spark_of(context: StepContext, source: CdcSource) -> "LakeSpark":
    """Return the run's LakeSpark resource for this source."""
    return getattr(context.resources, source.spark_key)


def observe_slot(
    context: StepContext,
    source: CdcSource,
    numbers: Mapping[str, float | int | str],
    report: Mapping[str, Any],
    more: Mapping[str, dg.MetadataValue] | None = None,
) -> None:
    """Record a step's numbers on the slot's asset, where the UI plots them, and its report, which `pgwal` prints.

    `more` are further metadata entries.
    """
    metadata = (
        {f"pgwal/{name}": value for name, value in numbers.items()} | {REPORT: dg.MetadataValue.json(dict(report))} | dict(more or {})
    )
    context.log_event(dg.AssetObservation(source.names.slot, metadata=metadata))


def hint_unknown(context: StepContext, source: CdcSource, tables: Iterable[TableName]) -> None:
    """Warn about captured tables that the definitions lack, and refresh the list of tables and their locations for the next load."""
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger

    settings = slot_of(context, source).settings
    locations = {state.oid: state.location for state in Ledger(Lake(settings.lake)).tables().values() if state.followed}
    unknown = sorted({*tables} - {known.table for known in source.tables})
    if unknown:
        listed = printable(", ".join(map(str, unknown)))
        context.log.warning(f"Captured, but not yet among the definitions: {listed}. Reload the code location to see them as assets.")
    if not unknown and all(locations.get(known.oid, known.location) == known.location for known in source.tables):
        return
    try:
        refresh(settings, locations)
    except PgwalError as error:
        context.log.warning(f"The tables' state was not refreshed: {error}")

"""Windows as Dagster's partitions: those of the jobs, and those of each raw table, which are the windows in which it has rows.

Dagster marks an asset orange that lacks a partition, so a raw table has no partition for a window without rows of it. It also lists all
partitions at many places, so only the newest are kept.
"""

from collections.abc import Collection, Iterable, Sequence

import dagster as dg

from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.partitions import MOST_WINDOWS
from pgwal_pipeline.pipeline.reports import WindowReport
from pgwal_pipeline.values.relation import TableName

_AT_ONCE = 100


def register(instance: dg.DagsterInstance, source: CdcSource, windows: Sequence[WindowReport]) -> None:
    """Add partitions for windows that were drained, and delete those that are too old by now."""
    if not windows:
        return
    instance.add_dynamic_partitions(source.windows_name, [window.key for window in windows])
    keys = sorted(instance.get_dynamic_partitions(source.windows_name))
    oldest = keys[-MOST_WINDOWS:][0]
    for key in keys[:-MOST_WINDOWS]:
        instance.delete_dynamic_partition(source.windows_name, key)
    found: dict[TableName, list[str]] = {}
    for window in windows:
        for table, counts in window.tables.items():
            if counts.rows and window.key >= oldest:
                found.setdefault(table, []).append(window.key)
    for table, own in found.items():
        name = _name(source, table)
        instance.add_dynamic_partitions(name, own)
        _delete_oldest(instance, name, oldest)


def _delete_oldest(instance: dg.DagsterInstance, name: str, oldest: str) -> None:
    """Delete the partitions before `oldest`. They come first, as windows are added in their order."""
    while True:
        first = instance.get_paginated_dynamic_partitions(name, limit=_AT_ONCE, ascending=True).results
        gone = [key for key in first if key < oldest]
        for key in gone:
            instance.delete_dynamic_partition(name, key)
        if len(gone) < _AT_ONCE:
            return


def delete(
    instance: dg.DagsterInstance, source: CdcSource, tables: Iterable[TableName], keys: Collection[str], older_than: str | None
) -> int:
    """Delete the partitions `keys`, and those before `older_than`, of the jobs and of these tables; return how many windows went."""

    def gone(name: str) -> list[str]:
        registered = instance.get_dynamic_partitions(name)
        return [key for key in registered if key in keys or (older_than is not None and key < older_than)]

    windows = gone(source.windows_name)
    for key in windows:
        instance.delete_dynamic_partition(source.windows_name, key)
    for name in sorted({_name(source, table) for table in tables}):
        for key in gone(name):
            instance.delete_dynamic_partition(name, key)
    return len(windows)


def _name(source: CdcSource, table: TableName) -> str:
    name = source.windows_of(table).name
    assert name is not None
    return name

"""Partitions for assets built on `raw`: by window of the write-ahead log, or by day of the commit."""

from datetime import date, datetime

import dagster as dg

MOST_WINDOWS = 2000
"""How many windows are partitions in Dagster, the newest. The lake has those of PGWAL_RAW_RETENTION, which may be many more."""


def wal_windows(source: str = "", table: str | None = None) -> dg.DynamicPartitionsDefinition:
    """Return the windows of the write-ahead log as partitions: one for each that was drained, its key the end LSN as 16 hex digits.

    With `table` (schema.table, each part quoted as `quote_ident` does) those in which this table has rows, which its raw asset has. Dagster
    takes partitions with one key in both for the same window. `source` is the `name` of the component; empty for the only one. The newest
    `MOST_WINDOWS` are kept, and of these the table's.
    """
    name = f"{source}_wal_windows" if source else "wal_windows"
    return dg.DynamicPartitionsDefinition(name=name if table is None else f"{name}/{table}")


def commit_days(start: str | date) -> dg.DailyPartitionsDefinition:
    """Return a partition for each day (UTC) since `start` (YYYY-MM-DD), the present one included. Combine it with `every_window`.

    A row of raw belongs to the day of its `_pgwal_committed_at`.
    """
    begin = datetime.fromisoformat(start) if isinstance(start, str) else datetime(start.year, start.month, start.day)
    return dg.DailyPartitionsDefinition(start_date=begin, timezone="UTC", end_offset=1)


def every_window() -> dg.PartitionMapping:
    """Return the mapping for a dependency of `commit_days` on a raw asset: the changes of a day may be in any window."""
    return dg.AllPartitionMapping()

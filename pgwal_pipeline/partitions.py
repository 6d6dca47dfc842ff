"""Partitions for assets built on `raw`: by window of the write-ahead log, or by day of the commit."""

from datetime import date, datetime

import dagster as dg


def wal_windows(source: str = "") -> dg.DynamicPartitionsDefinition:
    """Return the partitions that every raw asset has: one for each window that was drained, its key the end LSN as 16 hex digits.

    `source` is the `name` of the component; empty for the only one. An asset with these partitions depends on a raw table window by window.
    """
    return dg.DynamicPartitionsDefinition(name=f"{source}_wal_windows" if source else "wal_windows")


def commit_days(start: str | date) -> dg.DailyPartitionsDefinition:
    """Return a partition for each day (UTC) since `start` (YYYY-MM-DD), the present one included. Combine it with `every_window`.

    A row of raw belongs to the day of its `_pgwal_committed_at`.
    """
    begin = datetime.fromisoformat(start) if isinstance(start, str) else datetime(start.year, start.month, start.day)
    return dg.DailyPartitionsDefinition(start_date=begin, timezone="UTC", end_offset=1)


def every_window() -> dg.PartitionMapping:
    """Return the mapping for a dependency of `commit_days` on a raw asset: the changes of a day may be in any window."""
    return dg.AllPartitionMapping()

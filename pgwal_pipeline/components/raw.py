"""The drain as assets: one step reads the slot once and materializes every raw table. Each window is a partition."""

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgwal_pipeline.components.events import materialization, visible_metadata
from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.observations import observe_tables
from pgwal_pipeline.components.requests import SOURCE_READING, SourceReading
from pgwal_pipeline.components.source import CdcSource, StepContext, hint_unknown, observe_slot, slot_of, spark_of
from pgwal_pipeline.components.steps import Step
from pgwal_pipeline.components.windows import register
from pgwal_pipeline.messages import progress
from pgwal_pipeline.pipeline.reports import DrainReport, NewestCommit, TableCounts, WindowReport
from pgwal_pipeline.values.lsn import format_lsn, parse_window_key
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pgwal_pipeline.components.resources import ReplicationSlot
    from pgwal_pipeline.lake.ledger import Ledger


def build_drain(source: CdcSource) -> Step:
    """Build the step `drain_wal`, which materializes the raw tables that have rows in its window.

    It reads all tables whatever a run selects: the slot is confirmed for all of them at once. They are materialized only after everything
    is durable and the slot is confirmed.
    """

    def work(context: StepContext, _: object) -> Iterator[dg.MaterializeResult]:
        if context.run.job_name == source.named("sync"):
            spark_of(context, source).start()  # the publish is next
        window = _drain_and_report(context, source)
        if window is not None:
            yield from _results(source, window)

    return Step(
        source,
        "drain_wal",
        "materialize_raw",
        "Reads the slot once, up to the window's end, into every raw table, then confirms the slot.",
        frozenset({source.slot_key, source.spark_key}),
        work,
        asset=lambda known: source.assets.raw(known).replace_attributes(partitions_def=source.windows_of(known.table)),
        partitions=source.windows,
        idle={"dagster/partition_row_count": 0},
    )


def _drain_and_report(context: StepContext, source: CdcSource) -> WindowReport | None:
    """Drain the run's window; report the numbers, other windows and unknown tables, which are not the step's own output.

    Returns the run's own window; None if nothing was read for it because the slot was only just created.
    """
    key = context.partition_key
    slot = slot_of(context, source)
    with at_work(context, source.slot_tags):
        report, reading = _drain(context, slot, key)
    report_windows(context, source, report, own_key=key)
    hint_unknown(context, source, report.tables)
    observe_tables(context, source, _newest(report))
    more = {} if reading is None else {SOURCE_READING: dg.MetadataValue.json(asdict(reading))}
    observe_slot(context, source, _numbers(report), report.to_json(), more)
    return next((window for window in report.windows if window.key == key), None)


def report_windows(context: StepContext, source: CdcSource, report: DrainReport, *, own_key: str | None = None) -> None:
    """Add partitions for a drain's windows and log a materialization of each raw table that has rows in them.

    The tables of the window `own_key` are left out: the step yields them itself.
    """
    register(context.instance, source, report.windows)
    others = [window for window in report.windows if window.key != own_key]
    for window in others:
        for result in _results(source, window):
            context.log_event(materialization(result, window.key))


def _drain(context: StepContext, slot: "ReplicationSlot", key: str) -> tuple[DrainReport, SourceReading | None]:
    """Return the report for the run's window: drained now, or taken from the ledger if it was drained before.

    The second value is what was read of the source before draining; None if nothing was drained. Raises Failure for a window that cannot be
    drained: raw holds its WAL in other windows, or the source has not written it yet.
    """
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger
    from pgwal_pipeline.pipeline.drain import window_report

    try:
        end = parse_window_key(key)
    except ValueError as error:
        raise dg.Failure(f"{error}.", allow_retries=False) from None
    ledger = Ledger(Lake(slot.settings.lake))
    done = next((window for window in ledger.windows(end - 1) if window.key == key and window.state == "complete"), None)
    frontier = ledger.frontier()
    if frontier is not None and end <= frontier:
        # A run that died may have left the slot unconfirmed, and the sensor asks for this window until the slot is confirmed.
        settled = slot.drain(frontier, progress.for_run(context.log))
        if done is not None:
            context.log.info(f"Window {key} was drained before; nothing is read again.")
            report = window_report(done)
            others = [window for window in settled.windows if window.key != key]
            return replace(settled, windows=(report, *others), tables={**settled.tables, **report.tables}), None
        if _drained_meanwhile(context, ledger, end):
            context.log.info(f"Another drain has read past the end of window {key} since this run was requested; nothing is left to read.")
            return settled, None
        raise dg.Failure(
            f"Window {key} cannot be drained: raw holds everything up to {format_lsn(frontier)} already, in other windows. "
            "Run the sync job for a new window instead; the lag sensor does so by itself.",
            allow_retries=False,
        )
    reading, at = slot.lag(), time.time()
    if end > reading.flush_lsn:
        raise dg.Failure(
            f"Window {key} ends at {format_lsn(end)}, but the source has written only up to {format_lsn(reading.flush_lsn)}; "
            "choose an end that is not beyond that.",
            allow_retries=False,
        )
    if frontier is None:
        context.log.info("The lake is empty: the slot is created now, and the first window begins there.")
    return slot.drain(end, progress.for_run(context.log)), SourceReading(reading.snapshot, reading.insert_lsn, at)


def _drained_meanwhile(context: StepContext, ledger: "Ledger", end: int) -> bool:
    """Return whether the window that contains `end` was drained after this run was requested."""
    record = context.instance.get_run_record_by_id(context.run.run_id)
    into = next((window for window in ledger.windows(end - 1) if window.start_lsn < end), None)
    return record is not None and into is not None and into.at is not None and into.at >= record.create_timestamp


def _newest(report: DrainReport) -> dict[TableName, NewestCommit | None]:
    """Return the tables with rows in the report's windows, each with its newest commit."""
    return {table: window.newest.get(table) for window in report.windows for table, counts in window.tables.items() if counts.rows}


def _results(source: CdcSource, window: WindowReport) -> Iterator[dg.MaterializeResult]:
    """Yield a materialization of each raw table that has rows in the window.

    Its data version is the window's range of LSNs: what raw has of a range never changes.
    """
    version = dg.DataVersion(f"{window.start_lsn:016X}-{window.end_lsn:016X}")
    for table, counts in sorted(window.tables.items()):
        if counts.rows:
            metadata = _metadata(window, table, counts)
            yield dg.MaterializeResult(asset_key=source.names.raw(table), metadata=metadata, data_version=version)


def _metadata(window: WindowReport, table: TableName, counts: TableCounts) -> dict[str, Any]:
    rare = ("truncates", "key_changes")
    numbers = {f"pgwal/{name}": value for name, value in counts.to_json().items() if name != "rows" and (value or name not in rare)}
    edges = {"pgwal/start_lsn": format_lsn(window.start_lsn), "pgwal/end_lsn": format_lsn(window.end_lsn)}
    return {"dagster/partition_row_count": counts.rows, **numbers, **edges, **visible_metadata(window.newest.get(table), window.at)}


def _numbers(report: DrainReport) -> dict[str, float | int]:
    return {
        "lag_before_bytes": report.lag_before,
        "lag_after_bytes": report.lag_after,
        "windows": len(report.windows),
        "transactions": sum(window.transactions for window in report.windows),
        "changes": report.changes,
        "raw_rows": sum(counts.rows for counts in report.tables.values()),
        "wal_bytes": sum(window.bytes for window in report.windows),
        **{f"{stage}_seconds": round(seconds, 3) for stage, seconds in report.seconds.items()},
    }

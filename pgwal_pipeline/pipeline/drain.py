"""The drain: everything that was committed up to one LSN goes from the slot to the lake in a single pass over the WAL."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import psycopg

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.errors import SlotLost, SourceUnavailable, TableError
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Window
from pgwal_pipeline.lake.raw import commit_window
from pgwal_pipeline.lsn import format_lsn, window_key
from pgwal_pipeline.pipeline import bootstrap as bootstraps
from pgwal_pipeline.pipeline.bootstrap import Attached, attach
from pgwal_pipeline.pipeline.looks import Streamed, looks, next_xid, review_tables
from pgwal_pipeline.pipeline.reports import DrainReport, TableCounts, WindowReport
from pgwal_pipeline.pipeline.window import read_window
from pgwal_pipeline.postgres import catalog, slot
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.progress import Progress
from pgwal_pipeline.relation import Relation, TableName
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.xid import Snapshot

_CONFIRM_TIMEOUT = 10.0  # seconds for the server to take a confirmation
_ANSWER_EVERY = 0.5  # seconds between looks at whether the server wants an answer


def bootstrap(settings: Settings, *, progress: Progress) -> Attached:
    """Make what is missing on the source (publication, slot) and record its tables, reading nothing."""
    with slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout), connect(settings.dsn) as conn:
        return attach(settings, conn, warn=progress.warn)


def renew(settings: Settings, *, progress: Progress) -> None:
    """The way on after a gap: make a lost or missing slot anew, and have every table read again."""
    with slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout), connect(settings.dsn) as conn:
        bootstraps.renew(settings, conn, warn=progress.warn)


def next_target(settings: Settings) -> int:
    """The LSN that a drain started now should reach: the last one the source has flushed (replayed, on a standby)."""
    with connect(settings.dsn) as conn:
        return catalog.flush_lsn(conn)


def drain(settings: Settings, *, end_lsn: int | None = None, progress: Progress) -> DrainReport:
    """Bring raw up to `end_lsn`, by default the source's flush position now, as one window, and confirm the slot to there.

    Every transaction with a commit LSN below the window's end is in raw afterwards, once, and no other. A window that a crash left half
    committed is completed first. Raises SlotBusy when another drain holds the slot for longer than PGWAL_BUSY_TIMEOUT.
    """
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        progress.warn(text)

    with ExitStack() as stack:
        stack.enter_context(slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout))
        conn = stack.enter_context(connect(settings.dsn))
        attached = attach(settings, conn, warn=warn)
        for table, reason in sorted(attached.skipped.items()):
            warn(f"Table {table} is left out: {reason}.")
        reports = [window_report(window) for window in recover(lake, ledger)]
        frontier = ledger.frontier()
        assert frontier is not None
        end = catalog.flush_lsn(conn) if end_lsn is None else end_lsn
        ended = Snapshot.parse(catalog.running_transactions(conn))
        lag_before = slot.lag(conn, settings.slot)
        if end > frontier or attached.slot.confirmed_flush_lsn < frontier:
            started = time.perf_counter()
            stream = stack.enter_context(
                ReplicationStream.open(settings.dsn, settings.slot, settings.publication, frontier, server_version=attached.server_version)
            )
            window = (
                _drain_window(settings, ledger, conn, attached, ended, stream, frontier, end, warn, progress) if end > frontier else None
            )
            failpoints.hit("drain.before_confirm")
            stream.confirm(max(end, frontier))
            _await_confirmation(conn, settings.slot, max(end, frontier))
            failpoints.hit("drain.after_confirm")
            if window is not None:
                reports.append(_report(window, time.perf_counter() - started))
        lag_after = slot.lag(conn, settings.slot)
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds.update(report.seconds)
    tables = dict.fromkeys(attached.tables, TableCounts()) | {
        table: counts for report in reports for table, counts in report.tables.items()
    }
    return DrainReport(
        windows=tuple(reports),
        tables=tables,
        warnings=tuple(warnings),
        lag_before=lag_before,
        lag_after=lag_after,
        seconds=dict(seconds),
    )


def recover(lake: Lake, ledger: Ledger) -> tuple[Window, ...]:
    """Complete the windows that were prepared when a process died: their files are durable, so they are named in raw and done."""
    windows = ledger.prepared()
    for window in windows:
        _complete(lake, ledger, window)
    return windows


def _drain_window(
    settings: Settings,
    ledger: Ledger,
    conn: psycopg.Connection[Any],
    attached: Attached,
    ended: Snapshot,
    stream: ReplicationStream,
    start: int,
    end: int,
    warn: Callable[[str], None],
    progress: Progress,
) -> Window:
    lake = ledger.lake
    read = read_window(
        stream,
        lake,
        _describe_on(conn),
        start_lsn=start,
        end_lsn=end,
        memory_budget=settings.memory_budget,
        progress=progress,
    )
    failpoints.hit("drain.after_files")
    streamed = Streamed({relation.oid: relation for relation in read.relations}, read.truncated, ended)
    found = looks(conn, settings.publication)
    again = review_tables(ledger, attached.tables, found, streamed, next_xid(conn), rewrites=settings.on_rewrite == "resnapshot")
    for table, reason in again.items():
        warn(f"Table {table}: {reason}.")
    _record_refused(ledger, read.refused)
    window = Window(
        key=window_key(end),
        slot=settings.slot,
        start_lsn=start,
        end_lsn=end,
        state="prepared",
        transactions=read.transactions,
        changes=read.changes,
        bytes=read.bytes,
        seconds=read.seconds,
        min_xid=read.min_xid,
        max_xid=read.max_xid,
        tables=read.writes,
    )
    started = time.perf_counter()
    with ThreadPoolExecutor(1, "pgwal-commit") as pool:
        commit = pool.submit(_commit, lake, ledger, window)
        while not wait([commit], _ANSWER_EVERY).done:
            stream.keep_alive()
        commit.result()
    return replace(window, seconds=read.seconds | {"write": read.seconds["write"] + time.perf_counter() - started})


def _commit(lake: Lake, ledger: Ledger, window: Window) -> None:
    """Make a window durable: from its ledger record on it is never read again, whatever happens to the commits that follow."""
    ledger.append_window(window)
    failpoints.hit("drain.after_prepared")
    _complete(lake, ledger, window)


def _complete(lake: Lake, ledger: Ledger, window: Window) -> None:
    commit_window(lake, window.key, window.tables)
    failpoints.hit("drain.before_complete")
    ledger.append_window(replace(window, state="complete"))


def _describe_on(conn: psycopg.Connection[Any]) -> Callable[[RelationMessage], Relation]:
    """The catalog's answer to a Relation message, asked on `conn` from whichever thread decodes."""
    lock = threading.Lock()

    def describe(message: RelationMessage) -> Relation:
        with lock:
            return catalog.describe(conn, message)

    return describe


def _record_refused(ledger: Ledger, refused: Iterable[TableError]) -> None:
    """Put tables whose changes could not be written in error: what this window had of them is only in the source now."""
    reasons = {error.table: str(error) for error in refused}
    if reasons:
        ledger.amend_tables(
            lambda known: [
                replace(state, state="error", reason=reasons[str(state.table)], generation=None, published=None)
                for state in known.values()
                if str(state.table) in reasons
            ]
        )


def _await_confirmation(conn: psycopg.Connection[Any], name: str, lsn: int) -> None:
    """Wait until the server has taken the confirmation; it is read back rather than trusted."""
    deadline = time.monotonic() + _CONFIRM_TIMEOUT
    while True:
        state = slot.inspect(conn, name)
        if state is None:
            raise SlotLost(f"Slot {name} was dropped while it was read; run `pgwal resnapshot --all` to make it anew.")
        if state.confirmed_flush_lsn >= lsn:
            return
        if time.monotonic() > deadline:
            raise SourceUnavailable(
                f"The source did not take the confirmation of slot {name} up to {format_lsn(lsn)} within {_CONFIRM_TIMEOUT:.0f} s; "
                f"the rows are safe in the lake and the next drain goes on from there."
            )
        time.sleep(0.02)


def _report(window: Window, seconds: float) -> WindowReport:
    tables = {
        TableName.parse(write.table): TableCounts(
            rows=write.rows,
            inserts=write.inserts,
            updates=write.updates,
            deletes=write.deletes,
            truncates=write.truncates,
            key_changes=write.key_changes,
        )
        for write in window.tables
    }
    return WindowReport(
        key=window.key,
        start_lsn=window.start_lsn,
        end_lsn=window.end_lsn,
        transactions=window.transactions,
        changes=window.changes,
        bytes=window.bytes,
        seconds=dict(window.seconds) | {"drain": seconds},
        tables=tables,
    )


def window_report(window: Window) -> WindowReport:
    """A window as the ledger has it, for a run that finds its work already done."""
    return _report(window, window.seconds.get("drain", 0.0))

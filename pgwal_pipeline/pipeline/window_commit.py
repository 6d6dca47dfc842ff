"""Read windows for a drain and commit them: the tables are reviewed, the ledger takes the windows, and raw names their files."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from deltalake import Schema

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.lake.ledger import Ledger, TableState, Window
from pgwal_pipeline.lake.locations import Locations
from pgwal_pipeline.lake.raw import commit_window
from pgwal_pipeline.lake.stream_facts import Read, Refusal, StreamFacts
from pgwal_pipeline.messages.errors import SlotBusy, TableError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.alterations import CatalogEntry
from pgwal_pipeline.pipeline.table_review import catalog_entries, next_xid, review_tables
from pgwal_pipeline.pipeline.tally import WindowRead, changes_in
from pgwal_pipeline.pipeline.window import StreamBroke, WindowLimits, read_window
from pgwal_pipeline.postgres import catalog
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn, window_key
from pgwal_pipeline.values.protection import NO_PROTECTION, Protection
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline.values.xid import Snapshot


@dataclass(frozen=True)
class DrainContext:
    """What the steps of one drain share. `warn` takes warnings for the user, `progress` the progress."""

    settings: Settings
    ledger: Ledger
    conn: Connection
    server_version: int
    warn: Callable[[str], None]
    progress: Progress


def window_of(slot: str, read: WindowRead) -> Window:
    """Return a window that was read as the ledger takes it."""
    return Window(
        key=window_key(read.end_lsn),
        slot=slot,
        start_lsn=read.start_lsn,
        end_lsn=read.end_lsn,
        state="prepared",
        transactions=read.transactions,
        changes=read.changes,
        bytes=read.bytes,
        seconds=read.seconds,
        min_xid=read.min_xid,
        max_xid=read.max_xid,
        marks=read.marks,
        tables=read.writes,
    )


def read_from(
    ctx: DrainContext,
    stream: ReplicationStream,
    limits: tuple[int, int],
    memory_budget: int,
    *,
    stage: str = "drain",
    expected: Mapping[str, Schema] | None = None,
    portions: WindowLimits | None = None,
) -> WindowRead:
    """Read the WAL between two LSNs as `read_window` does, with the tables that the ledger has now."""
    return read_window(
        stream,
        ctx.ledger.lake,
        Locations.of(ctx.ledger.tables()),
        describe_on(ctx.conn, ctx.settings.protection),
        start_lsn=limits[0],
        end_lsn=limits[1],
        memory_budget=memory_budget,
        largest_row=ctx.settings.largest_row,
        protection=ctx.settings.protection,
        progress=ctx.progress,
        stage=stage,
        expected=expected,
        portions=portions,
    )


def read_ahead(
    ctx: DrainContext,
    stream: ReplicationStream,
    limits: tuple[int, int],
    memory_budget: int,
    *,
    stage: str = "drain",
    expected: Mapping[str, Schema] | None = None,
) -> Read:
    """Read one window of a plan, for the ledger to record. If the stream breaks, record what came whole and raise StreamBroke."""
    try:
        read = read_from(ctx, stream, limits, memory_budget, stage=stage, expected=expected)
    except StreamBroke as broke:
        keep_what_came(ctx.ledger, ctx.settings.slot, broke)
        raise
    return Read(window_of(ctx.settings.slot, read), read.facts)


def keep_what_came(ledger: Ledger, slot: str, broke: StreamBroke) -> None:
    """Record what came whole before a stream broke, as a shorter window that has been read; see `Ledger.refined`."""
    if broke.kept is not None:
        ledger.record_read(Read(window_of(slot, broke.kept), broke.kept.facts))


def review(
    ctx: DrainContext, before: Mapping[TableName, CatalogEntry], facts: StreamFacts, ended: Snapshot | None
) -> dict[TableName, CatalogEntry]:
    """Record what became of the tables, before the windows that were read are committed; returns the catalog entries now.

    `ended` sees every transaction that committed before the windows' end, and maybe some that committed just after it. It is None if the
    stream goes on, since it may then still have the message that explains a change.
    """
    found = catalog_entries(ctx.conn, ctx.settings.publication, ctx.settings.protection)
    rewrites = ctx.settings.on_rewrite == "resnapshot"
    news = review_tables(ctx.ledger, before, found, facts, ended, next_xid(ctx.conn), rewrites=rewrites)
    for table, reason in news.items():
        ctx.warn(f"Table {table}: {reason}.")
    if facts.refused:
        _record_refusals(ctx, facts.refused)
        failpoints.hit("drain.after_refusal")
    return found


def _record_refusals(ctx: DrainContext, refused: Mapping[str, Refusal]) -> None:
    """Record the tables that the windows left out, before the windows are committed without their changes."""
    first_new_xid = next_xid(ctx.conn)
    news: dict[str, str] = {}

    def decide(known: Mapping[TableName, TableState]) -> list[TableState]:
        states = [
            _refused(state, refused[str(state.location)], first_new_xid)
            for state in known.values()
            if str(state.location) in refused and state.followed
        ]
        news.clear()
        news.update({str(state.table): state.reason or "" for state in states})
        return states

    ctx.ledger.amend_tables(decide)
    for table, reason in news.items():
        ctx.warn(f"Table {table} is left out: {reason}")


def _refused(state: TableState, refusal: Refusal, first_new_xid: int) -> TableState:
    """Return the state of a table that the windows left out, and which therefore has to be read again."""
    if refusal.oid == state.oid:
        return state.with_gap(refusal.stage, gap_reason(state.table, refusal.stage, refusal.lsn, refusal.reason), refusal.lsn)
    unread = replace(state, generation=None, reading=None, published=None)
    reason = f"it is read again, since an earlier table at its location was left out: {refusal.reason}"
    return replace(unread, state="pending", reason=reason, joined_xid=first_new_xid)


def gap_reason(table: TableName, stage: str, lsn: int, sentence: str) -> str:
    """Return why a table is left out of raw: what failed and where, and how to fix it."""
    return (
        f"{sentence} (at {stage}, {format_lsn(lsn)}; its changes from there on are not in raw: "
        f"fix the cause, then run `pgwal resnapshot '{table}'`.)"
    )


def commit_windows(ledger: Ledger, windows: Sequence[Window], warn: Callable[[str], None]) -> tuple[Window, ...]:
    """Commit windows. They are recorded as prepared all at once: from then on they are durable and never read again.

    Returns them as complete, without the tables that could not be committed by their own fault.
    """
    ledger.append_windows(windows)
    failpoints.hit("drain.after_prepared")
    return _complete(ledger, windows, warn)


def recover(ledger: Ledger, warn: Callable[[str], None]) -> tuple[Window, ...]:
    """Complete the windows that an earlier process left prepared, and return them: raw only has to name their files."""
    windows = ledger.prepared()
    return _complete(ledger, windows, warn) if windows else ()


def _complete(ledger: Ledger, windows: Sequence[Window], warn: Callable[[str], None]) -> tuple[Window, ...]:
    """Name the windows' files in raw, and record the windows as complete.

    A table that fails by its own fault is first recorded with its gap, and is left out of the windows from there on.
    """
    failed: dict[str, TableError] = {}
    done = []
    for window in windows:
        wanted = tuple(write for write in window.tables if write.path not in failed)
        found = commit_window(ledger.lake, window.key, wanted)
        if found:
            failed |= found
            _record_uncommitted(ledger, found, window.start_lsn, warn)
            failpoints.hit("drain.after_uncommitted")
        kept = tuple(write for write in wanted if write.path not in failed)
        changes = window.changes if len(kept) == len(window.tables) else changes_in(kept)
        done.append(replace(window, state="complete", tables=kept, changes=changes, at=window.at or datetime.now(UTC)))
    failpoints.hit("drain.before_complete")
    ledger.append_windows(done)
    return tuple(done)


def _record_uncommitted(ledger: Ledger, failed: Mapping[str, TableError], lsn: int, warn: Callable[[str], None]) -> None:
    def decide(known: Mapping[TableName, TableState]) -> list[TableState]:
        return [
            state.with_gap("commit", gap_reason(state.table, "commit", lsn, str(error)), lsn)
            for state in known.values()
            if state.followed and (error := failed.get(ledger.lake.raw(state.location))) is not None
        ]

    ledger.amend_tables(decide)
    for error in failed.values():
        warn(f"{error} The table is left out from {format_lsn(lsn)} on.")


def open_stream(ctx: DrainContext, start_lsn: int) -> ReplicationStream:
    """Return the slot's stream from `start_lsn` on; see `slot_stream`."""
    return slot_stream(ctx.settings, start_lsn, ctx.server_version)


def slot_stream(settings: Settings, start_lsn: int, server_version: int) -> ReplicationStream:
    """Return the slot's stream from `start_lsn` on. Raises SlotBusy if another walsender holds it for PGWAL_BUSY_TIMEOUT."""
    deadline = time.monotonic() + settings.busy_timeout
    while True:
        try:
            return ReplicationStream.open(settings.dsn, settings.slot, settings.publication, start_lsn, server_version=server_version)
        except SlotBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def describe_on(conn: Connection, protection: Protection = NO_PROTECTION) -> Callable[[RelationMessage], Relation | None]:
    """Return a function that reads a Relation message's table from the catalog, on `conn`, from any thread.

    It returns the table as its options make it, and None for a table that these do not fit.
    """
    lock = threading.Lock()

    def describe(message: RelationMessage) -> Relation | None:
        with lock:
            found = catalog.describe(conn, message)
        return None if protection.misused(found) is not None else protection.relation(found)

    return describe

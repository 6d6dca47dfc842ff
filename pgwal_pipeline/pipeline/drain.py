"""Drain the slot: bring every transaction that was committed up to one LSN into the lake, in a single pass over the WAL."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Plan, Window
from pgwal_pipeline.lake.records import TableWrite
from pgwal_pipeline.messages.errors import ChangeNotSent, FileGone, PublicationMissing, SlotLost, SourceUnavailable
from pgwal_pipeline.messages.progress import Noted, Progress
from pgwal_pipeline.pipeline import bootstrap as bootstraps
from pgwal_pipeline.pipeline import catch_up
from pgwal_pipeline.pipeline.alterations import CatalogEntry
from pgwal_pipeline.pipeline.bootstrap import Attached, attach, note_gap
from pgwal_pipeline.pipeline.catch_up import DrainRate, falling_behind
from pgwal_pipeline.pipeline.committer import Committer
from pgwal_pipeline.pipeline.reports import DrainReport, NewestCommit, TableCounts, WindowReport
from pgwal_pipeline.pipeline.tally import WindowRead
from pgwal_pipeline.pipeline.window import StreamBroke, WindowLimits
from pgwal_pipeline.pipeline.window_commit import DrainContext, keep_what_came, open_stream, read_from, recover
from pgwal_pipeline.postgres import catalog, slot, slot_state
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.xid import Snapshot

_CONFIRM_TIMEOUT = 10.0  # seconds for the server to take a confirmation
_PATIENCE = 60.0  # seconds without progress after which a drain gives up a source that cannot be reached
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before the second attempt, doubled for each one after it
_ANSWER_EVERY = 0.5  # seconds between checks whether the server wants an answer


def bootstrap(settings: Settings, *, progress: Progress) -> Attached:
    """Create the publication and slot if they are missing, and record the tables in the ledger. Reads no changes and no rows."""
    with slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout), connect(settings.dsn) as conn:
        return attach(settings, conn, warn=progress.warn)


def renew(settings: Settings, *, progress: Progress) -> None:
    """Recover from a gap: create a lost or missing slot again, and have every table read again."""
    with slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout), connect(settings.dsn) as conn:
        bootstraps.renew(settings, conn, warn=progress.warn)


def next_target(settings: Settings) -> int:
    """Return the LSN that a drain started now should reach: the last one that the source has flushed (on a standby: replayed)."""
    with connect(settings.dsn) as conn:
        return catalog.flush_lsn(conn)


def drain(settings: Settings, *, end_lsn: int | None = None, progress: Progress) -> DrainReport:
    """Bring raw up to `end_lsn`, by default the source's flush position now, and confirm the slot up to there.

    Afterwards raw holds every transaction with a commit LSN below the last window's end exactly once, and no other. Work that a crash left
    unfinished is completed first, so the last window may end past `end_lsn`. A backlog longer than PGWAL_CATCHUP_THRESHOLD is read as
    several windows side by side. A broken connection is made again, until there has been no progress for a minute.

    Raises SlotBusy if another drain holds the slot for longer than PGWAL_BUSY_TIMEOUT, and any error that keeps the drain from its end.
    """
    noted, patience, done = Noted(progress), _Patience(), _Done()
    target: _Target | None = None

    def attempt() -> DrainReport:
        nonlocal target
        with _attached(settings, noted, again=target is not None) as (ctx, attached):
            for window in (*attached.recovered, *_recovered(ctx, attached)):
                done.add(window_report(window), window.seconds)
            frontier = ctx.ledger.frontier()
            assert frontier is not None
            target = target or _choose_target(ctx, frontier, end_lsn)
            patience.reached(frontier)
            lag_after = _drain(ctx, attached, frontier, target, done)
            return _report_of(attached, done, (target.lag, lag_after), noted.warnings)

    while True:
        try:
            return attempt()
        except SourceUnavailable as error:
            pause = patience.pause(error) if target is not None else None  # do not wait for a source that was never reached
            if pause is None:
                raise
            noted.warn(f"{error} {_kept(error)} The drain goes on from there in {pause:g} s.")
            time.sleep(pause)


def _kept(error: SourceUnavailable) -> str:
    """Return a sentence about the transactions that came whole before the connection broke and are not read again."""
    received: list[Window | WindowRead] = []
    if isinstance(error, StreamBroke):
        received = [*error.complete, *([] if error.kept is None else [error.kept])]
    if not received:
        return "No transaction had come whole."
    rows = sum(write.rows for window in received for write in (window.tables if isinstance(window, Window) else window.writes))
    return (
        f"What came whole is kept: {rows:,} rows of {sum(window.transactions for window in received):,} transactions, up to "
        f"{format_lsn(received[-1].end_lsn)}, read in {sum(window.seconds['drain'] for window in received):.1f} s."
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The target of a drain: `end_lsn`, and `ended`, the `pg_current_snapshot()` of when it was chosen.

    `began` is the lake's frontier at that moment, `lag` the slot's lag in bytes.
    """

    end_lsn: int
    ended: str
    began: int
    lag: int


def _choose_target(ctx: DrainContext, frontier: int, end_lsn: int | None) -> _Target:
    """Choose the target. The snapshot is taken after the end LSN, so it sees every transaction that committed before that LSN."""
    end = catalog.flush_lsn(ctx.conn) if end_lsn is None else end_lsn
    ended = catalog.running_transactions(ctx.conn)
    return _Target(end, ended, frontier, slot.lag(ctx.conn, ctx.settings.slot))


@dataclass
class _Done:
    """What a drain has done so far, over all of its connections: window reports by key, and seconds by stage."""

    reports: dict[str, WindowReport] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, report: WindowReport, seconds: Mapping[str, float]) -> None:
        """Add a window, unless it has been added already."""
        if report.key not in self.reports:
            self.reports[report.key] = report
            self.seconds.update(seconds)


class _Patience:
    """Decides how long to wait before a broken connection is made again, and when to give up."""

    def __init__(self) -> None:
        self._frontier = -1
        self._since = 0.0
        self._failures = 0

    def reached(self, frontier: int) -> None:
        """Reset the count of failures if the lake's frontier has moved."""
        if frontier > self._frontier:
            self._frontier, self._failures = frontier, 0

    def pause(self, error: SourceUnavailable) -> float | None:
        """Return the seconds to wait before the next attempt; None to give up, since there has been no progress for too long."""
        now = time.monotonic()
        if not self._failures or (isinstance(error, StreamBroke) and (error.kept is not None or error.complete)):
            self._since, self._failures = now, 0
        if now - self._since > _PATIENCE:
            return None
        self._failures += 1
        return min(_LONGEST_PAUSE, _PAUSE * 2 ** (self._failures - 1))


@contextmanager
def _attached(settings: Settings, noted: Noted, *, again: bool) -> Iterator[tuple[DrainContext, Attached]]:
    """Hold the slot's lock and a connection, once source and lake are found to belong together; with `again` they just were."""
    with slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout), connect(settings.dsn) as conn:
        attached = attach(settings, conn, warn=noted.warn, proven=again)
        for table, reason in sorted(attached.skipped.items()):
            noted.warn(f"Table {table} is left out: {reason}.")
        yield DrainContext(settings, Ledger(Lake(settings.lake)), conn, attached.server_version, noted.warn, noted), attached


def _drain(ctx: DrainContext, attached: Attached, frontier: int, target: _Target, done: _Done) -> int:
    """Drain to the target on one connection and return the slot's lag afterwards, in bytes. `done` has what was done, also on an error."""
    flushed, started = catalog.flush_lsn(ctx.conn), time.perf_counter()
    try:
        _carry_out(ctx, attached, _stretches(ctx, attached, frontier, target), done)
    except (PublicationMissing, ChangeNotSent) as loss:
        note_gap(ctx.ledger, loss)
        raise
    for window in ctx.ledger.windows(target.began):
        # A window may be complete though its connection broke before the slot was confirmed.
        if window.start_lsn < window.end_lsn:
            done.add(window_report(window), window.seconds)
    state = slot_state.existing(ctx.conn, ctx.settings.slot)
    pace = DrainRate(
        drained=max([frontier, *(report.end_lsn for report in done.reports.values())]) - frontier,
        written=catalog.flush_lsn(ctx.conn) - flushed,
        seconds=time.perf_counter() - started,
        left=state.lag_bytes,
        safe=state.safe_wal_size,
    )
    if (behind := falling_behind(ctx.settings.slot, pace, ctx.settings.catchup_threshold)) is not None:
        ctx.warn(behind)
    return state.lag_bytes


def _report_of(attached: Attached, done: _Done, lags: tuple[int, int], warnings: tuple[str, ...]) -> DrainReport:
    reports = sorted(done.reports.values(), key=lambda report: report.start_lsn)
    tables: dict[TableName, TableCounts] = dict.fromkeys(attached.tables, TableCounts())
    for report in reports:
        for table, counts in report.tables.items():
            tables[table] = tables.get(table, TableCounts()) + counts
    return DrainReport(
        windows=tuple(reports),
        tables=tables,
        warnings=warnings,
        lag_before=lags[0],
        lag_after=lags[1],
        seconds=dict(done.seconds),
    )


def _recovered(ctx: DrainContext, attached: Attached) -> tuple[Window, ...]:
    """Complete the windows that an earlier drain prepared. If files are gone that the slot has not passed, plan to read them again."""
    try:
        return recover(ctx.ledger, ctx.warn)
    except FileGone as gone:
        windows = ctx.ledger.prepared()
        if attached.slot.confirmed_flush_lsn > windows[0].start_lsn:
            raise
        ctx.warn(f"{gone} That is done now.")
        ctx.ledger.record_plan(
            Plan(windows[0].start_lsn, tuple(window.end_lsn for window in windows), catalog.running_transactions(ctx.conn))
        )
        ctx.ledger.take_back(windows)
        return ()


@dataclass(frozen=True, slots=True)
class _Stretch:
    """WAL to be read from `start_lsn` to `end_lsn`: in the windows of `plan` side by side, or on one stream if that is None.

    For an empty stretch the slot is only confirmed. `ended` is the text of the snapshot that `review` takes.
    """

    start_lsn: int
    end_lsn: int
    ended: str
    plan: Plan | None = None


def _stretches(ctx: DrainContext, attached: Attached, frontier: int, target: _Target) -> list[_Stretch]:
    """Return the stretches from frontier to target: first the rest of a catch-up that a crash interrupted, then the WAL after it."""
    stretches: list[_Stretch] = []
    left_over = ctx.ledger.plan()
    if left_over is not None:
        stretches.append(_Stretch(left_over.start_lsn, left_over.ends[-1], left_over.ended, left_over))
        frontier = left_over.ends[-1]
    if target.end_lsn > frontier:
        plan = catch_up.plan(ctx, frontier, target.end_lsn, target.ended)
        stretches.append(_Stretch(frontier, target.end_lsn, target.ended, plan))
    elif not stretches and attached.slot.confirmed_flush_lsn < frontier:
        stretches.append(_Stretch(frontier, frontier, target.ended))
    return stretches


def _carry_out(ctx: DrainContext, attached: Attached, stretches: Sequence[_Stretch], done: _Done) -> None:
    """Read the stretches one after another; each is committed and the slot confirmed before the next one begins."""
    entries: Mapping[TableName, CatalogEntry] = attached.tables
    for stretch in stretches:
        caught_up = None if stretch.plan is None else _side_by_side(ctx, stretch.plan, entries, done)
        if caught_up is None:
            _on_one_stream(ctx, stretch, entries, done)
        else:
            entries = caught_up


def _side_by_side(
    ctx: DrainContext, plan: Plan, entries: Mapping[TableName, CatalogEntry], done: _Done
) -> dict[TableName, CatalogEntry] | None:
    """Carry out a catch-up and return the catalog entries after it; None if the plan was given up and one reader is to do it all."""
    started = time.perf_counter()
    found = catch_up.carry_out(ctx, plan, entries)
    if found is None:
        return None
    windows, after = found
    # They ran side by side: elapsed time counts once, and each stage takes as long as in the window where it took longest.
    passed = time.perf_counter() - started
    longest = {stage: min(passed, max(window.seconds.get(stage, 0.0) for window in windows)) for stage in ("decode", "write")}
    for number, window in enumerate(windows):
        done.add(window_report(window), {"drain": passed, **longest} if number == 0 else {})
    return after


def _on_one_stream(ctx: DrainContext, stretch: _Stretch, entries: Mapping[TableName, CatalogEntry], done: _Done) -> None:
    """Read a stretch on one stream, window by window, and confirm the slot up to its end."""
    started = time.perf_counter()
    with open_stream(ctx, stretch.start_lsn) as stream:
        windows = _drain_windows(ctx, entries, stretch, stream) if stretch.end_lsn > stretch.start_lsn else []
        failpoints.hit("drain.before_confirm")
        try:
            stream.confirm(stretch.end_lsn)
            _await_confirmation(ctx.conn, ctx.settings.slot, stretch.end_lsn)
        except SourceUnavailable as error:
            raise StreamBroke(error, None, windows) from error
        failpoints.hit("drain.after_confirm")
    spent = time.perf_counter() - started
    for window in windows[:-1]:
        report = window_report(window)
        spent -= report.seconds["drain"]
        done.add(report, report.seconds)
    if windows:
        report = _report(windows[-1], max(0.0, spent))
        done.add(report, report.seconds)


def _drain_windows(
    ctx: DrainContext, entries: Mapping[TableName, CatalogEntry], stretch: _Stretch, stream: ReplicationStream
) -> list[Window]:
    """Read a stretch and commit it window by window; returns the windows. The slot is confirmed for all but the last of them."""
    with Committer(ctx, entries) as committer:

        def between() -> None:
            if committer.reached > stream.confirmed:
                failpoints.hit("drain.before_confirm")
                stream.confirm(committer.reached)

        try:
            portions = WindowLimits(ctx.settings.window_size, ctx.settings.window_time, committer.take, between)
            last = read_from(ctx, stream, (stretch.start_lsn, stretch.end_lsn), ctx.settings.memory_budget, portions=portions)
        except StreamBroke as broke:
            committer.wait()
            _keep(ctx, broke, stretch.ended)
            raise
        failpoints.hit("drain.after_files")
        committed = committer.submit(last, Snapshot.parse(stretch.ended))
        while not wait([committed], _ANSWER_EVERY).done:
            stream.keep_alive()
        committed.result()
        return committer.windows


def _keep(ctx: DrainContext, broke: StreamBroke, ended: str) -> None:
    """Record what came whole before the stream broke as a plan that has been read; the next attempt or the next drain commits it."""
    if broke.kept is not None:
        failpoints.hit("drain.before_keeping")
        ctx.ledger.record_plan(Plan(broke.kept.start_lsn, (broke.kept.end_lsn,), ended))
        keep_what_came(ctx.ledger, ctx.settings.slot, broke)


def _await_confirmation(conn: Connection, name: str, lsn: int) -> None:
    """Wait until the slot's confirmed LSN, read back from the server, has reached `lsn`."""
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
    tables: dict[TableName, TableCounts] = {}
    writes: dict[TableName, list[TableWrite]] = {}
    for write in window.tables:
        counts = TableCounts(
            rows=write.rows,
            inserts=write.inserts,
            updates=write.updates,
            deletes=write.deletes,
            truncates=write.truncates,
            key_changes=write.key_changes,
        )
        # Two tables may have had the same name within the window.
        table = TableName.parse(write.table)
        tables[table] = tables.get(table, TableCounts()) + counts
        writes.setdefault(table, []).append(write)
    return WindowReport(
        key=window.key,
        start_lsn=window.start_lsn,
        end_lsn=window.end_lsn,
        transactions=window.transactions,
        changes=window.changes,
        bytes=window.bytes,
        seconds=dict(window.seconds) | {"drain": seconds},
        tables=tables,
        newest={table: newest for table, found in writes.items() if (newest := NewestCommit.of(found)) is not None},
        at=window.at,
    )


def window_report(window: Window) -> WindowReport:
    """Return the report of a window as the ledger has it, for a run that finds its work already done."""
    return _report(window, window.seconds.get("drain", 0.0))

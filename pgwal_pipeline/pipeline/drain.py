"""The drain: everything that was committed up to one LSN goes from the slot to the lake in a single pass over the WAL."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgwal_pipeline import failpoints
from pgwal_pipeline.errors import ChangeNotSent, FileGone, PublicationMissing, SlotLost, SourceUnavailable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Plan, Window
from pgwal_pipeline.lsn import format_lsn
from pgwal_pipeline.pipeline import bootstrap as bootstraps
from pgwal_pipeline.pipeline import catch_up
from pgwal_pipeline.pipeline.bootstrap import Attached, attach, note_gap
from pgwal_pipeline.pipeline.catch_up import Pace, falling_behind
from pgwal_pipeline.pipeline.changes import Look
from pgwal_pipeline.pipeline.committer import Committer
from pgwal_pipeline.pipeline.counting import Pass, keep_what_came, open_stream, read_from, recover
from pgwal_pipeline.pipeline.reports import DrainReport, TableCounts, WindowReport
from pgwal_pipeline.pipeline.tally import WindowRead
from pgwal_pipeline.pipeline.window import Portions, StreamBroke
from pgwal_pipeline.postgres import catalog, slot, slot_state
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.progress import Noted, Progress
from pgwal_pipeline.relation import TableName
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.xid import Snapshot

_CONFIRM_TIMEOUT = 10.0  # seconds for the server to take a confirmation
_PATIENCE = 60.0  # seconds without getting any further after which a drain gives a source up that has gone away
_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before the second attempt, doubled for each one after it
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
    """Bring raw up to `end_lsn`, by default the source's flush position now, and confirm the slot to there.

    That is one window, or several read side by side where the backlog is longer than PGWAL_CATCHUP_THRESHOLD. Every transaction with a
    commit LSN below the last window's end is in raw afterwards, once, and no other. What a crash left half done is completed first; the
    end of a backlog that was being caught up may lie past `end_lsn`. Raises SlotBusy when another drain holds the slot for longer than
    PGWAL_BUSY_TIMEOUT.
    """
    noted, course = Noted(progress), _Course(end_lsn)
    while True:
        try:
            return _drain(settings, course, noted)
        except SourceUnavailable as error:
            pause = course.pause(error)
            if pause is None:
                raise
            noted.warn(f"{error} {_kept(error)} The drain goes on from there in {pause:g} s.")
            time.sleep(pause)


def _kept(error: SourceUnavailable) -> str:
    """What came whole before the connection broke, and is not read again."""
    came: list[Window | WindowRead] = []
    if isinstance(error, StreamBroke):
        came = [*error.counted, *([] if error.kept is None else [error.kept])]
    if not came:
        return "No transaction had come whole."
    rows = sum(write.rows for window in came for write in (window.tables if isinstance(window, Window) else window.writes))
    return (
        f"What came whole is kept: {rows:,} rows of {sum(window.transactions for window in came):,} transactions, up to "
        f"{format_lsn(came[-1].end_lsn)}, read in {sum(window.seconds['drain'] for window in came):.1f} s."
    )


@dataclass
class _Course:
    """A drain over as many connections as it takes: its end, what it has done, and how long it goes on without getting any further.

    `ended` is what `pg_current_snapshot()` said when the end was chosen, `began` the lake's frontier then.
    """

    end: int | None
    ended: str | None = None
    began: int = 0
    lag_before: int = 0
    reports: dict[str, WindowReport] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    _frontier: int = -1
    _since: float = 0.0
    _failures: int = 0

    def choose(self, conn: psycopg.Connection[Any], frontier: int, name: str) -> tuple[int, str]:
        """The end and `ended`, chosen when the source is first reached; to be called whenever it is, with the lake's frontier."""
        if self.ended is None:
            flushed = catalog.flush_lsn(conn)
            self.end = flushed if self.end is None else self.end
            self.ended = catalog.running_transactions(conn)
            self.lag_before = slot.lag(conn, name)
            self.began = frontier
        if frontier > self._frontier:
            self._frontier, self._failures = frontier, 0
        assert self.end is not None
        return self.end, self.ended

    def add(self, report: WindowReport, seconds: Mapping[str, float]) -> None:
        """Take in what became of a window."""
        if report.key not in self.reports:
            self.reports[report.key] = report
            self.seconds.update(seconds)

    def pause(self, error: SourceUnavailable) -> float | None:
        """Seconds before the next attempt, None where it is time to give up; a source that was never reached is not waited for."""
        now = time.monotonic()
        if not self._failures or (isinstance(error, StreamBroke) and (error.kept is not None or error.counted)):
            self._since, self._failures = now, 0
        if self.ended is None or now - self._since > _PATIENCE:
            return None
        self._failures += 1
        return min(_LONGEST_PAUSE, _PAUSE * 2 ** (self._failures - 1))


def _drain(settings: Settings, course: _Course, noted: Noted) -> DrainReport:
    """One attempt at a drain, on connections of its own."""
    ledger = Ledger(Lake(settings.lake))
    with ExitStack() as stack:
        stack.enter_context(slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout))
        conn = stack.enter_context(connect(settings.dsn))
        # What this very drain has reached before is the same source still.
        attached = attach(settings, conn, warn=noted.warn, proven=course.ended is not None)
        for table, reason in sorted(attached.skipped.items()):
            noted.warn(f"Table {table} is left out: {reason}.")
        run = Pass(settings, ledger, conn, attached.server_version, noted.warn, noted)
        for window in (*attached.recovered, *_recovered(run, attached)):
            course.add(window_report(window), window.seconds)
        frontier = ledger.frontier()
        assert frontier is not None
        flushed, started = catalog.flush_lsn(conn), time.perf_counter()
        end, ended = course.choose(conn, frontier, settings.slot)
        try:
            for report, spent in _windows(run, attached, frontier, end, ended):
                course.add(report, spent)
        except (PublicationMissing, ChangeNotSent) as loss:
            note_gap(ledger, loss)
            raise
        for window in ledger.windows(course.began):
            # One that was counted, but whose connection broke before its slot was confirmed.
            if window.start_lsn < window.end_lsn:
                course.add(window_report(window), window.seconds)
        state = slot_state.existing(conn, settings.slot)
        pace = Pace(
            drained=max([frontier, *(report.end_lsn for report in course.reports.values())]) - frontier,
            written=catalog.flush_lsn(conn) - flushed,
            seconds=time.perf_counter() - started,
            left=state.lag_bytes,
            safe=state.safe_wal_size,
        )
        if (behind := falling_behind(settings.slot, pace, settings.catchup_threshold)) is not None:
            noted.warn(behind)
    reports = sorted(course.reports.values(), key=lambda report: report.start_lsn)
    tables: dict[TableName, TableCounts] = dict.fromkeys(attached.tables, TableCounts())
    for report in reports:
        for table, counts in report.tables.items():
            tables[table] = tables.get(table, TableCounts()) + counts
    return DrainReport(
        windows=tuple(reports),
        tables=tables,
        warnings=noted.warnings,
        lag_before=course.lag_before,
        lag_after=state.lag_bytes,
        seconds=dict(course.seconds),
    )


def _recovered(run: Pass, attached: Attached) -> tuple[Window, ...]:
    """Complete what a drain before has prepared. Where files of that are gone it is read again, for the slot has not passed it yet."""
    try:
        return recover(run.ledger, run.warn)
    except FileGone as gone:
        windows = run.ledger.prepared()
        if attached.slot.confirmed_flush_lsn > windows[0].start_lsn:
            raise
        run.warn(f"{gone} That is done now.")
        run.ledger.record_plan(
            Plan(windows[0].start_lsn, tuple(window.end_lsn for window in windows), catalog.running_transactions(run.conn))
        )
        run.ledger.take_back(windows)
        return ()


def _windows(run: Pass, attached: Attached, frontier: int, end: int, ended: str) -> Iterator[tuple[WindowReport, Mapping[str, float]]]:
    """Drain from the frontier to `end`: the windows' reports, each with the seconds by stage that it adds to those of the whole drain.

    First the rest of a backlog that a crash cut off, then what came after it.
    """
    before: Mapping[TableName, Look] = attached.tables
    confirmed = attached.slot.confirmed_flush_lsn
    plan = run.ledger.plan()
    while plan is not None or end > frontier:
        plan = plan or catch_up.plan(run, frontier, end, ended)
        started = time.perf_counter()
        done = None if plan is None else catch_up.carry_out(run, plan, before)
        if done is None:
            plan = None
            break
        windows, before = done
        # They ran side by side: the time that passed counts once, and what it was spent on as in the one that took longest.
        passed = time.perf_counter() - started
        longest = {stage: min(passed, max(window.seconds.get(stage, 0.0) for window in windows)) for stage in ("decode", "write")}
        for number, window in enumerate(windows):
            yield window_report(window), {"drain": passed, **longest} if number == 0 else {}
        frontier = confirmed = max(window.end_lsn for window in windows)
        plan = None
    if end > frontier or confirmed < frontier:
        started = time.perf_counter()
        with open_stream(run, frontier) as stream:
            counted = _drain_windows(run, before, ended, stream, frontier, end) if end > frontier else []
            failpoints.hit("drain.before_confirm")
            try:
                stream.confirm(max(end, frontier))
                _await_confirmation(run.conn, run.settings.slot, max(end, frontier))
            except SourceUnavailable as error:
                raise StreamBroke(error, None, counted) from error
            failpoints.hit("drain.after_confirm")
        spent = time.perf_counter() - started
        for window in counted[:-1]:
            report = window_report(window)
            spent -= report.seconds["drain"]
            yield report, report.seconds
        if counted:
            report = _report(counted[-1], max(0.0, spent))
            yield report, report.seconds


def _drain_windows(
    run: Pass, before: Mapping[TableName, Look], ended: str, stream: ReplicationStream, start: int, end: int
) -> list[Window]:
    """Read from `start` to `end` on one stream and count what was read, window by window; confirms all but the last of them."""
    with Committer(run, before) as committer:

        def between() -> None:
            if committer.reached > stream.confirmed:
                failpoints.hit("drain.before_confirm")
                stream.confirm(committer.reached)

        try:
            last = read_from(
                stream,
                run.ledger,
                run.conn,
                (start, end),
                memory_budget=run.settings.memory_budget,
                largest_row=run.settings.largest_row,
                progress=run.progress,
                portions=Portions(run.settings.window_size, run.settings.window_time, committer.take, between),
            )
        except StreamBroke as broke:
            committer.wait()
            _keep(run, broke, ended)
            raise
        failpoints.hit("drain.after_files")
        committed = committer.submit(last, Snapshot.parse(ended))
        while not wait([committed], _ANSWER_EVERY).done:
            stream.keep_alive()
        committed.result()
        return committer.windows


def _keep(run: Pass, broke: StreamBroke, ended: str) -> None:
    """Have what came whole before the stream broke counted by the next attempt, or the next drain: as a plan that has been read already."""
    if broke.kept is not None:
        failpoints.hit("drain.before_keeping")
        run.ledger.record_plan(Plan(broke.kept.start_lsn, (broke.kept.end_lsn,), ended))
        keep_what_came(run.ledger, run.settings.slot, broke)


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
    tables: dict[TableName, TableCounts] = {}
    for write in window.tables:
        counts = TableCounts(
            rows=write.rows,
            inserts=write.inserts,
            updates=write.updates,
            deletes=write.deletes,
            truncates=write.truncates,
            key_changes=write.key_changes,
        )
        # Two tables may have had one name by then.
        table = TableName.parse(write.table)
        tables[table] = tables.get(table, TableCounts()) + counts
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

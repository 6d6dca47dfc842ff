"""The histories in a publish: which tables have one, what each lacks, and what the ledger keeps of them.

A history is brought to the publish's LSN after its table's `current`. A fault in it is its own: `current` is published as it is, and the
history is tried again by later publishes. Raw need not wait for it: where it has been pruned meanwhile, the history goes on from `current`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pgwal_pipeline.lake import history
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.history import HistoryRequest, HistoryResult, HistoryStanding
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import KeptHistory, TablePointer, TableState, TableWrite, Window
from pgwal_pipeline.lake.work import traits_of
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.pipeline.schema_policy import taken
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import TableOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Outcome = HistoryResult | TableError
"""What became of a history in a publish."""


@dataclass(frozen=True)
class Past:
    """The history of a table in a publish at `frontier`.

    `stands` is where it is, None if it has not begun. `windows` are those up to the frontier that end after that, and `at` is the time of
    the newest commit among them. `due`: whether there is work to do; `waits`: whether it failed and is not tried yet.
    """

    stands: HistoryStanding | None
    windows: tuple[Window, ...]
    at: datetime
    due: bool
    waits: bool = False
    fault: TableError | None = None

    def pointer(self, path: str) -> TablePointer | None:
        """The version of the history at the frontier, None if there is none yet."""
        ready = self.stands is not None and not self.due and not self.waits and self.fault is None
        return TablePointer(path, self.stands.version) if ready and self.stands is not None else None


@dataclass(frozen=True)
class Planner:
    """Finds out what the histories lack. `recent` are the complete windows up to the frontier that end after `recent_from`."""

    lake: Lake
    ledger: Ledger
    options: TableOptions
    frontier: int
    recent: Sequence[Window]
    recent_from: int

    def plan(self, state: TableState, generation: str | None) -> Past | None:
        """Return the work for a table's history, whose `current` is or will be built on `generation`; None if it has none to be kept."""
        if not self.options.of(state.table).history or state.relation is None:
            return None
        now, path = datetime.now(UTC), self.lake.history(state.location)
        waits = state.history is not None and not state.history.due(now)
        cleaned = "history" in state.unclean
        try:
            with table_work(self.lake, state.table, "history", oid=state.oid):
                stands = None if cleaned else history.standing(path)
        except TableError as error:
            return Past(None, (), now, due=False, waits=waits, fault=None if waits else error)
        if waits:
            return Past(stands, (), now, due=False, waits=True)
        windows = self._windows(-1 if stands is None else stands.watermark)
        known = stands is not None and stands.columns.issuperset(taken(state).relation.column_names)
        moved = any(writes_of(self.lake, state, windows))
        due = stands is None or stands.generation != generation or moved or not known or _stopped(state)
        return Past(stands, windows, self._newest(windows) if due else now, due)

    def _windows(self, after: int) -> tuple[Window, ...]:
        if after >= self.recent_from:
            return tuple(window for window in self.recent if window.end_lsn > after)
        found = self.ledger.windows(max(after, 0))
        return tuple(window for window in found if window.state != "prepared" and window.end_lsn <= self.frontier)

    def _newest(self, windows: Iterable[Window]) -> datetime:
        """The time of the newest commit up to the frontier; without one, when the slot was made."""
        found = _newest_commit(windows) or _newest_commit(window for window in self.ledger.windows() if window.end_lsn <= self.frontier)
        if found:
            return datetime.fromtimestamp(found / 1_000_000, UTC)
        return min((window.at for window in self.ledger.windows() if window.at is not None), default=datetime.now(UTC))


def _newest_commit(windows: Iterable[Window]) -> int:
    return max((mark.committed_at for window in windows for mark in window.marks), default=0)


def _stopped(state: TableState) -> bool:
    return state.history is not None and state.history.stopped is not None


def writes_of(lake: Lake, state: TableState, windows: Iterable[Window]) -> list[TableWrite]:
    """Return what the windows wrote to a table's raw."""
    path = lake.raw(state.location)
    return [write for window in windows for write in window.tables if write.path == path and write.rows]


def keep(
    lake: Lake,
    spark: "SparkSession",
    options: TableOptions,
    state: TableState,
    past: Past,
    at: TablePointer,
    generation: str,
    frontier: int,
) -> Outcome:
    """Bring a table's history to `frontier`, where the version `at` of its `current` stands. Its own fault is returned."""
    if past.fault is not None:
        return past.fault
    request = request_for(lake, options, state, past, at, generation, frontier)
    try:
        with table_work(lake, state.table, "history", oid=state.oid, answers=lambda: spark.sql("SELECT 1").collect()):
            return history.keep(spark, request)
    except TableError as error:
        return error


def request_for(
    lake: Lake, options: TableOptions, state: TableState, past: Past, at: TablePointer, generation: str, frontier: int
) -> HistoryRequest:
    """Return the request for a table's history."""
    wanted = taken(state)
    pruned = any(window.state == "pruned" for window in past.windows)
    stands = past.stands
    writes = writes_of(lake, state, past.windows)
    return HistoryRequest(
        table=state.table,
        raw_path=lake.raw(state.location),
        current_path=at.path,
        current_version=at.version,
        path=lake.history(state.location),
        key=wanted.relation.key,
        columns=wanted.relation.column_names,
        from_lsn=None if stands is None else stands.watermark,
        to_lsn=frontier,
        generation=generation,
        at=past.at,
        every_change=options.of(state.table).history == "every_change",
        followed=stands is not None and not pruned and state.raw_from <= stands.watermark,
        traits=traits_of(writes),
        schema_json=wanted.schema_json,
        rows=sum(write.rows for write in writes),
        arriving_json=wanted.arriving_json,
    )


def record(
    ledger: Ledger,
    options: TableOptions,
    pasts: Iterable[tuple[TableState, Past | None]],
    outcomes: Mapping[TableName, Outcome],
    frontier: int,
) -> tuple[dict[TableName, TablePointer], list[str]]:
    """Record in the ledger what became of the histories of some tables; return their versions, and warnings.

    `pasts` has each table that is at the frontier, with None where no history is kept.
    """
    pointers: dict[TableName, TablePointer] = {}
    warnings: list[str] = []
    changed: dict[TableName, Callable[[KeptHistory | None], KeptHistory | None]] = {}
    for state, past in pasts:
        path = ledger.lake.history(state.location)
        outcome = outcomes.get(state.table)
        if past is None:
            stopped = _taken_away(ledger, options, state)
            if stopped is not None:
                changed[state.location] = lambda known, stopped=stopped: stopped if known is not None else None
        elif isinstance(outcome, TableError):
            failed = (state.history or KeptHistory(frontier)).failed(f"{outcome} `current` is not affected.", datetime.now(UTC))
            warnings.append(f"The history of {state.table} is behind its table: {failed.reason}")
            changed[state.location] = lambda _, failed=failed: failed
        else:
            at = past.pointer(path) if outcome is None else TablePointer(path, outcome.version)
            if at is not None:
                pointers[state.table] = at
                now = _after(state, past, outcome, frontier)
                if now != state.history:
                    changed[state.location] = lambda _, now=now: now
    if changed:
        ledger.amend_tables(
            lambda known: [
                replace(found, history=changed[found.location](found.history)) for found in known.values() if found.location in changed
            ]
        )
    return pointers, warnings


def _after(state: TableState, past: Past, outcome: HistoryResult | None, frontier: int) -> KeptHistory:
    """What is known of a history that stands at the frontier."""
    if outcome is not None and outcome.course == "begun":
        return KeptHistory(frontier)
    assert past.stands is not None
    # A publish that died after it began the history has not recorded that.
    known = state.history if state.history is not None and "history" not in state.unclean else KeptHistory(past.stands.watermark)
    return known.going_on(frontier, compared=outcome is not None and outcome.course == "compared")


def _taken_away(ledger: Ledger, options: TableOptions, state: TableState) -> KeptHistory | None:
    """What is known of a history whose option was taken away since the last publish; None if there is nothing to record."""
    if state.history is None or state.history.stopped is not None or options.of(state.table).history:
        return None
    if "history" in state.unclean:
        return None
    stands = history.standing(ledger.lake.history(state.location))
    return replace(state.history, stopped=state.history.since if stands is None else stands.watermark, reason=None, retry_at=None)


def reason(state: TableState, wanted: bool) -> str | None:
    """Return why a table's history is not at the publish; None if it is, or if none is kept."""
    if state.history is None or not wanted or state.history.reason is None:
        return None
    return f"its history is behind: {state.history.reason}"

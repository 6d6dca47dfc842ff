"""Publish: bring `current` of every table to the frontier, and record the Delta versions that belong together."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.types import change_schema
from pgwal_pipeline.lake import current
from pgwal_pipeline.lake.cleaning import clean_current, clean_history
from pgwal_pipeline.lake.current import MergeRequest, MergeResult, ReplaceRequest, Unresolved
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.fold import ChunkSnapshot
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Chunk, Ledger, Publish, TablePointer, TableState, Window
from pgwal_pipeline.lake.raw import TableWrite, ensure_raw_table
from pgwal_pipeline.lake.work import traits_of
from pgwal_pipeline.messages.errors import LakeError, SettingError, SourceRefused, SourceUnavailable, TableError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline import histories
from pgwal_pipeline.pipeline.histories import Past, Planner, writes_of
from pgwal_pipeline.pipeline.registration import register
from pgwal_pipeline.pipeline.reports import NewestCommit, PublishReport, TablePublish
from pgwal_pipeline.pipeline.schema_policy import Taken, taken
from pgwal_pipeline.postgres import slot
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.own_columns import DELETED_LSN
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import TableOptions
from pgwal_pipeline.values.xid import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_T = TypeVar("_T")

_SIDE_BY_SIDE = 4  # tables merged at once in one session
_PLANNED_AT_ONCE = 16  # tables whose Delta log is read at once
_TRIES = 4  # for a table, if another writer or the store gets in the way
_PAUSE = 0.5  # seconds before the second try, doubled for each later one
_READS_OF_A_KEY = 3  # after which a row is not read again by its key, and its table is in error
_MANY = 20  # rows named by an error; with as many there may be thousands more

MERGING = ("look", "merge", "replace")
"""The stages of a publish. A table that failed in one of them is tried again by later publishes."""


@dataclass(frozen=True)
class _Work:
    """The work that brings one table to the frontier. If `request` is None there is none: version `pointer` is at the frontier already.

    `fault` is set if planning the work failed by the table's own fault. `newest` is the newest commit that `request` merges. `past` is the
    table's history, None if none is kept.
    """

    state: TableState
    pointer: TablePointer | None
    request: MergeRequest | ReplaceRequest | None
    fault: TableError | None = None
    newest: NewestCommit | None = None
    past: Past | None = None

    @property
    def generation(self) -> str:
        """The reading that the table's `current` is built on after the work."""
        found = self.state.generation if isinstance(self.request, ReplaceRequest) else self.state.published
        return found or ""

    @property
    def to_do(self) -> bool:
        """Whether Spark is needed."""
        return self.request is not None or (self.past is not None and self.past.due)


@dataclass(frozen=True)
class _Outcome:
    """What became of a table: of its `current`, None if there was nothing to do, and of its history."""

    current: MergeResult | TableError | None
    past: histories.Outcome | None = None


def publish(
    settings: Settings,
    spark_factory: Callable[[], "SparkSession"],
    *,
    tables: Collection[TableName] | None = None,
    progress: Progress,
) -> PublishReport:
    """Merge what raw has up to the frontier into `current`, and record the publish. Spark is started only if there is something to merge.

    A table is left out until its snapshot is complete and the frontier has passed it. A table that fails by its own fault goes to state
    `error`, and the others are published; raw has its changes, so later publishes try it again, after pauses that grow. With `tables` only
    those are merged and no publish is recorded, as its tables must all be at one LSN; the next full publish records them.

    Last the tables are registered in the catalog of PGWAL_SPARK_CATALOG, if it is set.

    Raises SlotBusy if another publish runs for longer than PGWAL_BUSY_TIMEOUT.
    """
    with alone(settings):
        return _publish(settings, spark_factory, tables, progress)


@contextmanager
def alone(settings: Settings) -> Iterator[bool]:
    """Hold the lock for changing `current` tables: on an object store Spark does not notice that two writers commit the same version.

    The lock is in the source and ends with its holder. A publish works while the source is away, then without the lock: False is yielded.
    """
    with ExitStack() as stack:
        held = False
        with suppress(SourceUnavailable, SourceRefused, SettingError):
            stack.enter_context(slot.exclusive(settings.dsn, f"{settings.slot}/publish", settings.busy_timeout))
            held = True
        yield held


def _publish(
    settings: Settings, spark_factory: Callable[[], "SparkSession"], tables: Collection[TableName] | None, progress: Progress
) -> PublishReport:
    started = time.perf_counter()
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    frontier = ledger.frontier()
    if frontier is None:
        return PublishReport(lsn=None, published_at=None, tables={}, seconds={})
    last = ledger.publish()
    options = settings.table_options
    works = [work for work in _plan(settings, lake, ledger, frontier, last) if tables is None or work.state.table in tables]
    to_do = [work for work in works if work.to_do]
    session_seconds = 0.0
    outcomes: dict[TableName, MergeResult | TableError] = {}
    kept: dict[TableName, histories.Outcome] = {work.state.table: work.past.fault for work in works if work.past and work.past.fault}
    if to_do:
        opening = time.perf_counter()
        spark = spark_factory()
        session_seconds = time.perf_counter() - opening
        done = _merge_all(lake, spark, options, to_do, frontier, progress)
        outcomes = {table: one.current for table, one in done.items() if one.current is not None}
        kept |= {table: one.past for table, one in done.items() if one.past is not None}
    outcomes |= {work.state.table: work.fault for work in works if work.fault is not None}
    pointers, errors, warnings = _record_outcomes(ledger, works, outcomes)
    at_frontier = {work.state.location: work for work in works if work.state.table in pointers}
    pasts = [(work.state, work.past) for work in at_frontier.values()]
    versions, told = histories.record(ledger, options, pasts, kept, frontier)
    warnings += told
    failpoints.hit("publish.before_record")
    moved = last is None or frontier > last.lsn or pointers != last.tables or versions != last.histories
    if tables is None and moved and (pointers or last is not None):
        last = Publish(lsn=frontier, published_at=datetime.now(UTC), tables=pointers, histories=versions)
        ledger.record_publish(last)
        failpoints.hit("publish.after_record")
    unregistered: Mapping[TableName, str] = {}
    if tables is None and last is not None:
        unregistered, told = register(settings, ledger, last, spark_factory)
        warnings += told
    return PublishReport(
        lsn=None if last is None else last.lsn,
        published_at=None if last is None else last.published_at,
        tables=_table_reports(works, outcomes, pointers, errors) | _in_error(ledger),
        warnings=tuple(warnings),
        seconds={"session": session_seconds, "publish": time.perf_counter() - started - session_seconds},
        unregistered=unregistered,
        histories=versions,
    )


def _plan(settings: Settings, lake: Lake, ledger: Ledger, frontier: int, last: Publish | None) -> list[_Work]:
    known, now = ledger.tables().values(), datetime.now(UTC)
    states = [state for state in known if may_be_merged(state, now) and state.relation is not None]
    published = last.tables if last is not None else {}
    # A table that the last publish left out may be at any LSN before it.
    from_last = all(state.generation == state.published and state.table in published for state in states)
    begin = last.lsn if last is not None and from_last else 0
    windows = [window for window in ledger.windows(begin) if window.state == "complete" and window.end_lsn <= frontier]
    planner = Planner(lake, ledger, settings.table_options, frontier, windows, begin)

    def plan(state: TableState) -> _Work | None:
        try:
            with table_work(lake, state.table, "look", oid=state.oid):
                found = work(state)
            return found if found is None else replace(found, past=planner.plan(state, found.generation))
        except TableError as error:
            return _Work(state, None, None, error)

    def work(state: TableState) -> _Work | None:
        keeps = settings.table_options.of(state.table).keeps_deleted
        passed = state.required_lsn is not None and state.required_lsn <= frontier
        if state.generation != state.published and passed:
            newest = NewestCommit.of(writes_of(lake, state, windows))
            return _Work(state, None, _replace_request(lake, ledger, state, taken(state), windows, frontier, keeps), newest=newest)
        return None if state.published is None else _merge_work(lake, state, taken(state), windows, frontier, keeps)

    with ThreadPoolExecutor(_PLANNED_AT_ONCE, "pgwal-plan") as pool:
        return [found for found in pool.map(plan, states) if found is not None]


def may_be_merged(state: TableState, now: datetime) -> bool:
    """Return whether a publish includes a table: it has been read whole, and is not waiting after a merge that failed."""
    failed = state.state == "error" and state.stage in MERGING and state.due(now)
    return state.generation is not None and state.held is None and (state.state == "ready" or failed)


def _merge_work(lake: Lake, state: TableState, wanted: Taken, windows: list[Window], frontier: int, keeps: bool) -> _Work:
    """Return the merge from the table's own watermark; without a request if no window has rows past it and the columns are right.

    The watermark may be past the last publish, if a publish died after it merged this table, or merged only this table. The table's newest
    version is used, even if maintenance made it or no publish has it yet.
    """
    path = lake.current(state.location)
    found = current.standing(path)
    if found is None:
        raise LakeError(f"The current table of {state.table} at {path} is gone; run `pgwal resnapshot '{state.table}'` to build it again.")
    fresh = [window for window in windows if window.end_lsn > found.watermark]
    pointer = TablePointer(path, found.version)
    writes, relation = writes_of(lake, state, fresh), wanted.relation
    if not writes and found.columns.issuperset(relation.column_names) and keeps == (DELETED_LSN in found.columns):
        return _Work(state, pointer, None)
    request = MergeRequest(
        table=state.table,
        raw_path=lake.raw(state.location),
        current_path=path,
        key=relation.key,
        columns=relation.column_names,
        from_lsn=found.watermark,
        to_lsn=frontier,
        traits=traits_of(writes),
        schema_json=wanted.schema_json,
        rows=_counted(writes, state, fresh),
        keeps=keeps,
        arriving_json=wanted.arriving_json,
    )
    return _Work(state, pointer, request, newest=NewestCommit.of(writes))


def _replace_request(
    lake: Lake, ledger: Ledger, state: TableState, wanted: Taken, windows: list[Window], frontier: int, keeps: bool
) -> ReplaceRequest:
    assert state.generation is not None
    assert state.required_lsn is not None
    chunks = [chunk for chunk in ledger.chunks(state.location, state.generation) if chunk.snapshot is not None]
    # The changes from an earlier slot end in a gap; a row deleted within the gap must not come back.
    origin = max((window.start_lsn for window in windows if window.start_lsn == window.end_lsn), default=0)
    first_seen = min((Snapshot.parse(chunk.snapshot or "") for chunk in chunks), key=lambda snapshot: snapshot.low, default=None)
    unseen = [window for window in windows if window.end_lsn > origin and not _seen_whole(window, first_seen)]
    from_lsn = min((window.start_lsn for window in unseen), default=frontier)
    if keeps:  # what became of the rows that the present table has
        from_lsn = max(origin, min(from_lsn, current.watermark(lake.current(state.location)) or frontier))
    writes = writes_of(lake, state, [window for window in windows if window.end_lsn > from_lsn])
    return ReplaceRequest(
        table=state.table,
        raw_path=lake.raw(state.location),
        current_path=lake.current(state.location),
        snapshot_path=lake.snapshot(state.location),
        generation=state.generation,
        chunks=tuple(ChunkSnapshot(chunk.attempt or "", chunk.snapshot or "", chunk.single) for chunk in chunks),
        snapshot_lsn=state.required_lsn,
        key=wanted.relation.key,
        columns=wanted.relation.column_names,
        from_lsn=from_lsn,
        to_lsn=frontier,
        traits=traits_of(writes),
        schema_json=wanted.schema_json,
        rows=sum(chunk.rows for chunk in chunks) + _counted(writes, state, windows),
        keep=wanted.keep,
        keeps=keeps,
        read_at=max((chunk.at for chunk in chunks if chunk.at is not None), default=datetime.now(UTC)),
        clean="current" not in state.unclean,
        arriving_json=wanted.arriving_json,
        order=wanted.order,
    )


def _seen_whole(window: Window, snapshot: Snapshot | None) -> bool:
    """Return whether all of a window's transactions had ended in `snapshot`, the oldest one of the chunks, and so in every chunk's."""
    if window.min_xid is None or window.max_xid is None:
        return True
    if snapshot is None or window.max_xid - window.min_xid >= 1 << 30:  # the 32-bit xids may have wrapped around
        return False
    return snapshot.widened(window.max_xid) < snapshot.low


def _counted(writes: Sequence[TableWrite], state: TableState, windows: Iterable[Window]) -> int:
    """Return how many of the rows must be in raw: a raw table that was made anew or left out lacks the rows of earlier windows."""
    if not state.raw_from:
        return sum(write.rows for write in writes)
    since = {id(write) for window in windows if window.start_lsn >= state.raw_from for write in window.tables}
    return sum(write.rows for write in writes if id(write) in since)


def _merge_all(
    lake: Lake, spark: "SparkSession", options: TableOptions, works: list[_Work], frontier: int, progress: Progress
) -> dict[TableName, _Outcome]:
    outcomes: dict[TableName, _Outcome] = {}

    def merged(work: _Work) -> MergeResult | TableError:
        stage = "replace" if isinstance(work.request, ReplaceRequest) else "merge"
        try:
            with table_work(lake, work.state.table, stage, oid=work.state.oid, answers=lambda: spark.sql("SELECT 1").collect()):
                return _carry_out(lake, spark, small, work)
        except TableError as error:
            return error

    def one(work: _Work) -> tuple[TableName, _Outcome]:
        table, outcome = work.state.table, None if work.request is None else _persistently(lambda: merged(work))
        at = work.pointer if work.request is None else None
        if work.request is not None and isinstance(outcome, MergeResult):
            at = TablePointer(work.request.current_path, outcome.version)
        past = work.past
        if past is None or not past.due or at is None:
            return table, _Outcome(outcome)
        failpoints.hit("publish.before_history")
        kept = _persistently(lambda: histories.keep(lake, spark, options, work.state, past, at, work.generation, frontier))
        return table, _Outcome(outcome, kept)

    with current.for_small_tables(spark) as small, ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(works)), "pgwal-merge") as pool:
        for table, outcome in pool.map(one, works):
            outcomes[table] = outcome
            progress.stage("publish", len(outcomes), len(works), "tables")
            failpoints.hit("publish.between_tables")
    return outcomes


def _persistently(work: Callable[[], _T]) -> _T:
    """Do `work` until it succeeds, or until its error is no passing one: another writer's commit, or a store that failed for the moment.

    The LSN in each commit keeps work from being done twice.
    """
    for attempt in range(_TRIES):
        try:
            return work()
        except LakeError as error:
            if not error.transient or attempt == _TRIES - 1:
                raise
            time.sleep(_PAUSE * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _carry_out(lake: Lake, spark: "SparkSession", small: "SparkSession", work: _Work) -> MergeResult:
    request = work.request
    if isinstance(request, ReplaceRequest):
        replaced = current.replace(spark, request)
        if "current" in work.state.unclean:
            clean_current(lake, work.state.location)
        if "history" in work.state.unclean:
            clean_history(lake, work.state.location)
        return replaced
    assert request is not None
    if not request.rows:  # there is only a new column that no row has yet
        assert work.state.relation is not None
        ensure_raw_table(lake, work.state.location, change_schema(work.state.relation))
    return current.merge(spark, request, small)


def _record_outcomes(
    ledger: Ledger, works: Iterable[_Work], outcomes: dict[TableName, MergeResult | TableError]
) -> tuple[dict[TableName, TablePointer], dict[TableName, str], list[str]]:
    """Return each table's version, the reasons of those that failed, and warnings about tables of which rows must be read again.

    Generations that became `current` and tables that failed are recorded in the ledger.
    """
    pointers: dict[TableName, TablePointer] = {}
    errors: dict[TableName, str] = {}
    warnings: list[str] = []
    changed: dict[TableName, tuple[TableState, TableState]] = {}  # by location: the state when planned, and the new state
    for work in works:
        state = work.state
        outcome = outcomes.get(state.table)
        again = _to_be_read_again(ledger, state, outcome) if isinstance(work.request, ReplaceRequest) else None
        if again is not None:
            warnings.append(f"Table {state.table}: {again.reason}.")
            changed[state.location] = state, again
        elif isinstance(outcome, TableError):
            failed = state.failed(outcome.stage or "merge", _reason(state, work, outcome), datetime.now(UTC))
            errors[state.table] = failed.reason or ""
            changed[state.location] = state, failed
        elif outcome is not None and work.request is not None:
            pointers[state.table] = TablePointer(work.request.current_path, outcome.version)
            if isinstance(work.request, ReplaceRequest) or state.state == "error":
                published = state.generation if isinstance(work.request, ReplaceRequest) else state.published
                done = _cleaned(state) if isinstance(work.request, ReplaceRequest) else state
                changed[state.location] = state, replace(done.without_error(), state="ready", published=published, rereads=0)
        elif work.pointer is not None:
            pointers[state.table] = work.pointer
            if state.state == "error":
                changed[state.location] = state, replace(state.without_error(), state="ready")
    if changed:
        # By location: a concurrent drain may have found a new name of a table.
        ledger.amend_tables(
            lambda known: [_with_outcome(state, *changed[state.location]) for state in known.values() if state.location in changed]
        )
    return pointers, errors, warnings


def _cleaned(state: TableState) -> TableState:
    """The state of a table whose `current` was replaced, and whose history was removed if it had what is protected now."""
    kept = None if "history" in state.unclean else state.history
    return replace(state.cleaned("current").cleaned("history"), history=kept)


def _to_be_read_again(ledger: Ledger, state: TableState, outcome: MergeResult | TableError | None) -> TableState | None:
    """Return the new state of a table if rows were missed because their key changed while the table was read; else None.

    Neither the chunk of the old key nor that of the new key has such a row, and the stream does not repeat values that did not change.
    The rows are read again by key, or if they are too many, the whole table.
    """
    if not isinstance(outcome, Unresolved) or state.generation is None:
        return None
    hidden = state.relation is not None and state.relation.hides_key  # the source cannot be asked for a key that is only known as a hash
    if outcome.keys is None or hidden:
        if not hidden and len(outcome.rows) < _MANY:  # the key has a type without a text to query by
            return None
        return replace(
            state, state="pending", generation=None, reading=None, reason="it is read again: many keys changed while it was read"
        )
    chunks = ledger.chunks(state.location, state.generation)
    read = Counter(chunk.lower for chunk in chunks if chunk.single)
    if max(read[key] for key in outcome.keys) >= _READS_OF_A_KEY:
        return None
    first = max(chunk.chunk for chunk in chunks) + 1
    ledger.record_chunks(
        [
            Chunk(table=state.location, generation=state.generation, chunk=number, lower=key, upper=key)
            for number, key in enumerate(outcome.keys, first)
        ]
    )
    reason = f"{len(outcome.keys)} rows whose key changed while it was read are read again"
    visible = "ready" if state.published is not None else "snapshotting"
    return replace(state, state=visible, generation=None, reading=state.generation, reason=reason)


def _reason(state: TableState, work: _Work, error: TableError) -> str:
    """Return why a table is not published: the error's message, the stage, the LSN, and what to do."""
    request = work.request
    at = f"at {format_lsn(request.to_lsn)}" if request is not None else "at the frontier"
    back = f"`pgwal resnapshot '{state.table}'`"
    way = "" if back in str(error) else f" {back} reads it again."
    stage = error.stage or "merge"
    return f"{error} (stage {stage}, {at}; its changes are in raw, and publishes try it again, after pauses that grow.){way}"


def _in_error(ledger: Ledger) -> dict[TableName, TablePublish]:
    """Return the tables in error or held back, since this run or an earlier one, with the reason."""
    return {
        state.table: TablePublish(path="", version=None, errors=(state.trouble,))
        for state in ledger.tables().values()
        if state.trouble is not None
    }


def _with_outcome(known: TableState, planned: TableState, outcome: TableState) -> TableState:
    """Return the table's state in the ledger with the outcome of the publish; a concurrent drain may have changed the rest of it.

    If a drain has meanwhile decided that the table must be read again, the outcome is dropped, as its rows are no longer valid.
    """
    if known.generation != planned.generation or known.left_out:
        return known
    if outcome.state == "error":
        return replace(
            known, state="error", stage=outcome.stage, reason=outcome.reason, failures=outcome.failures, retry_at=outcome.retry_at
        )
    if outcome.generation is None:
        return replace(known, state=outcome.state, reason=outcome.reason, generation=None, reading=outcome.reading)
    if known.state == "error":
        known = replace(known.without_error(), state="ready")
    return replace(known, published=outcome.published, rereads=0, unclean=outcome.unclean, history=outcome.history)


def _table_reports(
    works: Iterable[_Work],
    outcomes: dict[TableName, MergeResult | TableError],
    pointers: dict[TableName, TablePointer],
    errors: dict[TableName, str],
) -> dict[TableName, TablePublish]:
    reports = {}
    for work in works:
        table = work.state.table
        pointer = pointers.get(table)
        outcome = outcomes.get(table)
        reports[table] = TablePublish(
            path=pointer.path if pointer is not None else "",
            version=pointer.version if pointer is not None else None,
            rows_changed=outcome.rows_changed if isinstance(outcome, MergeResult) else 0,
            errors=(errors[table],) if table in errors else (),
            newest=work.newest,
        )
    return reports

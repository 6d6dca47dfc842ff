"""The publish: `current` of every table is brought to the frontier, and the Delta versions that stand there are recorded as one."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.types import change_schema, copy_schema
from pgwal_pipeline.lake import current
from pgwal_pipeline.lake.current import MergeRequest, MergeResult, ReplaceRequest, Unresolved
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.fold import ChunkSnapshot, Traits
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Chunk, Ledger, Publish, TablePointer, TableState, Window
from pgwal_pipeline.lake.raw import TableWrite, ensure_raw_table
from pgwal_pipeline.lake.schema import schema_json
from pgwal_pipeline.messages.errors import LakeError, SettingError, SourceRefused, SourceUnavailable, TableError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.reports import PublishReport, TablePublish
from pgwal_pipeline.postgres import slot
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline.values.xid import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SIDE_BY_SIDE = 4  # tables merged at once in one session
_LOOKS = 16  # tables whose Delta log is looked at at once
_TRIES = 4  # at a table that another writer or the store was in the way of
_PAUSE = 0.5  # seconds before the second try, doubled for each one after it
_TIMES_A_KEY = 3  # that a row is read again by its key before its table is given up
_MANY = 20  # rows named by an error, which then may be of thousands


MERGING = ("look", "merge", "replace")
"""The stages of a publish: a table that failed in one is tried again by the next ones."""


@dataclass(frozen=True)
class _Work:
    """What brings one table to the frontier. Nothing is to be done where `request` is None: it stands there already, at `pointer`.

    With `fault` the look at the table failed, by its own fault.
    """

    state: TableState
    pointer: TablePointer | None
    request: MergeRequest | ReplaceRequest | None
    fault: TableError | None = None


def publish(
    settings: Settings,
    spark_factory: Callable[[], "SparkSession"],
    *,
    tables: Collection[TableName] | None = None,
    progress: Progress,
) -> PublishReport:
    """Merge what raw holds up to the frontier into `current`, and record the publish; with nothing to merge Spark is never started.

    A table whose snapshot is not whole, or not yet passed by the frontier, is left out until it is. One that fails by its own fault goes to
    state `error`, and the others are published; raw has its changes, so that it is tried again, after pauses that grow. With `tables` only
    those are merged and nothing is recorded: every table of a publish stands at its LSN, and the next whole publish takes them in. Raises
    SlotBusy when another publish is at work for longer than PGWAL_BUSY_TIMEOUT.
    """
    with alone(settings):
        return _publish(settings, spark_factory, tables, progress)


@contextmanager
def alone(settings: Settings) -> Iterator[None]:
    """Change `current` tables beside nobody else. On an object store Spark cannot tell that two commit one and the same version.

    What guards them is a lock on the source, which ends with its holder. A publish needs no source: while that is away nothing guards it
    but the look at what it has committed.
    """
    with ExitStack() as stack:
        with suppress(SourceUnavailable, SourceRefused, SettingError):
            stack.enter_context(slot.exclusive(settings.dsn, f"{settings.slot}/publish", settings.busy_timeout))
        yield


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
    works = [work for work in _plan(lake, ledger, frontier, last) if tables is None or work.state.table in tables]
    to_do = [work for work in works if work.request is not None]
    session_seconds = 0.0
    outcomes: dict[TableName, MergeResult | TableError] = {}
    if to_do:
        opening = time.perf_counter()
        spark = spark_factory()
        session_seconds = time.perf_counter() - opening
        outcomes = _merge_all(lake, spark, to_do, progress)
    outcomes |= {work.state.table: work.fault for work in works if work.fault is not None}
    pointers, errors, warnings = _record_outcomes(ledger, works, outcomes)
    failpoints.hit("publish.before_record")
    if tables is None and (last is None or frontier > last.lsn or pointers != last.tables) and (pointers or last is not None):
        last = Publish(lsn=frontier, published_at=datetime.now(UTC), tables=pointers)
        ledger.record_publish(last)
        failpoints.hit("publish.after_record")
    return PublishReport(
        lsn=None if last is None else last.lsn,
        published_at=None if last is None else last.published_at,
        tables=_table_reports(works, outcomes, pointers, errors) | _in_error(ledger),
        warnings=tuple(warnings),
        seconds={"session": session_seconds, "publish": time.perf_counter() - started - session_seconds},
    )


def _plan(lake: Lake, ledger: Ledger, frontier: int, last: Publish | None) -> list[_Work]:
    known, now = ledger.tables().values(), datetime.now(UTC)
    states = [state for state in known if may_be_merged(state, now) and state.relation is not None]
    published = last.tables if last is not None else {}
    # A table that the last publish left out may stand anywhere before it.
    from_last = all(state.generation == state.published and state.table in published for state in states)
    windows = [
        window
        for window in ledger.windows(last.lsn if last is not None and from_last else 0)
        if window.state == "complete" and window.end_lsn <= frontier
    ]

    def look(state: TableState) -> _Work | None:
        try:
            with table_work(lake, state.table, "look", oid=state.oid):
                return work(state)
        except TableError as error:
            return _Work(state, None, None, error)

    def work(state: TableState) -> _Work | None:
        assert state.relation is not None
        whole = state.required_lsn is not None and state.required_lsn <= frontier
        if state.generation != state.published and whole:
            return _Work(state, None, _replace_request(lake, ledger, state, state.relation, windows, frontier))
        return None if state.published is None else _merge_work(lake, state, state.relation, windows, frontier)

    with ThreadPoolExecutor(_LOOKS, "pgwal-look") as pool:
        return [found for found in pool.map(look, states) if found is not None]


def may_be_merged(state: TableState, now: datetime) -> bool:
    """Whether a publish takes a table in: it has been read whole, and does not wait after a merge that failed."""
    failed = state.state == "error" and state.stage in MERGING and state.due(now)
    return state.generation is not None and (state.state == "ready" or failed)


def _merge_work(lake: Lake, state: TableState, relation: Relation, windows: list[Window], frontier: int) -> _Work:
    """The merge from the table's own watermark; none where no window holds a row past it and it has every column.

    The watermark may lie past the last publish: a publish that died had merged this table, or it was merged by itself. Its newest version
    counts, which maintenance may have made, or a replacement that was in no publish yet.
    """
    path = lake.current(state.location)
    stands = current.standing(path)
    if stands is None:
        raise LakeError(f"The current table of {state.table} at {path} is gone; run `pgwal resnapshot '{state.table}'` to build it again.")
    fresh = [window for window in windows if window.end_lsn > stands.watermark]
    pointer = TablePointer(path, stands.version)
    writes = _writes(lake, state, fresh)
    if not writes and stands.columns.issuperset(relation.column_names):
        return _Work(state, pointer, None)
    request = MergeRequest(
        table=state.table,
        raw_path=lake.raw(state.location),
        current_path=path,
        key=relation.key,
        columns=relation.column_names,
        from_lsn=stands.watermark,
        to_lsn=frontier,
        traits=_traits(writes),
        schema_json=schema_json(copy_schema(relation)),
        rows=_counted(writes, state, fresh),
    )
    return _Work(state, pointer, request)


def _replace_request(
    lake: Lake, ledger: Ledger, state: TableState, relation: Relation, windows: list[Window], frontier: int
) -> ReplaceRequest:
    assert state.generation is not None
    assert state.required_lsn is not None
    chunks = [chunk for chunk in ledger.chunks(state.location, state.generation) if chunk.snapshot is not None]
    # What a slot before this one gave ends in a gap, and a row deleted within the gap must not come back.
    origin = max((window.start_lsn for window in windows if window.start_lsn == window.end_lsn), default=0)
    first_seen = min((Snapshot.parse(chunk.snapshot or "") for chunk in chunks), key=lambda snapshot: snapshot.low, default=None)
    unseen = [window for window in windows if window.end_lsn > origin and not _seen_whole(window, first_seen)]
    from_lsn = min((window.start_lsn for window in unseen), default=frontier)
    writes = _writes(lake, state, [window for window in windows if window.end_lsn > from_lsn])
    return ReplaceRequest(
        table=state.table,
        raw_path=lake.raw(state.location),
        current_path=lake.current(state.location),
        snapshot_path=lake.snapshot(state.location),
        generation=state.generation,
        chunks=tuple(ChunkSnapshot(chunk.attempt or "", chunk.snapshot or "", chunk.single) for chunk in chunks),
        snapshot_lsn=state.required_lsn,
        key=relation.key,
        columns=relation.column_names,
        from_lsn=from_lsn,
        to_lsn=frontier,
        traits=_traits(writes),
        schema_json=schema_json(copy_schema(relation)),
        rows=sum(chunk.rows for chunk in chunks) + _counted(writes, state, windows),
        keep=state.dropped,
    )


def _seen_whole(window: Window, snapshot: Snapshot | None) -> bool:
    """Whether every transaction of a window had ended for `snapshot`, and so for every chunk of which it is the oldest."""
    if window.min_xid is None or window.max_xid is None:
        return True
    if snapshot is None or window.max_xid - window.min_xid >= 1 << 30:  # their 32 bits may have begun anew
        return False
    return snapshot.widened(window.max_xid) < snapshot.low


def _writes(lake: Lake, state: TableState, windows: Iterable[Window]) -> list[TableWrite]:
    path = lake.raw(state.location)
    return [write for window in windows for write in window.tables if write.path == path and write.rows]


def _counted(writes: Sequence[TableWrite], state: TableState, windows: Iterable[Window]) -> int:
    """How many of the rows must be in raw: a raw table that was made anew, or left out, lacks those of windows from before."""
    if not state.raw_from:
        return sum(write.rows for write in writes)
    since = {id(write) for window in windows if window.start_lsn >= state.raw_from for write in window.tables}
    return sum(write.rows for write in writes if id(write) in since)


def _traits(writes: Sequence[TableWrite]) -> Traits:
    return Traits(
        truncated=any(write.truncates for write in writes),
        key_changes=any(write.key_changes for write in writes),
        unchanged=any(write.unchanged for write in writes),
    )


def _merge_all(lake: Lake, spark: "SparkSession", works: list[_Work], progress: Progress) -> dict[TableName, MergeResult | TableError]:
    outcomes: dict[TableName, MergeResult | TableError] = {}

    def one(work: _Work) -> tuple[TableName, MergeResult | TableError]:
        stage = "replace" if isinstance(work.request, ReplaceRequest) else "merge"
        for attempt in range(_TRIES):
            try:
                with table_work(lake, work.state.table, stage, oid=work.state.oid, answers=lambda: spark.sql("SELECT 1").collect()):
                    return work.state.table, _carried_out(lake, spark, work)
            except TableError as error:
                return work.state.table, error
            except LakeError as error:
                # Another's commit, or a store that failed for the moment; the fence keeps what was done from being done twice.
                if not error.transient or attempt == _TRIES - 1:
                    raise
                time.sleep(_PAUSE * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(works)), "pgwal-merge") as pool:
        for table, outcome in pool.map(one, works):
            outcomes[table] = outcome
            progress.stage("publish", len(outcomes), len(works), "tables")
            failpoints.hit("publish.between_tables")
    return outcomes


def _carried_out(lake: Lake, spark: "SparkSession", work: _Work) -> MergeResult:
    request = work.request
    if isinstance(request, ReplaceRequest):
        return current.replace(spark, request)
    assert request is not None
    if not request.rows:  # a column that no row has yet
        assert work.state.relation is not None
        ensure_raw_table(lake, work.state.location, change_schema(work.state.relation))
    return current.merge(spark, request)


def _record_outcomes(
    ledger: Ledger, works: Iterable[_Work], outcomes: dict[TableName, MergeResult | TableError]
) -> tuple[dict[TableName, TablePointer], dict[TableName, str], list[str]]:
    """Where each table stands now, which failed and why, and warnings of tables of which some rows are to be read again.

    Generations that became `current` and tables that failed are written to the ledger.
    """
    pointers: dict[TableName, TablePointer] = {}
    errors: dict[TableName, str] = {}
    warnings: list[str] = []
    changed: dict[TableName, tuple[TableState, TableState]] = {}  # by location: as it was planned for, and as it is now
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
                changed[state.location] = state, replace(state.mended(), state="ready", published=published, rereads=0)
        elif work.pointer is not None:
            pointers[state.table] = work.pointer
            if state.state == "error":
                changed[state.location] = state, replace(state.mended(), state="ready")
    if changed:
        # By their locations: a drain beside may have met another name of a table.
        ledger.amend_tables(
            lambda known: [_with_outcome(state, *changed[state.location]) for state in known.values() if state.location in changed]
        )
    return pointers, errors, warnings


def _to_be_read_again(ledger: Ledger, state: TableState, outcome: MergeResult | TableError | None) -> TableState | None:
    """The state of a table whose snapshot lacks values of rows that took keys which had been read already; None where that is not so.

    Neither the chunk of the old key has such a row nor that of the new one, and the stream does not repeat values that did not change.
    The rows are read again by their keys; where they are too many, the whole table is.
    """
    if not isinstance(outcome, Unresolved) or state.generation is None:
        return None
    if outcome.keys is None:
        if len(outcome.rows) < _MANY:  # of a type that has no text to ask for it by
            return None
        return replace(
            state, state="pending", generation=None, reading=None, reason="it is read again: many keys changed while it was read"
        )
    chunks = ledger.chunks(state.location, state.generation)
    read = Counter(chunk.lower for chunk in chunks if chunk.single)
    if max(read[key] for key in outcome.keys) >= _TIMES_A_KEY:
        return None
    first = max(chunk.chunk for chunk in chunks) + 1
    ledger.record_chunks(
        [
            Chunk(table=state.location, generation=state.generation, chunk=number, lower=key, upper=key)
            for number, key in enumerate(outcome.keys, first)
        ]
    )
    reason = f"{len(outcome.keys)} rows that changed their key while it was read are read again"
    visible = "ready" if state.published is not None else "snapshotting"
    return replace(state, state=visible, generation=None, reading=state.generation, reason=reason)


def _reason(state: TableState, work: _Work, error: TableError) -> str:
    """Why a table is not published: the error's sentence, what failed and where the table stands, and the way back."""
    request = work.request
    at = f"at {format_lsn(request.to_lsn)}" if request is not None else "at the frontier"
    back = f"`pgwal resnapshot '{state.table}'`"
    way = "" if back in str(error) else f" {back} reads it again."
    stage = error.stage or "merge"
    return f"{error} (at {stage}, {at}; its changes are in raw, and each publish tries it again, after pauses that grow.){way}"


def _in_error(ledger: Ledger) -> dict[TableName, TablePublish]:
    """The tables that cannot be followed, now or since an earlier run, with the reason."""
    return {
        state.table: TablePublish(path="", version=None, errors=(state.reason or "unknown",))
        for state in ledger.tables().values()
        if state.state == "error"
    }


def _with_outcome(known: TableState, planned: TableState, outcome: TableState) -> TableState:
    """A table's state with what the publish found out about it; the rest may have moved on meanwhile.

    Where a drain has had the table read again since, what the publish found out is of rows that do not count any more.
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
        known = replace(known.mended(), state="ready")
    return replace(known, published=outcome.published, rereads=0)


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
        )
    return reports

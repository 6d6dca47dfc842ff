"""Report the state of the slot, the lake's frontier, the last publish and every table. Nothing is changed."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from pgwal_pipeline.lake import current
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Publish, TableState
from pgwal_pipeline.lake.records import Proof
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.pipeline import histories
from pgwal_pipeline.pipeline.publish import may_be_merged
from pgwal_pipeline.pipeline.reports import LagReading, PublishReport, TablePublish
from pgwal_pipeline.pipeline.schema_policy import frozen_difference, summary
from pgwal_pipeline.postgres import catalog, copies, peek, slot
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn, window_key
from pgwal_pipeline.values.relation import quote_ident
from pgwal_pipeline.values.table_options import EXCLUDED, Options
from pgwal_pipeline.values.xid import Snapshot

_TABLES_AT_ONCE = 16  # tables whose Delta logs are read side by side


def lag(settings: Settings) -> LagReading:
    """Return how far the slot is behind, from one cheap reading. Raises SourceUnavailable if the source cannot be reached."""
    ledger = Ledger(Lake(settings.lake))
    with connect(settings.dsn) as conn:
        # The insert LSN is read after the snapshot, so that it is past the commit of every transaction that has ended in the snapshot.
        snapshot = catalog.running_transactions(conn)
        insert_lsn = catalog.insert_lsn(conn, force=False)
        flush_lsn = catalog.flush_lsn(conn)
        state = slot.inspect(conn, settings.slot)
    return LagReading(
        slot_exists=state is not None,
        lag_bytes=max(0, flush_lsn - state.confirmed_flush_lsn) if state is not None else 0,
        confirmed_flush_lsn=None if state is None else state.confirmed_flush_lsn,
        flush_lsn=flush_lsn,
        insert_lsn=insert_lsn,
        snapshot=snapshot,
        publish_due=publish_due(ledger),
        drain_due=drain_due(ledger, flush_lsn),
        active_pid=None if state is None else state.active_pid,
        wal_status=None if state is None else state.wal_status,
        safe_wal_size=None if state is None else state.safe_wal_size,
    )


def has_changes(settings: Settings, since: str) -> bool:
    """Return whether the slot's backlog may have a change of a followed table. `since` is the result of `pg_current_snapshot()` before it.

    Meant for a short backlog, as the server decodes it.
    """
    with connect(settings.dsn) as conn:
        return peek.has_changes(conn, settings.slot, settings.publication, Snapshot.parse(since))


def publish_due(ledger: Ledger) -> bool:
    """Return whether a publish has work: changes past the newest one, or a table that has been read whole or may be tried again.

    Before the first publish only a table that has been read whole is work, not changes alone.
    """
    frontier = ledger.frontier()
    if frontier is None:
        return False
    states, now = ledger.tables().values(), datetime.now(UTC)
    if any(state.state == "error" and may_be_merged(state, now) for state in states):
        return True
    ready = [state for state in states if state.state == "ready" and state.generation is not None and state.held is None]
    if any(state.generation != state.published and (state.required_lsn or 0) <= frontier for state in ready):
        return True
    publish = ledger.publish()
    if publish is None:
        return any(state.published is not None for state in ready)  # a publish died before it was recorded
    locations = {table: pointer.path for table, pointer in publish.tables.items()}
    if any(locations.get(state.table) != ledger.lake.current(state.location) for state in ready if state.published is not None):
        return True  # the table has another name now
    if any(_history_due(state, now) for state in ready if state.published is not None):
        return True
    return any(window.changes for window in ledger.windows(publish.lsn) if window.end_lsn <= frontier)


def _history_due(state: TableState, now: datetime) -> bool:
    """Whether a table's option and its history do not agree, or the history may be tried again after a fault."""
    wanted = state.option("history")
    if state.history is None:
        return bool(wanted)
    if not wanted:
        return state.history.stopped is None
    return state.history.stopped is not None or (state.history.reason is not None and state.history.due(now))


def drain_due(ledger: Ledger, flush_lsn: int) -> bool:
    """Return whether a drain up to `flush_lsn` lets a table be published that has been read whole, at a later LSN than the frontier."""
    unpublished = [
        state.required_lsn or 0
        for state in ledger.tables().values()
        if state.state == "ready" and state.held is None and state.generation is not None and state.generation != state.published
    ]
    frontier = ledger.frontier() if unpublished else None
    return frontier is not None and any(frontier < lsn <= flush_lsn for lsn in unpublished)


def status(settings: Settings) -> dict[str, Any]:
    """Return the object that `pgwal status --json` prints. `slot` is None if the source is down or has no slot.

    `windows` is there only while a backlog is being caught up.
    """
    from pgwal_pipeline.spark.session import engine_status

    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    frontier = ledger.frontier()
    publish = ledger.publish()
    versions = {pointer.path: pointer.version for pointer in publish.tables.values()} if publish is not None else {}
    proofs = ledger.proofs()
    with ThreadPoolExecutor(_TABLES_AT_ONCE, "pgwal-status") as pool:
        counts = dict(zip(versions, pool.map(_rows, versions, versions.values()), strict=True))
    return {
        "slot": _slot(settings),
        "frontier": None if frontier is None else format_lsn(frontier),
        "publish": None if publish is None else publish_report(publish).to_json(),
        **({"windows": under_way} if (under_way := _under_way(settings, ledger)) else {}),
        "engine": engine_status(settings),
        "tables": {
            str(table): {
                "state": _shown(state),
                "reason": _reason(state, settings.table_options.of(table)) or counts.get(lake.current(state.location), (None, None))[1],
                "raw_path": lake.raw(state.location),
                "current_path": (path := lake.current(state.location)),
                "key": list(state.key) if state.relation is not None else None,
                "rows": counts.get(path, (None, None))[0],
                "options": (options := settings.table_options.of(table)).to_json(),
                **_history(lake, state, options),
                **_proven(proofs.get(state.location), state),
            }
            for table, state in sorted(ledger.tables().items())
        },
    }


def _proven(proof: Proof | None, state: TableState) -> dict[str, Any]:
    """Return how far a table is proven to equal the source; what was proven of it before it was read again does not count."""
    known = proof if proof is not None and proof.generation == state.published else None
    through = None if known is None else known.verified_through
    at = None if known is None else known.proven_at
    return {
        "verified_through": None if through is None else format_lsn(through),
        "proven_at": None if at is None else at.isoformat(),
    }


def _rows(path: str, version: int) -> tuple[int | None, str | None]:
    """Return the number of rows of a `current` table, or why they cannot be counted."""
    try:
        return current.row_count(path, version), None
    except PgwalError as error:
        return None, str(error)


def _under_way(settings: Settings, ledger: Ledger) -> list[dict[str, Any]]:
    """Return the windows of a backlog that is being caught up.

    `state` is `read` (waits for the others), `reading` or `planned`. `done_bytes` is how much of its WAL has been sent, None if unknown.
    """
    plan = ledger.plan()
    if plan is None:
        return []
    reads = ledger.reads(plan)
    positions = _positions(settings)
    found = []
    for start, end in plan.ranges:
        key, sent = window_key(end), positions.get(start)
        state = "read" if key in reads else "planned" if sent is None else "reading"
        done = end - start if state == "read" else None if sent is None else max(0, min(sent, end) - start)
        found.append({"key": key, "start_lsn": format_lsn(start), "end_lsn": format_lsn(end), "state": state, "done_bytes": done})
    return found


def _positions(settings: Settings) -> dict[int, int]:
    """Return the LSN that each reader of the slot or of a copy has reached, by its start LSN; empty if the source is down."""
    try:
        with connect(settings.dsn, connect_timeout=5) as conn:
            return copies.positions(conn, settings.slot)
    except PgwalError:
        return {}


def _shown(state: TableState) -> str:
    """Return a table's state as users see it: one that is held back is in `error`, a ready one without a publish is `snapshotting`."""
    if state.held is not None:
        return "error"
    if state.state == "ready" and state.published is None:
        return "snapshotting"
    return state.state


def _reason(state: TableState, options: Options) -> str | None:
    """Return the reason of a table's state; without one, which of its columns are not in the stream, though they are not excluded."""
    if state.trouble is not None:
        return state.trouble
    if state.reason is None and (behind := histories.reason(state, bool(options.history))) is not None:
        return behind
    if state.reason is not None or state.relation is None or state.storage is None:
        return state.reason
    if frozen := frozen_difference(state):
        return f"its columns are frozen: {summary(frozen)}; `pgwal accept '{state.table}'` takes the new ones"
    known = state.relation.column_names
    left_out = [
        quote_ident(column.name)
        for column in state.storage.columns
        if column.name not in known and options.treatment(column.name) != EXCLUDED
    ]
    if not left_out:
        return None
    return f"column {left_out[0]} is not published" if len(left_out) == 1 else f"columns {', '.join(left_out)} are not published"


def _history(lake: Lake, state: TableState, options: Options) -> dict[str, Any]:
    """What is shown of a table's history: its path, and since which LSN it is kept; nothing if there is none.

    `history_stopped` is the LSN at which it stands since the option was taken away.
    """
    if state.history is None and not options.history:
        return {}
    known = state.history
    return {
        "history_path": lake.history(state.location),
        "history_since": None if known is None else format_lsn(known.since),
        **({} if known is None or known.stopped is None else {"history_stopped": format_lsn(known.stopped)}),
    }


def _slot(settings: Settings) -> dict[str, Any] | None:
    try:
        with connect(settings.dsn, connect_timeout=5) as conn:
            state = slot.inspect(conn, settings.slot)
    except PgwalError:
        return None
    if state is None:
        return None
    return {
        "name": state.name,
        "active": state.active,
        "confirmed_flush_lsn": format_lsn(state.confirmed_flush_lsn),
        "restart_lsn": format_lsn(state.restart_lsn),
        "lag_bytes": state.lag_bytes,
        "wal_status": state.wal_status,
    }


def publish_report(publish: Publish) -> PublishReport:
    """Return the report of a publish as the ledger has it."""
    return PublishReport(
        lsn=publish.lsn,
        published_at=publish.published_at,
        tables={table: TablePublish(pointer.path, pointer.version) for table, pointer in publish.tables.items()},
        histories=publish.histories,
    )

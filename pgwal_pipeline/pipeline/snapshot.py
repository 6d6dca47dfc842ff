"""Snapshots: read the rows from before the stream began, by ranges of the key, while the stream goes on.

A snapshot needs no slot, and the stream does not wait for it. Each chunk records the snapshot of its own short read. The publish applies an
event to a chunk's row only if the event's transaction was not visible in that snapshot.
"""

import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from pgwal_pipeline.lake.damaged import heal, raw_is_whole
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.records import pause_after
from pgwal_pipeline.lake.schema import check_columns
from pgwal_pipeline.messages.errors import BlockedByTransaction, SourceRefused, TableError
from pgwal_pipeline.messages.progress import Noted, Progress
from pgwal_pipeline.pipeline.applied_options import take_key
from pgwal_pipeline.pipeline.drain import bootstrap
from pgwal_pipeline.pipeline.published import Published
from pgwal_pipeline.pipeline.reading_states import first_of
from pgwal_pipeline.pipeline.reports import SnapshotReport, SnapshotsReport
from pgwal_pipeline.pipeline.schema_policy import read_anew
from pgwal_pipeline.pipeline.slot_watch import SlotWatch
from pgwal_pipeline.pipeline.small_tables import SmallTable, SmallTables, most_bytes
from pgwal_pipeline.pipeline.table_chunks import TableChunks
from pgwal_pipeline.pipeline.table_review import next_xid
from pgwal_pipeline.postgres import catalog, copy, slot
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.table_locks import TableLocked, wait_until_free
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

_PENDING = ("pending", "snapshotting")
_REREADS = 3  # automatic ones of a table in error, with PGWAL_ON_TABLE_ERROR=resnapshot
_LOCKED_FOR = 10.0  # seconds that those of its tables that are locked may hold up a run, all together
_GROUP_TABLES = 100  # small ones whose readings are begun and recorded together


def needed(settings: Settings) -> tuple[TableName, ...]:
    """Return the tables to read now: those that have joined but are not read whole yet, and those whose reading may be tried again."""
    now = datetime.now(UTC)
    return tuple(sorted(state.table for state in Ledger(Lake(settings.lake)).tables().values() if _is_due(state, settings, now)))


def none_joined(settings: Settings) -> bool:
    """Return whether no table is known yet, as before the first drain."""
    return not Ledger(Lake(settings.lake)).tables()


def _is_due(state: TableState, settings: Settings, now: datetime) -> bool:
    if state.held is not None:
        return False
    if state.state == "error":
        if _unread_alone(state):
            return state.due(now)
        # Automatic only if the setting asks for it, a limited number of times, with pauses that grow.
        waited = state.retry_at is None or state.due(now)
        return settings.on_table_error == "resnapshot" and state.rereads < _REREADS and waited
    wanted = state.state in _PENDING or (state.reading is not None and state.followed)
    return wanted and (state.retry_at is None or state.due(now))


def _unread_alone(state: TableState) -> bool:
    """Return whether a table in error only has to be read, as raw has its changes."""
    return state.stage in ("read", "access") and not state.left_out


def blocked(settings: Settings, tables: Collection[TableName]) -> dict[TableName, str]:
    """Return which of `tables` cannot be read yet, as transactions from before they joined are open, with a message that names these."""
    states = Ledger(Lake(settings.lake)).tables()
    found = {}
    with connect(settings.dsn) as conn:
        for table in tables:
            state = states.get(table)
            if state is not None and state.joined_xid is not None:
                try:
                    copy.wait_for_transactions(conn, state.joined_xid, 0.0, lambda _: None)
                except BlockedByTransaction as error:
                    found[table] = str(error)
    return found


def wait_for_blocked(settings: Settings, tables: Collection[TableName], *, progress: Progress) -> None:
    """Wait until the transactions that keep `tables` from being read have ended.

    Raises BlockedByTransaction after PGWAL_BLOCKED_TIMEOUT.
    """
    states = Ledger(Lake(settings.lake)).tables()
    joined = max((states[table].joined_xid or 0 for table in tables if table in states), default=0)
    with connect(settings.dsn) as conn:
        copy.wait_for_transactions(conn, joined, settings.blocked_timeout, progress.warn)


def snapshot(
    settings: Settings, tables: Collection[TableName] | None = None, *, progress: Progress, patience: float = 0.0
) -> SnapshotsReport:
    """Read the tables that need it, or `tables` again from the start, so that the next publish past their LSN can include them.

    A reading that was interrupted is continued: finished chunks are not read again. While a table is read again, its old `current` goes on.
    A table that waits for old transactions for longer than `patience` seconds stays pending; the ledger and the report's `blocked` name
    them. A table that is locked comes last, and is left to a later run if it still is then. A table that cannot be read by its own fault
    goes to state `error`. None of them holds up the others.

    Raises SlotBusy if another snapshot runs for longer than PGWAL_BUSY_TIMEOUT, SourceRefused for a table that is not followed, SlotLost if
    the slot is lost meanwhile.
    """
    ledger = Ledger(Lake(settings.lake))
    noted = Noted(progress)
    with slot.exclusive(settings.dsn, f"{settings.slot}/snapshot", settings.busy_timeout), connect(settings.dsn) as conn:
        if tables is not None:
            take_key(settings, ledger, tables)
            read_anew(ledger, tables)
        states = ledger.tables()
        if not states or any("raw" in state.unclean for state in states.values() if tables is None or state.table in tables):
            bootstrap(settings, progress=noted)
            states = ledger.tables()
        todo = [states[table] for table in needed(settings)] if tables is None else [_followed(states, table) for table in tables]
        anew = [state.location for state in todo if state.state == "error" and not _unread_alone(state)]
        if tables is not None:  # the user may know of damage that no run has met yet
            anew += [state.location for state in todo if state.location not in anew and not raw_is_whole(ledger.lake, state.location)]
        _rejoin(ledger, conn, anew, by_itself=tables is None)
        for state in todo:
            if tables is not None or state.location in anew:
                heal(ledger.lake, state.location)
        watch = SlotWatch(conn, settings.slot, noted)
        waiting = time.monotonic() + patience
        reports: list[SnapshotReport] = []
        waits: dict[TableName, str] = {}
        small, todo = _small(settings, conn, todo)
        locked: list[TableState] = []
        publication = Published(conn, settings.publication, settings.protection)
        for first in range(0, len(small), _GROUP_TABLES):
            planned_group = small[first : first + _GROUP_TABLES]
            group = _group(publication, conn, ledger, planned_group, anew=tables is not None)
            reports += SmallTables(settings, conn, ledger, group, noted, watch).run() if group else []
            together = {table.seen.location for table in group if not table.busy}
            todo += [state for state in planned_group if state.location not in together]
            for table in group:
                if table.error is not None:
                    noted.warn(str(table.error))
                    _record_error(ledger, table.state, table.error)
        for planned, patient_until in _in_turn(sorted(todo, key=lambda state: state.joined_xid or 0), locked):
            state = planned
            try:
                with table_work(ledger.lake, planned.table, "read", oid=planned.oid):
                    # A concurrent drain may find a change of the table at any time, and make it join anew.
                    known, waited = _at(ledger.tables(), planned.location), 0
                    while known is not None and (known.joined_xid or 0) > waited:
                        waited = known.joined_xid or 0
                        copy.wait_for_transactions(conn, waited, max(0.0, waiting - time.monotonic()), noted.warn)
                        known = _at(ledger.tables(), planned.location)
                    # By oid: a renamed table has its old name in the ledger until a drain finds that.
                    published = publication.now()
                    if known is None or known.oid not in published or not known.followed:
                        continue
                    state = known
                    with table_work(ledger.lake, known.table, "describe", oid=known.oid):
                        check_columns(published[known.oid].relation)
                    wait_until_free(conn, published[known.oid].relation, max(0.0, patient_until - time.monotonic()))
                    if tables is not None:
                        state = replace(state, reading=None)
                    reports.append(TableChunks(settings, conn, ledger, state, published[state.oid], noted, watch).run())
            except BlockedByTransaction as error:
                waits[state.table] = str(error)
                noted.warn(f"Table {state.table} cannot be read yet; a later run tries again: {error}")
                _record_wait(ledger, state, str(error))
            except TableError as error:
                if isinstance(error, TableLocked) and not patient_until:
                    locked.append(planned)
                    continue
                noted.warn(str(error))
                _record_error(ledger, state, error)
        if reports:
            slot.force_flush(conn)
    return SnapshotsReport(tuple(reports), tuple(noted.warnings), waits)


def _in_turn(tables: Iterable[TableState], locked: Iterable[TableState]) -> Iterator[tuple[TableState, float]]:
    """Yield `tables`, then those of them that have come to `locked` by then, with the time until which they may be waited for."""
    yield from ((table, 0.0) for table in tables)
    patient_until = time.monotonic() + _LOCKED_FOR
    yield from ((table, patient_until) for table in locked)


def _small(settings: Settings, conn: Connection, todo: list[TableState]) -> tuple[list[TableState], list[TableState]]:
    """Part the tables into those that seem small and the others."""
    oids = copy.seem_small(conn, [state.oid for state in todo], most_bytes(settings)) if len(todo) > 1 else ()
    return [state for state in todo if state.oid in oids], [state for state in todo if state.oid not in oids]


def _group(publication: Published, conn: Connection, ledger: Ledger, planned: list[TableState], *, anew: bool) -> list[SmallTable]:
    """Those of `planned` that can be read together: they wait for nobody, their columns can be kept, and none of their chunks is read."""
    states = first_of(ledger.tables().values())
    passed: dict[int, bool] = {0: True}
    found = [known for state in planned if (known := states.get(state.location)) is not None and known.followed]
    for known in found:
        xid = known.joined_xid or 0
        if xid not in passed:
            try:
                copy.wait_for_transactions(conn, xid, 0.0, lambda _: None)
                passed[xid] = True
            except BlockedByTransaction:
                passed[xid] = False
    published = publication.now()
    group = []
    for known in found:
        table = published.get(known.oid)
        if table is None or not passed[known.joined_xid or 0]:
            continue
        if not anew and known.reading is not None and ledger.chunks(known.location, known.reading):
            continue
        try:
            with table_work(ledger.lake, known.table, "describe", oid=known.oid):
                check_columns(table.relation)
        except TableError:
            continue  # it is met again where the table is read by itself
        group.append(SmallTable(known, table))
    return group


def _rejoin(ledger: Ledger, conn: Connection, locations: Collection[TableName], *, by_itself: bool) -> None:
    """Make tables join anew of which raw may lack changes: they are read once every transaction that wrote those has ended."""
    joined_xid, raw_from = next_xid(conn), catalog.insert_lsn(conn)

    def joining(state: TableState) -> TableState:
        unread = replace(state.without_error(), state="pending", generation=None, reading=None, published=None)
        return replace(unread, failures=state.failures, joined_xid=joined_xid, raw_from=raw_from, rereads=state.rereads + by_itself)

    ledger.amend_tables(lambda known: [joining(state) for state in known.values() if state.location in locations and state.followed])


def _record_wait(ledger: Ledger, state: TableState, reason: str) -> None:
    """Record in the ledger what a pending table waits for."""
    ledger.amend_tables(
        lambda known: [
            replace(found, reason=reason)
            for found in [_at(known, state.location)]
            if found is not None and found.oid == state.oid and found.state == "pending" and found.reason != reason
        ]
    )


def _record_error(ledger: Ledger, state: TableState, error: TableError) -> None:
    """Record that a table could not be read.

    One that was altered while it was read is not in error: it is read anew after a pause. So is one that is locked, which keeps the chunks
    that have been read.
    """
    now = datetime.now(UTC)

    def noted(known: TableState) -> TableState:
        if isinstance(error, copy.TableChanged | TableLocked):
            failures = known.failures + 1
            later = _to_be_read(known, str(error)) if isinstance(error, TableLocked) else _interrupted(known, str(error))
            return replace(later, failures=failures, retry_at=now + pause_after(failures))
        if error.stage == "describe":  # only a new catalog entry shows that the definition has been corrected
            return replace(known, reading=None).with_gap("describe", str(error), 0)
        return replace(known, reading=None).failed(error.stage or "read", str(error), now)

    ledger.amend_tables(
        lambda known: [noted(found) for found in [_at(known, state.location)] if found is not None and found.oid == state.oid]
    )


def _at(known: Mapping[TableName, TableState], location: TableName) -> TableState | None:
    """Return the table that has a location now; a concurrent drain may have found a new name of it."""
    return next((state for state in known.values() if state.oid and state.location == location), None)


def _interrupted(known: TableState, why: str) -> TableState:
    """Return the state of a table whose reading is void. A reason that a drain has recorded is kept.

    A table of which single rows were being read again has no snapshot in force, so it must be read whole.
    """
    state = "pending" if known.state == "ready" and known.generation is None else known.state
    # A ready table that was to be read again still is: a reading without chunks starts anew.
    reading = uuid.uuid4().hex if state == "ready" and known.reading is not None else None
    return replace(known, state=state, reading=reading, reason=known.reason or why)


def _to_be_read(known: TableState, why: str) -> TableState:
    """Return the state of a table that is locked. What of it has been read stays; a ready table that was to be read again still is."""
    reading = known.reading or (uuid.uuid4().hex if known.state == "ready" else None)
    return replace(known, reading=reading, reason=why if known.state in _PENDING else known.reason or why)


def _followed(states: dict[TableName, TableState], table: TableName) -> TableState:
    state = states.get(table)
    if state is None or not state.followed:
        why = f": {state.reason}" if state is not None and state.reason else ""
        raise SourceRefused(f"Table {table} is not followed{why}; `pgwal status` lists the tables that are.")
    return state

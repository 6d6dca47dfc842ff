"""Snapshots: read the rows from before the stream began, by ranges of the key, while the stream goes on.

A snapshot needs no slot, and the stream does not wait for it. Each chunk records the snapshot of its own short read. The publish applies an
event to a chunk's row only if the event's transaction was not visible in that snapshot.
"""

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pyarrow as pa

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.types import change_schema, copy_schema
from pgwal_pipeline.host.memory import give_back
from pgwal_pipeline.lake.damaged import heal, raw_is_whole
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Chunk, Ledger, TableState
from pgwal_pipeline.lake.raw import ensure_raw_table
from pgwal_pipeline.lake.records import pause_after
from pgwal_pipeline.lake.schema import check_columns
from pgwal_pipeline.lake.snapshots import SnapshotWriter
from pgwal_pipeline.messages.amounts import size
from pgwal_pipeline.messages.errors import BlockedByTransaction, SourceRefused, SourceUnavailable, TableError
from pgwal_pipeline.messages.progress import Noted, Progress
from pgwal_pipeline.pipeline.drain import bootstrap
from pgwal_pipeline.pipeline.reports import SnapshotReport, SnapshotsReport
from pgwal_pipeline.pipeline.slot_watch import SlotWatch
from pgwal_pipeline.pipeline.table_review import next_xid
from pgwal_pipeline.pipeline.table_rows import TableRows
from pgwal_pipeline.postgres import catalog, copy, slot
from pgwal_pipeline.postgres.catalog import PublishedTable
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

_PENDING = ("pending", "snapshotting")
_REREADS = 3  # automatic ones of a table in error, with PGWAL_ON_TABLE_ERROR=resnapshot
_CHECK_EVERY = 0.5  # seconds between checks of what the workers have read
_ATTEMPTS = 4  # for a chunk whose connection breaks
_PAUSE = 1.0  # seconds before the second attempt, doubled for each later one


def needed(settings: Settings) -> tuple[TableName, ...]:
    """Return the tables to read now: those that have joined but are not read whole yet, and those whose reading may be tried again."""
    now = datetime.now(UTC)
    return tuple(sorted(state.table for state in Ledger(Lake(settings.lake)).tables().values() if _is_due(state, settings, now)))


def _is_due(state: TableState, settings: Settings, now: datetime) -> bool:
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
    them. A table that cannot be read by its own fault goes to state `error`. Neither holds up the others.

    Raises SlotBusy if another snapshot runs for longer than PGWAL_BUSY_TIMEOUT, SourceRefused for a table that is not followed, SlotLost if
    the slot is lost meanwhile.
    """
    ledger = Ledger(Lake(settings.lake))
    noted = Noted(progress)
    with slot.exclusive(settings.dsn, f"{settings.slot}/snapshot", settings.busy_timeout), connect(settings.dsn) as conn:
        states = ledger.tables()
        if not states:
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
        for planned in sorted(todo, key=lambda state: state.joined_xid or 0):
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
                    published = {table.relation.oid: table for table in catalog.published_tables(conn, settings.publication)}
                    if known is None or known.oid not in published or not known.followed:
                        continue
                    state = known
                    with table_work(ledger.lake, known.table, "describe", oid=known.oid):
                        check_columns(published[known.oid].relation)
                    if tables is not None:
                        state = replace(state, reading=None)
                    reports.append(_TableRead(settings, conn, ledger, state, published[state.oid], noted, watch).run())
            except BlockedByTransaction as error:
                waits[state.table] = str(error)
                noted.warn(f"Table {state.table} cannot be read yet; a later run tries again: {error}")
                _record_wait(ledger, state, str(error))
            except TableError as error:
                noted.warn(str(error))
                _record_error(ledger, state, error)
        if reports:
            slot.force_flush(conn)
    return SnapshotsReport(tuple(reports), tuple(noted.warnings), waits)


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
    """Record that a table could not be read. One that was altered while it was read is not in error: it is read anew after a pause."""
    now = datetime.now(UTC)

    def noted(known: TableState) -> TableState:
        if isinstance(error, copy.TableChanged):
            failures = known.failures + 1
            return replace(_interrupted(known, str(error)), failures=failures, retry_at=now + pause_after(failures))
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


def _followed(states: dict[TableName, TableState], table: TableName) -> TableState:
    state = states.get(table)
    if state is None or not state.followed:
        why = f": {state.reason}" if state is not None and state.reason else ""
        raise SourceRefused(f"Table {table} is not followed{why}; `pgwal status` lists the tables that are.")
    return state


@dataclass
class _TableRead:
    """Reads one table with several workers."""

    settings: Settings
    conn: Connection
    ledger: Ledger
    state: TableState
    published: PublishedTable
    progress: Progress
    watch: SlotWatch
    _stop: threading.Event = field(default_factory=threading.Event)
    _planning: Future[None] = field(default_factory=Future)  # done once all chunks are in the ledger
    _rows: dict[int, int] = field(default_factory=dict)  # by chunk, while they are read
    _bytes: dict[int, int] = field(default_factory=dict)

    def run(self) -> SnapshotReport:
        """Read the chunks that are not read yet, and record the table as whole."""
        relation = self.published.relation
        started = time.time()
        with ExitStack() as stack:
            exported = stack.enter_context(copy.exported_snapshot(self.settings.dsn)) if not relation.key else None
            state = replace(self.state, relation=relation, key=relation.key)
            done: list[Chunk] = []
            # A table without a key is read under one snapshot, and the snapshot of an interrupted reading is gone.
            known = () if state.reading is None or exported is not None else self.ledger.chunks(state.location, state.reading)
            if known:
                done = [chunk for chunk in known if chunk.attempt is not None]
                missing = iter([chunk for chunk in known if chunk.attempt is None])
                self._planning.set_result(None)
            else:
                # A table in error must not be published meanwhile: the changes that raw lacks are only in its new rows.
                visible = "ready" if state.published is not None and state.state != "error" else "snapshotting"
                state = replace(state, state=visible, reason=None, reading=uuid.uuid4().hex, joined_xid=None)
                missing = self._planned(state)
            assert state.reading is not None
            self._amend(state, lambda known: None if _altered(known, self.state) else _begun(known, state))
            writer = SnapshotWriter(Lake(self.settings.lake), relation, state.reading, state.location)
            writer.begin(copy_schema(relation))
            if state.raw_from:  # its raw table may have been set aside
                ensure_raw_table(self.ledger.lake, state.location, change_schema(relation))
            self._rows = {chunk.chunk: chunk.rows for chunk in done}
            self._bytes = {chunk.chunk: chunk.bytes for chunk in done}
            done += self._read(missing, writer, exported)
        # TRUNCATE and rewriting DDL are not MVCC-safe: a read may show those that come after its snapshot, up to its end.
        required = max([catalog.insert_lsn(self.conn), *(chunk.insert_lsn or 0 for chunk in done)])
        self._amend(state, lambda known: _whole(known, state, required) if known.followed and known.reading == state.reading else None)
        failpoints.hit("snapshot.after_table")
        return SnapshotReport(
            table=state.table,
            rows=sum(chunk.rows for chunk in done),
            bytes=sum(chunk.bytes for chunk in done),
            chunks=len(done),
            seconds=time.time() - started,
            started=started,
        )

    def _amend(self, state: TableState, change: Callable[[TableState], TableState | None]) -> None:
        """Change the table's state in the ledger. Raises TableChanged if `change` returns None, because a drain has recorded a change."""
        refused = []

        def decide(known: Mapping[TableName, TableState]) -> list[TableState]:
            found = _at(known, state.location)
            changed = None if found is None else change(found)
            refused[:] = [] if changed is not None else [state.table]
            return [] if changed is None else [changed]

        self.ledger.amend_tables(decide)
        if refused:
            raise copy.TableChanged(str(state.table), f"Table {state.table} was altered while it was read; it is read again.")

    def _planned(self, state: TableState) -> Iterator[Chunk]:
        """Yield the chunks of a new reading as they are found. They are recorded after the last one; no read is recorded before that."""
        assert state.reading is not None
        chunks: list[Chunk] = []
        bounds = copy.plan_chunks(self.conn, self.published.relation, self.settings.snapshot_chunk_rows)
        for number, bound in enumerate(bounds):
            chunks.append(Chunk(table=state.location, generation=state.reading, chunk=number, lower=bound.lower, upper=bound.upper))
            yield chunks[-1]
        self.ledger.record_chunks(chunks)
        self._planning.set_result(None)

    def _read(self, chunks: Iterator[Chunk], writer: SnapshotWriter, exported: str | None) -> list[Chunk]:
        """Read chunks concurrently, the first ones while later ones are still being planned. The first failure stops the others."""
        estimate = copy.estimated_size(self.conn, self.published.relation)
        done: list[Chunk] = []
        pending: set[Future[Chunk]] = set()
        with ThreadPoolExecutor(self.settings.snapshot_workers, "pgwal-chunk") as pool:
            try:
                for chunk in chunks:
                    pending.add(pool.submit(self._read_chunk, chunk, writer, exported))
                    self._show(estimate, complete=False)
                    self.watch.check()
                while pending:
                    finished, pending = wait(pending, _CHECK_EVERY, FIRST_COMPLETED)
                    done += [future.result() for future in finished]
                    self._show(estimate, complete=not pending)
                    self.watch.check()
            finally:
                self._stop.set()
                self._planning.cancel()
                for future in pending:
                    future.cancel()
        return done

    def _show(self, estimate: tuple[int, int], *, complete: bool) -> None:
        rows, came = sum(self._rows.copy().values()), sum(self._bytes.copy().values())
        total = rows if complete else max(estimate[0], rows + 1)
        self.progress.stage(f"snapshot of {self.state.table}", rows, total, f"rows ({size(came)}; {size(estimate[1])} on disk)")

    def _read_chunk(self, chunk: Chunk, writer: SnapshotWriter, exported: str | None) -> Chunk:
        """Read one chunk, again if the connection breaks."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._attempt(chunk, writer, exported)
            except SourceUnavailable as error:
                # With an exported snapshot there is no second attempt: it may have ended with its own connection.
                if attempt == _ATTEMPTS - 1 or exported is not None or self._stop.wait(_PAUSE * 2**attempt):
                    raise
                self.progress.warn(f"Chunk {chunk.chunk} of {chunk.table} is read again: {error}")
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, chunk: Chunk, writer: SnapshotWriter, exported: str | None) -> Chunk:
        """Read one chunk and record the attempt; rows of an attempt that is not recorded are ignored."""
        attempt = uuid.uuid4().hex
        rows = TableRows(
            self.settings.dsn,
            self.published.relation,
            copy.ChunkBounds(chunk.lower, chunk.upper),
            row_filter=self.published.row_filter,
            exported_snapshot=exported,
            largest_row=self.settings.largest_row,
        )
        written = writer.write(attempt, self._counted(chunk.chunk, rows))
        failpoints.hit("snapshot.before_chunk_record")
        self._planning.result()
        read = rows.read
        assert read is not None
        finished = replace(chunk, attempt=attempt, rows=written.rows, bytes=read.bytes, snapshot=read.snapshot, insert_lsn=read.insert_lsn)
        self.ledger.record_chunks([finished])
        self._bytes[chunk.chunk] = read.bytes
        give_back()
        return finished

    def _counted(self, number: int, rows: TableRows) -> Iterator[pa.Table]:
        self._rows[number] = self._bytes[number] = 0
        for piece in rows:
            self._rows[number] += piece.num_rows
            self._bytes[number] += piece.nbytes
            yield piece
        failpoints.hit("snapshot.between_read_and_write")


def _altered(known: TableState, seen: TableState) -> bool:
    """Return whether a concurrent drain has recorded a change of a table since `seen`."""
    return (known.oid, known.state, known.reason, known.storage) != (seen.oid, seen.state, seen.reason, seen.storage)


def _begun(known: TableState, state: TableState) -> TableState:
    """Return the table's state once its reading has begun; what a drain has recorded meanwhile stays."""
    return replace(
        known,
        state=state.state,
        reason=state.reason,
        reading=state.reading,
        joined_xid=state.joined_xid,
        relation=state.relation,
        key=state.key,
    )


def _whole(known: TableState, state: TableState, required_lsn: int) -> TableState:
    """Return the table's state once every chunk has been read; what a drain has recorded of its columns meanwhile stays."""
    whole = replace(known.without_error(), state="ready", reading=None, joined_xid=None)
    return replace(whole, generation=state.reading, required_lsn=required_lsn)

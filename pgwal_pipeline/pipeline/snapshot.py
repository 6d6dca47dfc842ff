"""Snapshots: the rows that were there before the stream, read by ranges of the key while the stream goes on.

No slot is made for a snapshot and nothing of the stream waits for it: each chunk notes which transactions its own short read saw, and the
publish applies an event on top of a chunk's row only if the event's transaction was not among them.
"""

import time
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.types import copy_schema
from pgwal_pipeline.errors import SourceRefused, TableError
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Chunk, Ledger, TableState
from pgwal_pipeline.lake.snapshots import SnapshotWriter
from pgwal_pipeline.pipeline.drain import bootstrap
from pgwal_pipeline.pipeline.reports import SnapshotReport
from pgwal_pipeline.pipeline.table_rows import TableRows
from pgwal_pipeline.postgres import catalog, copy, slot
from pgwal_pipeline.postgres.catalog import PublishedTable
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.progress import Progress
from pgwal_pipeline.relation import TableName
from pgwal_pipeline.settings import Settings

_PENDING = ("pending", "snapshotting")


def needed(settings: Settings) -> tuple[TableName, ...]:
    """The tables that have joined but are not read whole yet."""
    states = Ledger(Lake(settings.lake)).tables().values()
    return tuple(sorted(state.table for state in states if state.state in _PENDING or state.reading is not None))


def snapshot(settings: Settings, tables: Collection[TableName] | None = None, *, progress: Progress) -> tuple[SnapshotReport, ...]:
    """Read the tables that need it, or `tables` again from the start, and leave them ready for the next publish that passes their LSN.

    A read that died is taken up where it stood: finished chunks are not read again. While a table is read again, its old `current` goes on.
    Raises SlotBusy while another snapshot runs, SourceRefused for a table that is not followed.
    """
    ledger = Ledger(Lake(settings.lake))
    with slot.exclusive(settings.dsn, f"{settings.slot}/snapshot", settings.busy_timeout), connect(settings.dsn) as conn:
        states = ledger.tables()
        if not states:
            bootstrap(settings, progress=progress)
            states = ledger.tables()
        todo = [states[table] for table in needed(settings)] if tables is None else [_begin_anew(states, table) for table in tables]
        published = {table.relation.table: table for table in catalog.published_tables(conn, settings.publication)}
        reports = []
        for state in todo:
            if state.table not in published:
                continue
            try:
                reports.append(_read_table(settings, conn, ledger, state, published[state.table], progress))
            except TableError as error:
                progress.warn(str(error))
                _note(ledger, state, error)
        if reports:
            slot.force_flush(conn)
    return tuple(reports)


def _note(ledger: Ledger, state: TableState, error: TableError) -> None:
    """Put a table that cannot be read in error; one that was altered under the reader's hands is begun anew the next time."""
    if isinstance(error, copy.TableChanged):
        ledger.amend_tables(lambda known: [replace(known.get(state.table, state), reading=None, reason=str(error))])
    else:
        ledger.amend_tables(lambda known: [replace(known.get(state.table, state), state="error", reading=None, reason=str(error))])


def _begin_anew(states: dict[TableName, TableState], table: TableName) -> TableState:
    state = states.get(table)
    if state is None or state.state in ("skipped", "gone"):
        why = f": {state.reason}" if state is not None and state.reason else ""
        raise SourceRefused(f"Table {table} is not followed{why}; `pgwal status` lists the tables that are.")
    return replace(state, reading=None)


def _read_table(
    settings: Settings, conn: psycopg.Connection[Any], ledger: Ledger, state: TableState, published: PublishedTable, progress: Progress
) -> SnapshotReport:
    relation = published.relation
    state = replace(state, relation=relation, key=relation.key)
    if state.joined_xid is not None:
        copy.wait_for_transactions(conn, state.joined_xid, settings.blocked_timeout, progress.warn)
    started = time.time()
    visible = "ready" if state.published is not None else "snapshotting"
    if state.reading is None:
        state = replace(state, state=visible, reason=None, reading=uuid.uuid4().hex, joined_xid=None)
        assert state.reading is not None
        bounds = copy.plan_chunks(conn, relation, settings.snapshot_chunk_rows)
        ledger.record_chunks(
            [
                Chunk(table=state.table, generation=state.reading, chunk=number, lower=bound.lower, upper=bound.upper)
                for number, bound in enumerate(bounds)
            ]
        )
    ledger.record_tables([state])
    assert state.reading is not None
    chunks = ledger.chunks(state.table, state.reading)
    writer = SnapshotWriter(Lake(settings.lake), relation, state.reading)
    writer.begin(copy_schema(relation))
    reader = _ChunkReader(settings, ledger, published, writer)
    done = [chunk for chunk in chunks if chunk.attempt is not None]
    with ThreadPoolExecutor(settings.snapshot_workers, "pgwal-chunk") as pool:
        pending = [pool.submit(reader.read, chunk) for chunk in chunks if chunk.attempt is None]
        try:
            for future in as_completed(pending):
                done.append(future.result())
                progress.stage(f"snapshot of {state.table}", len(done), len(chunks), "chunks")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    # TRUNCATE and rewriting DDL are not MVCC-safe: only what was written after the last read is surely in the stream alone.
    required = max([catalog.insert_lsn(conn), *(chunk.insert_lsn or 0 for chunk in done)])
    ledger.amend_tables(lambda known: [_whole(known.get(state.table, state), state, required)])
    failpoints.hit("snapshot.after_table")
    return SnapshotReport(
        table=state.table,
        rows=sum(chunk.rows for chunk in done),
        bytes=sum(chunk.bytes for chunk in done),
        chunks=len(done),
        seconds=time.time() - started,
        started=started,
    )


def _whole(known: TableState, state: TableState, required_lsn: int) -> TableState:
    """The table's state once every chunk is there; what the stream has said of its columns meanwhile stays."""
    return replace(known, state="ready", reason=None, reading=None, joined_xid=None, generation=state.reading, required_lsn=required_lsn)


@dataclass(frozen=True)
class _ChunkReader:
    settings: Settings
    ledger: Ledger
    published: PublishedTable
    writer: SnapshotWriter

    def read(self, chunk: Chunk) -> Chunk:
        """Read one range in a transaction of its own and record it; rows of an attempt that is not recorded count for nothing."""
        attempt = uuid.uuid4().hex
        bounds = copy.ChunkBounds(chunk.lower, chunk.upper)
        rows = TableRows(self.settings.dsn, self.published.relation, bounds, row_filter=self.published.row_filter)
        written = self.writer.write(attempt, _after_read(rows))
        failpoints.hit("snapshot.before_chunk_record")
        read = rows.read
        assert read is not None
        finished = replace(chunk, attempt=attempt, rows=written.rows, bytes=read.bytes, snapshot=read.snapshot, insert_lsn=read.insert_lsn)
        self.ledger.record_chunks([finished])
        return finished


def _after_read(rows: TableRows) -> Iterator[pa.Table]:
    yield from rows
    failpoints.hit("snapshot.between_read_and_write")

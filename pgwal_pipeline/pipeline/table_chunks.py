"""Read one table in chunks, several side by side. Chunks that are finished stay finished, whatever ends the reading."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pyarrow as pa

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.types import change_schema, copy_schema
from pgwal_pipeline.host.memory import give_back
from pgwal_pipeline.lake import cleaning
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Chunk, Ledger, TableState
from pgwal_pipeline.lake.raw import ensure_raw_table
from pgwal_pipeline.lake.snapshots import SnapshotWriter
from pgwal_pipeline.messages.amounts import size
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.reading_states import altered, begun, begun_state, first_of, whole
from pgwal_pipeline.pipeline.reports import SnapshotReport
from pgwal_pipeline.pipeline.slot_watch import SlotWatch
from pgwal_pipeline.pipeline.table_rows import Range, TableRows
from pgwal_pipeline.postgres import catalog, copy
from pgwal_pipeline.postgres.catalog import PublishedTable
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

_CHECK_EVERY = 0.5  # seconds between checks of what the workers have read
_ATTEMPTS = 4  # for a chunk whose connection breaks
_PAUSE = 1.0  # seconds before the second attempt, doubled for each later one


@dataclass
class TableChunks:
    """The reading of one table by ranges of its key, with several workers."""

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
        """Read the chunks that are not read yet, and record the table as whole.

        Raises TableError for the table's own fault, SourceUnavailable if the connection breaks again and again.
        """
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
                state = begun_state(self.state, self.published)
                missing = self._planned(state)
            assert state.reading is not None
            if "snapshot" in self.state.unclean:
                cleaning.clean_snapshots(self.ledger.lake, state.location)
            self._amend(state, lambda known: None if altered(known, self.state) else begun(known, state))
            writer = SnapshotWriter(Lake(self.settings.lake), relation, state.reading, state.location)
            writer.begin(copy_schema(relation))
            if state.raw_from:  # its raw table may have been set aside
                ensure_raw_table(self.ledger.lake, state.location, change_schema(relation))
            self._rows = {chunk.chunk: chunk.rows for chunk in done}
            self._bytes = {chunk.chunk: chunk.bytes for chunk in done}
            done += self._read(missing, writer, exported)
        # TRUNCATE and rewriting DDL are not MVCC-safe: a read may show those that come after its snapshot, up to its end.
        required = max([catalog.insert_lsn(self.conn), *(chunk.insert_lsn or 0 for chunk in done)])
        self._amend(state, lambda known: whole(known, state, required) if known.followed and known.reading == state.reading else None)
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
            found = first_of(known.values()).get(state.location)
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
        every = Range(self.published.relation, copy.ChunkBounds(chunk.lower, chunk.upper), self.published.row_filter)
        with TableRows(self.settings.dsn, [every], exported, self.settings.largest_row, key=self.settings.protection.key) as rows:
            written = writer.write(attempt, self._counted(chunk.chunk, rows.pieces(0)))
        failpoints.hit("snapshot.before_chunk_record")
        self._planning.result()
        read = rows.reads[0]
        finished = replace(chunk, attempt=attempt, rows=written.rows, bytes=read.bytes, snapshot=read.snapshot, insert_lsn=read.insert_lsn)
        self.ledger.record_chunks([finished])
        self._bytes[chunk.chunk] = read.bytes
        give_back()
        return finished

    def _counted(self, number: int, rows: Iterator[pa.Table]) -> Iterator[pa.Table]:
        self._rows[number] = self._bytes[number] = 0
        for piece in rows:
            self._rows[number] += piece.num_rows
            self._bytes[number] += piece.nbytes
            yield piece
        failpoints.hit("snapshot.between_read_and_write")

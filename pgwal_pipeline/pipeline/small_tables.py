"""Read small tables in groups: one transaction and one ledger commit serve many of them."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import pyarrow as pa

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.types import change_schema, copy_schema
from pgwal_pipeline.host.memory import give_back
from pgwal_pipeline.lake import cleaning
from pgwal_pipeline.lake.delta import side_by_side
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.ledger import Chunk, Ledger, TableState
from pgwal_pipeline.lake.raw import ensure_raw_table
from pgwal_pipeline.lake.snapshots import SnapshotWriter, Staged
from pgwal_pipeline.messages.errors import SourceUnavailable, TableError
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

_ROW_BYTES = 28  # at least, of a row in its table's file
_MOST_BYTES = 1 << 20  # on disk, of a table that is read together with others
_CHECK_EVERY = 0.5  # seconds between checks of what the workers have read
_ATTEMPTS = 4  # for tables whose connection breaks
_PAUSE = 1.0  # seconds before the second attempt, doubled for each later one


def most_bytes(settings: Settings) -> int:
    """Return the largest size on disk, in bytes, of a small table: it has fewer rows than a chunk."""
    return min(_MOST_BYTES, settings.snapshot_chunk_rows * _ROW_BYTES)


@dataclass
class SmallTable:
    """A small table that is to be read: its state as it was in the ledger, then as its reading has begun."""

    seen: TableState
    published: PublishedTable
    state: TableState = field(init=False)
    chunk: Chunk = field(init=False)
    writer: SnapshotWriter | None = None
    staged: Staged | None = None
    read: bool = False  # its chunk is in the ledger
    busy: bool = False  # it is to be read by itself
    error: TableError | None = None
    began: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        relation = self.published.relation
        self.state = begun_state(self.seen, self.published)
        self.chunk = Chunk(table=self.state.location, generation=self.state.reading or "", chunk=0)
        self.range = Range(relation, copy.ChunkBounds(None, None), self.published.row_filter)

    @property
    def open(self) -> bool:
        """Return whether the table still has to be read."""
        return not (self.read or self.busy or self.error)

    def discard(self) -> None:
        """Remove the files that were written of the table."""
        if self.writer is not None and self.staged is not None:
            self.writer.discard(self.staged)

    def report(self) -> SnapshotReport:
        """Return what was read of the table."""
        return SnapshotReport(self.state.table, self.chunk.rows, self.chunk.bytes, 1, self.seconds, self.began)


@dataclass
class SmallTables:
    """The reading of a group of small tables. `run` leaves in each of them what became of it."""

    settings: Settings
    conn: Connection
    ledger: Ledger
    tables: Sequence[SmallTable]
    progress: Progress
    watch: SlotWatch
    _stopped: bool = False

    def run(self) -> list[SnapshotReport]:
        """Read the tables that can be read together, record them as whole and report them.

        The fault of one is its `error`; one that is locked, or larger than it seemed, is `busy`. Files that are not committed are removed
        if the reading ends with an error; vacuum removes those of a process that died.
        """
        for table in self.tables:
            if "snapshot" in table.seen.unclean:
                cleaning.clean_snapshots(self.ledger.lake, table.seen.location)
        self._amend(self.tables, lambda known, table: None if altered(known, table.seen) else begun(known, table.state))
        count = min(self.settings.snapshot_workers, len(self.tables))
        with ThreadPoolExecutor(count, "pgwal-small") as pool:
            try:
                pending = {pool.submit(self._read_part, self.tables[number::count]) for number in range(count)}
                while pending:
                    finished, pending = wait(pending, _CHECK_EVERY, FIRST_COMPLETED)
                    for future in finished:
                        future.result()
                    done = sum(not table.open for table in self.tables)
                    self.progress.stage("snapshot of small tables", done, len(self.tables), "tables")
                    self.watch.check()
            finally:
                self._stopped = True
        give_back()
        # TRUNCATE and rewriting DDL are not MVCC-safe: a read may show those that come after its snapshot, up to its end.
        required = catalog.insert_lsn(self.conn)

        def finished_state(known: TableState, table: SmallTable) -> TableState | None:
            least = max(required, table.chunk.insert_lsn or 0)
            return whole(known, table.state, least) if known.followed and known.reading == table.state.reading else None

        self._amend([table for table in self.tables if table.read], finished_state)
        reports = [table.report() for table in self.tables if table.read and table.error is None]
        for _ in reports:
            failpoints.hit("snapshot.after_table")
        return reports

    def _amend(self, tables: Sequence[SmallTable], change: Callable[[TableState, SmallTable], TableState | None]) -> None:
        """Write down in one commit what becomes of tables; one for which `change` gives None was altered meanwhile."""
        refused: list[SmallTable] = []

        def decide(known: Mapping[TableName, TableState]) -> list[TableState]:
            refused.clear()
            at = first_of(known.values())
            changed = []
            for table in tables:
                found = at.get(table.state.location)
                state = None if found is None else change(found, table)
                if state is None:
                    refused.append(table)
                else:
                    changed.append(state)
            return changed

        self.ledger.amend_tables(decide)
        for table in refused:
            name = table.state.table
            table.error = copy.TableChanged(str(name), f"Table {name} was altered while it was read; it is read again.")

    def _read_part(self, tables: Sequence[SmallTable]) -> None:
        """Read tables in one transaction; those that are left in a new one where the connection broke, the one that it broke at last."""
        left = list(tables)
        for attempt in range(_ATTEMPTS):
            broken = self._attempt(left) if left else None
            if broken is None or self._stopped:
                return
            at, error = broken
            if attempt == _ATTEMPTS - 1:
                raise error
            self.progress.warn(f"Small tables are read again: {error}")
            left = [*(table for table in left if table.open and table is not at), at]
            time.sleep(_PAUSE * 2**attempt)

    def _attempt(self, tables: Sequence[SmallTable]) -> tuple[SmallTable, SourceUnavailable] | None:
        """Read, commit and record tables; returns the table at which the connection broke, and the error."""
        staged = list[SmallTable]()
        try:
            broken = self._stage_all(tables, staged)
        except BaseException:
            for table in staged:
                table.discard()
            raise
        side_by_side(self._commit, staged)
        failpoints.hit("snapshot.before_chunk_record")
        committed = [table for table in staged if table.error is None]
        self.ledger.record_chunks([table.chunk for table in committed])
        for table in committed:
            table.read = True
        return broken

    def _stage_all(self, tables: Sequence[SmallTable], staged: list[SmallTable]) -> tuple[SmallTable, SourceUnavailable] | None:
        """Write the files of tables, adding each to `staged`, until the connection breaks or the reading is stopped."""
        ranges = [table.range for table in tables]
        with TableRows(
            self.settings.dsn,
            ranges,
            largest_row=self.settings.largest_row,
            most_bytes=most_bytes(self.settings),
            key=self.settings.protection.key,
        ) as rows:
            for number, table in enumerate(tables):
                if self._stopped:
                    return None
                try:
                    with table_work(self.ledger.lake, table.state.table, "read", oid=table.state.oid):
                        self._stage(table, rows, number)
                    staged.append(table)
                except copy.TableBusy:
                    table.busy = True
                except TableError as error:
                    table.error = error
                except SourceUnavailable as error:
                    return table, error
        return None

    def _stage(self, table: SmallTable, rows: TableRows, number: int) -> None:
        table.began = time.time()
        relation, state = table.published.relation, table.state
        table.writer = SnapshotWriter(self.ledger.lake, relation, state.reading or "", state.location)
        table.writer.begin(copy_schema(relation), create=False)
        if state.raw_from:  # its raw table may have been set aside
            ensure_raw_table(self.ledger.lake, state.location, change_schema(relation))
        attempt = uuid.uuid4().hex
        table.staged = table.writer.stage(attempt, _to_the_end(rows.pieces(number)))
        read = rows.reads[number]
        table.chunk = replace(
            table.chunk, attempt=attempt, rows=read.rows, bytes=read.bytes, snapshot=read.snapshot, insert_lsn=read.insert_lsn
        )

    def _commit(self, table: SmallTable) -> None:
        assert table.writer is not None
        assert table.staged is not None
        try:
            with table_work(self.ledger.lake, table.state.table, "read", oid=table.state.oid):
                table.writer.commit(table.staged, creating=True)
        except TableError as error:
            table.error = error
        table.seconds = time.time() - table.began


def _to_the_end(pieces: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yield from pieces
    failpoints.hit("snapshot.between_read_and_write")

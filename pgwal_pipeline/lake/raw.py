"""Write raw: every change of a table, append-only, one partition per window.

A window's Parquet files are written while the stream is read; at first no Delta table names them. They count once the ledger names them
(`prepared`). `commit_window` then adds them to their Delta tables; it may be repeated until it succeeds.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.delta import (
    ATTEMPTS,
    Clash,
    commit,
    crowded,
    ensure_table,
    lake_errors,
    missing_fields,
    open_table,
    side_by_side,
)
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.locations import Locations
from pgwal_pipeline.lake.parquet import ParquetFile, add_action, discard_file, move, new_file_name, plain_schema, plain_tables
from pgwal_pipeline.lake.records import FileWrite, TableWrite
from pgwal_pipeline.lake.schema import changed_type, check_columns, check_old_keys, fitted, partitioned_schema
from pgwal_pipeline.messages.errors import FileGone, TableError
from pgwal_pipeline.values.lsn import parse_window_key
from pgwal_pipeline.values.own_columns import COMMIT_LSN, COMMITTED_AT, OP, WINDOW
from pgwal_pipeline.values.relation import Relation, TableName

__all__ = [
    "Changes",
    "FileWrite",
    "TableWrite",
    "WindowWriter",
    "check_columns",
    "commit_window",
    "ensure_raw_table",
]

_MARKER = "pgwal_windows"
CONFIGURATION = {
    "delta.dataSkippingStatsColumns": COMMIT_LSN,
    "delta.deletedFileRetentionDuration": "interval 1 days",
    # Every reader and writer of a table lists the commits that are kept, and there may be one every few seconds.
    "delta.logRetentionDuration": "interval 6 hours",
    "delta.checkpointInterval": "50",
}
_COLUMN_COST = 512  # bytes, about: what an Arrow array takes besides its values
_LOOSE = 64
_BY_NAME = Locations()


class Changes(Protocol):
    """Decoded changes of one table; `decode.batch.TableChanges` is one."""

    @property
    def relation(self) -> Relation:
        """The table as it was when the changes were made."""
        ...

    @property
    def rows(self) -> pa.Table:
        """The changes, with the source's columns and those that raw adds, except the partition's."""
        ...

    @property
    def inserts(self) -> int:
        """How many rows are inserts."""
        ...

    @property
    def updates(self) -> int:
        """How many rows are updates."""
        ...

    @property
    def deletes(self) -> int:
        """How many rows are deletes."""
        ...

    @property
    def truncates(self) -> int:
        """How many rows are TRUNCATEs."""
        ...

    @property
    def key_changes(self) -> int:
        """How many rows hold the old key of an update."""
        ...

    @property
    def unchanged(self) -> bool:
        """Whether any row leaves out an unchanged TOAST value."""
        ...


@dataclass(slots=True)
class _Buffer:
    """One table's part of a window: buffered rows, all of one schema, and files that are being written or done."""

    location: TableName
    table: TableName
    oid: int
    folder: str
    standing: Future[Schema | None]
    arrow: pa.Schema
    write: TableWrite
    schema: Schema | None = None
    rows: list[pa.Table] = field(default_factory=list)
    loose: list[pa.Table] = field(default_factory=list)
    bytes: int = 0
    files: list[Future[FileWrite]] = field(default_factory=list)

    def take(self) -> list[pa.Table]:
        """Empty the buffer and return its rows."""
        taken = self.rows + self.loose
        self.rows, self.loose, self.bytes = [], [], 0
        return taken


class WindowWriter:
    """Writes the changes of one window to Parquet files in the raw tables' folders; no commit names them yet.

    It holds at most about `budget` bytes of rows, and writes out the largest table first, while it takes in more. With the window's `key`
    the files go straight into its partition's folder; without it `commit_window` moves them there. `expected` are the schemas that raw
    tables, by their paths, will have once earlier windows are committed. Only one thread may use a writer. As a context manager it removes
    its files when the block fails. Its methods raise LakeError if the lake cannot be written.

    `locations` gives each table's location in the lake, by which tables are told apart. An error that is one table's own fault leaves that
    table out of the window and goes into `refused`, by location; the other tables go on.
    """

    def __init__(
        self,
        lake: Lake,
        budget: int,
        key: str | None = None,
        expected: Mapping[str, Schema] | None = None,
        locations: Locations = _BY_NAME,
    ) -> None:
        self._lake = lake
        self._places = locations
        self._expected = expected or {}
        self._budget = budget
        self._partition = "" if key is None else f"{WINDOW}={key}/"
        self._buffers: dict[TableName, _Buffer] = {}
        self.refused: dict[TableName, TableError] = {}
        self._waiting = 0
        self._under_way: dict[Future[FileWrite], tuple[TableName, int]] = {}
        self._pool = ThreadPoolExecutor(2 if lake.is_local else 8, "pgwal-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abandon()

    def add(self, changes: Changes) -> None:
        """Add rows to the window. Rows of a refused table are dropped."""
        location, table = self._places.find(changes.relation)
        if location not in self.refused:
            self._for_one(location, table, changes.relation.oid, lambda: self._take(changes, location, table))
        self._make_room()

    @property
    def held(self) -> int:
        """About how many bytes of rows are buffered or being written."""
        return self._waiting + sum(size for _, size in self._under_way.values())

    def refuse(self, location: TableName, error: TableError) -> None:
        """Leave a table out of the window, and remove its files."""
        self.refused.setdefault(location, error)
        self._drop(location)

    def _for_one(self, location: TableName, table: TableName, oid: int, work: Callable[[], object]) -> None:
        """Do work for one table, and refuse the table if the work fails by its own fault."""
        try:
            with table_work(self._lake, table, "write", oid=oid):
                work()
        except TableError as error:
            self.refuse(location, error)

    def _take(self, changes: Changes, location: TableName, table: TableName) -> None:
        check_old_keys(changes.relation, changes.rows)
        buffer = self._buffer(changes, location, table)
        write, (lsn, at) = buffer.write, _newest(changes.rows)
        buffer.write = replace(
            write,
            rows=write.rows + changes.rows.num_rows,
            inserts=write.inserts + changes.inserts,
            updates=write.updates + changes.updates,
            deletes=write.deletes + changes.deletes,
            truncates=write.truncates + changes.truncates,
            key_changes=write.key_changes + changes.key_changes,
            unchanged=write.unchanged or changes.unchanged,
            newest_lsn=max(write.newest_lsn, lsn),
            newest_at=max(write.newest_at, at),
        )
        for piece in plain_tables(changes.rows, buffer.arrow) if changes.rows.num_rows else ():
            size = piece.nbytes + _COLUMN_COST * piece.num_columns
            buffer.loose.append(piece)
            buffer.bytes += size
            self._waiting += size
        if len(buffer.loose) >= _LOOSE:
            buffer.rows.append(pa.concat_tables(buffer.loose).combine_chunks())
            buffer.loose = []

    def finish(self) -> tuple[TableWrite, ...]:
        """Write out the buffered rows, and return what each table got, in the order of the names.

        The files are on disk then, and the writer does not remove them any more.
        """
        writes: list[TableWrite] = []

        def whole(buffer: _Buffer) -> None:
            files = tuple(file.result() for file in buffer.files)
            writes.append(replace(buffer.write, schema_json=_fit(buffer)[0].to_json(), files=files))

        self._for_each(self._flush)
        self._for_each(whole)
        self._pool.shutdown()
        self._buffers.clear()
        return tuple(writes)

    def cut(self, lsn: int) -> None:
        """Drop the rows of transactions with a commit LSN of `lsn` or later, also from files that are written."""
        self._for_each(self._flush)
        self._for_each(lambda buffer: self._cut_files(buffer, lsn))

    def _for_each(self, work: Callable[[_Buffer], None]) -> None:
        """Do the same for each table, in the order of their locations."""
        for location, buffer in sorted(self._buffers.items()):
            self._for_one(location, buffer.table, buffer.oid, partial(work, buffer))

    def _cut_files(self, buffer: _Buffer, lsn: int) -> None:
        cuts = [_cut_file(self._lake, buffer.folder, future.result(), lsn) for future in buffer.files]
        files = [file for file, _ in cuts if file is not None]
        buffer.files = [_finished(file) for file in files]
        ops = sum((dropped for _, dropped in cuts), Counter[str]())
        write = buffer.write
        if ops:
            write = replace(write, newest_lsn=max(map(_last_lsn, files), default=0), newest_at=0)
        buffer.write = replace(
            write,
            rows=write.rows - ops.total(),
            inserts=write.inserts - ops["I"],
            updates=write.updates - ops["U"],
            deletes=write.deletes - ops["D"],
            truncates=write.truncates - ops["T"],
            key_changes=write.key_changes - ops["K"],
        )

    def abandon(self) -> None:
        """Stop writing, and remove the files that were written."""
        self._pool.shutdown(cancel_futures=True)
        for location in list(self._buffers):
            self._drop(location)

    def _buffer(self, changes: Changes, location: TableName, table: TableName) -> _Buffer:
        """The buffer of `table`, ready for rows with the schema of `changes`."""
        arrow = plain_schema(changes.rows.schema)
        buffer = self._buffers.get(location)
        if buffer is not None and arrow.equals(buffer.arrow):
            return buffer
        check_columns(changes.relation)
        if buffer is not None:
            self._flush(buffer)
            buffer.arrow = arrow
            return buffer
        path = self._lake.raw(location)
        standing = self._pool.submit(_standing_schema, self._lake, path, self._expected)
        write = TableWrite(table=str(table), path=path, schema_json="")
        folder = self._lake.layer_path("raw", location)
        buffer = self._buffers[location] = _Buffer(location, table, changes.relation.oid, folder, standing, arrow, write)
        return buffer

    def _make_room(self) -> None:
        """Write out the largest tables: in the background from half of the budget on, and wait once the budget is used up."""
        while self._waiting > self._budget // 2:
            location, buffer = max(self._buffers.items(), key=lambda item: item[1].bytes)
            self._for_one(location, buffer.table, buffer.oid, partial(self._flush, buffer))
        while self.held > self._budget and self._under_way:
            done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
            for file in done:
                self._end(file)

    def _end(self, file: Future[FileWrite]) -> None:
        """Check how the writing of a file ended. If it failed and its table is refused, the table's other files are no longer under way."""
        location, _ = self._under_way.pop(file, (None, 0))
        buffer = None if location is None else self._buffers.get(location)
        if location is not None and buffer is not None:
            self._for_one(location, buffer.table, buffer.oid, file.result)

    def _flush(self, buffer: _Buffer) -> None:
        """Start to write a table's buffered rows to one file."""
        if not buffer.bytes:
            return
        buffer.schema, named = _fit(buffer)
        size, rows = buffer.bytes, buffer.take()
        self._waiting -= size
        path = f"{buffer.folder}/{self._partition}{new_file_name()}"
        file = self._pool.submit(_write_file, self._lake, path, buffer.folder, named, rows)
        self._under_way[file] = buffer.location, size
        buffer.files.append(file)

    def _drop(self, location: TableName) -> None:
        """Drop a table's rows from the window, and remove its files."""
        buffer = self._buffers.pop(location, None)
        if buffer is None:
            return
        self._waiting -= buffer.bytes
        for file in buffer.files:
            self._under_way.pop(file, None)
            if not file.cancel() and file.exception() is None:
                discard_file(self._lake, f"{buffer.folder}/{file.result().path}")


def _fit(buffer: _Buffer) -> tuple[Schema, pa.Schema]:
    """The Delta schema that the table needs to take the buffer's rows, and the schema of those rows with the names they get there."""
    has = buffer.schema or buffer.standing.result() or Schema([])
    named = fitted(has, buffer.arrow)
    return Schema([*has.fields, *missing_fields(has, partitioned_schema(named, WINDOW))]), named


def _standing_schema(lake: Lake, path: str, expected: Mapping[str, Schema] | None = None) -> Schema | None:
    if expected and path in expected:
        return expected[path]
    table = open_table(lake, path)
    return None if table is None else table.schema()


def _write_file(lake: Lake, path: str, folder: str, schema: pa.Schema, rows: list[pa.Table]) -> FileWrite:
    with lake_errors(lake.absolute(path)):
        file = ParquetFile(lake, path, schema, [COMMIT_LSN])
        try:
            file.write(pa.concat_tables(rows).rename_columns(schema.names))
            rows.clear()
            return file.close(folder)
        except BaseException:
            file.discard()
            raise


def _cut_file(lake: Lake, folder: str, file: FileWrite, lsn: int) -> tuple[FileWrite | None, Counter[str]]:
    """Rewrite a file without the rows from commit LSN `lsn` on; return it and the dropped rows' count by `_pgwal_op`.

    The file is None if no row is left.
    """
    if _last_lsn(file) < lsn:
        return file, Counter()
    path = f"{folder}/{file.path}"
    with lake_errors(lake.absolute(path)):
        with filesystem(lake.uri).open_input_file(path) as stream:
            rows = pq.ParquetFile(stream, page_checksum_verification=True).read()
        beyond = rows.filter(pc.field(COMMIT_LSN) >= lsn)
        kept = rows.filter(pc.field(COMMIT_LSN) < lsn)
        name = f"{PurePosixPath(file.path).parent}/{new_file_name()}"
        written = _write_file(lake, f"{folder}/{name}", folder, kept.schema, [kept]) if kept.num_rows else None
    discard_file(lake, path)
    return written, Counter(beyond[OP].to_pylist())


def _last_lsn(file: FileWrite) -> int:
    return json.loads(file.stats)["maxValues"].get(COMMIT_LSN, 0)


def _newest(rows: pa.Table) -> tuple[int, int]:
    """Return the newest commit LSN and commit time of changes; see `TableWrite`."""
    if not rows.num_rows:
        return 0, 0
    return pc.max(rows[COMMIT_LSN]).as_py(), pc.max(rows[COMMITTED_AT]).value  # pyright: ignore[reportAttributeAccessIssue]


def _finished(file: FileWrite) -> Future[FileWrite]:
    done: Future[FileWrite] = Future()
    done.set_result(file)
    return done


def ensure_raw_table(lake: Lake, location: TableName, rows: pa.Schema) -> str:
    """Make sure that the raw table of `location` exists with the columns of `rows`, the schema of its decoded changes; return its path.

    Missing columns are added. A column that exists with another type gets a second column for the new type.
    """
    path = lake.raw(location)
    wanted = partitioned_schema(fitted(_standing_schema(lake, path) or Schema([]), plain_schema(rows)), WINDOW)
    try:
        ensure_table(lake, path, wanted, partition_by=[WINDOW], configuration=CONFIGURATION)
    except Clash as clash:
        raise changed_type(location, clash) from None
    return path


def commit_window(lake: Lake, key: str, writes: Iterable[TableWrite]) -> dict[str, TableError]:
    """Commit a window's files to their raw tables, one commit per table; tables are created and get new columns as needed.

    Skips what has been committed already: it may be called again after a crash, with the writes from the ledger's record, and by two
    processes at once. Returns the errors of tables that could not be committed by their own fault, by the tables' paths. Raises FileGone if
    a file is missing, LakeError if the lake cannot be written, ValueError if `key` is not a window's key.
    """
    parse_window_key(key)

    def one(write: TableWrite) -> TableError | None:
        try:
            with table_work(lake, write.table, "commit"):
                _commit_table(lake, key, write)
        except TableError as error:
            if isinstance(error.__cause__, FileGone):
                raise error.__cause__ from None
            return error
        return None

    writes = list(writes)
    failed = side_by_side(one, writes, 8 if lake.is_local else 16)
    return {write.path: error for write, error in zip(writes, failed, strict=True) if error is not None}


def _commit_table(lake: Lake, key: str, write: TableWrite) -> None:
    with lake_errors(write.path):
        try:
            table = ensure_table(lake, write.path, Schema.from_json(write.schema_json), partition_by=[WINDOW], configuration=CONFIGURATION)
        except Clash as clash:
            raise changed_type(write.table, clash) from None
        for _ in range(ATTEMPTS):
            if not write.files or _has_window(table, key):
                return
            actions = [add_action(file, {WINDOW: key}) for file in _in_place(lake, key, write)]
            try:
                # With the marker the slower of two processes that commit the same window fails, checks again and finds the window.
                commit(lake, write.path, table, actions, partition_by=[WINDOW], marker=Transaction(_MARKER, table.version()))
            except CommitFailedError:
                table.update_incremental()
            else:
                failpoints.hit("raw.between_tables")
                return
        raise crowded(write.path)


def _has_window(table: DeltaTable, key: str) -> bool:
    return bool(table.file_uris(file_pruning_predicate=[(WINDOW, "=", key)]))


def _in_place(lake: Lake, key: str, write: TableWrite) -> list[FileWrite]:
    """The files of a window, each moved to its partition's folder, since some readers take the partition from the folder's name."""
    folder = lake.relative(write.path)
    files = []
    for file in write.files:
        path = f"{WINDOW}={key}/{PurePosixPath(file.path).name}"
        if path != file.path:
            move(lake, f"{folder}/{file.path}", f"{folder}/{path}")
        files.append(replace(file, path=path))
    found = filesystem(lake.uri).get_file_info([f"{folder}/{file.path}" for file in files])
    for file, info in zip(files, found, strict=True):
        if info.type != pafs.FileType.File or info.size != file.size:
            raise FileGone(
                f"The file {file.path} of table {write.table} in window {key} is missing from {write.path} and was not committed to raw; "
                f"restore it, or run `pgwal drain`, which reads the window again."
            )
    return files

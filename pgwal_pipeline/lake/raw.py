"""Raw: every change of a table, append-only, one partition a window.

A window's Parquet files are written while the stream is read and belong to nothing at first. They count from the moment that the ledger
names them (`prepared`), and `commit_window` then makes them part of their Delta tables, as often as it takes.
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
from pgwal_pipeline.values.own_columns import COMMIT_LSN, OP, WINDOW
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
_CONFIGURATION = {
    "delta.dataSkippingStatsColumns": COMMIT_LSN,
    "delta.deletedFileRetentionDuration": "interval 1 days",
    "delta.logRetentionDuration": "interval 2 days",
}
_COLUMN_COST = 512  # bytes that an Arrow array takes besides what is in it, about
_LOOSE = 64
_BY_NAME = Locations()


class Changes(Protocol):
    """Decoded changes of one table, as `decode.batch.TableChanges` has them."""

    @property
    def relation(self) -> Relation:
        """The table as it was when the changes were made."""
        ...

    @property
    def rows(self) -> pa.Table:
        """The source's columns, and those of raw but the partition."""
        ...

    @property
    def inserts(self) -> int:
        """Rows that are inserts."""
        ...

    @property
    def updates(self) -> int:
        """Rows that are updates."""
        ...

    @property
    def deletes(self) -> int:
        """Rows that are deletes."""
        ...

    @property
    def truncates(self) -> int:
        """Rows that are truncations."""
        ...

    @property
    def key_changes(self) -> int:
        """Rows that hold the old key of an update."""
        ...

    @property
    def unchanged(self) -> bool:
        """Whether any row left an unchanged TOAST value out."""
        ...


@dataclass(slots=True)
class _Buffer:
    """What a window has of one table: rows that wait, all of one schema, and files that are being written or done."""

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
        """The rows that wait, which wait no longer."""
        taken = self.rows + self.loose
        self.rows, self.loose, self.bytes = [], [], 0
        return taken


class WindowWriter:
    """Writes the changes of one window to Parquet files in the raw tables' folders, which no commit names yet.

    At most about `budget` bytes of rows are held: the largest table's are written out first, while more are taken in. With `key`, which is
    the window's, files are put into its partition's folder at once; without, `commit_window` moves them there. `expected` are the schemas
    that raw tables will have, by their addresses, where windows before this one are not committed yet. For one thread; as a context
    manager it takes its files away again when the block fails. Its methods raise LakeError where the lake cannot be written.

    `locations` says where each table stands; tables are told apart by that. What is one table's own fault leaves that table out of the
    window and goes into `refused`, by location; the others go on.
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
        """Take rows in; those of a table that was refused are dropped."""
        location, table = self._places.find(changes.relation)
        if location not in self.refused:
            self._for_one(location, table, changes.relation.oid, lambda: self._take(changes, location, table))
        self._make_room()

    @property
    def held(self) -> int:
        """About how many bytes of rows wait or are being written."""
        return self._waiting + sum(size for _, size in self._under_way.values())

    def refuse(self, location: TableName, error: TableError) -> None:
        """Leave a table out of the window, and take its files away."""
        self.refused.setdefault(location, error)
        self._drop(location)

    def _for_one(self, location: TableName, table: TableName, oid: int, work: Callable[[], object]) -> None:
        """Do work for one table; refuse it where that fails by its own fault."""
        try:
            with table_work(self._lake, table, "write", oid=oid):
                work()
        except TableError as error:
            self.refuse(location, error)

    def _take(self, changes: Changes, location: TableName, table: TableName) -> None:
        check_old_keys(changes.relation, changes.rows)
        buffer = self._buffer(changes, location, table)
        write = buffer.write
        buffer.write = replace(
            write,
            rows=write.rows + changes.rows.num_rows,
            inserts=write.inserts + changes.inserts,
            updates=write.updates + changes.updates,
            deletes=write.deletes + changes.deletes,
            truncates=write.truncates + changes.truncates,
            key_changes=write.key_changes + changes.key_changes,
            unchanged=write.unchanged or changes.unchanged,
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
        """Write out what waits; the files are on disk then, and the caller's. Returns what each table got, in the names' order."""
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
        """Give up the rows of transactions with a commit LSN from `lsn` on, be they in files already."""
        self._for_each(self._flush)
        self._for_each(lambda buffer: self._cut_files(buffer, lsn))

    def _for_each(self, work: Callable[[_Buffer], None]) -> None:
        """Do the same for each table, in the locations' order."""
        for location, buffer in sorted(self._buffers.items()):
            self._for_one(location, buffer.table, buffer.oid, partial(work, buffer))

    def _cut_files(self, buffer: _Buffer, lsn: int) -> None:
        cuts = [_cut_file(self._lake, buffer.folder, future.result(), lsn) for future in buffer.files]
        buffer.files = [_finished(file) for file, _ in cuts if file is not None]
        ops = sum((dropped for _, dropped in cuts), Counter[str]())
        write = buffer.write
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
        """Stop, and take away the files that were written."""
        self._pool.shutdown(cancel_futures=True)
        for location in list(self._buffers):
            self._drop(location)

    def _buffer(self, changes: Changes, location: TableName, table: TableName) -> _Buffer:
        """The buffer of `table`, ready for rows of the schema that `changes` has."""
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
        """Write the largest tables out: from half of the budget on beside what goes on, and waiting for it once the budget is used up."""
        while self._waiting > self._budget // 2:
            location, buffer = max(self._buffers.items(), key=lambda item: item[1].bytes)
            self._for_one(location, buffer.table, buffer.oid, partial(self._flush, buffer))
        while self.held > self._budget and self._under_way:
            done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
            for file in done:
                self._end(file)

    def _end(self, file: Future[FileWrite]) -> None:
        """Take in how the writing of a file ended; refusing its table takes the table's other files out of those under way."""
        location, _ = self._under_way.pop(file, (None, 0))
        buffer = None if location is None else self._buffers.get(location)
        if location is not None and buffer is not None:
            self._for_one(location, buffer.table, buffer.oid, file.result)

    def _flush(self, buffer: _Buffer) -> None:
        """Have one file written with the rows of a table that wait."""
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
        """Give up what the window has of a table, and take its files away."""
        buffer = self._buffers.pop(location, None)
        if buffer is None:
            return
        self._waiting -= buffer.bytes
        for file in buffer.files:
            self._under_way.pop(file, None)
            if not file.cancel() and file.exception() is None:
                discard_file(self._lake, f"{buffer.folder}/{file.result().path}")


def _fit(buffer: _Buffer) -> tuple[Schema, pa.Schema]:
    """The Delta schema with which the table takes the buffer's rows beside what it has, and the names that the rows get for it."""
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
    """A file without its rows from a commit LSN on, and what these were by their `_pgwal_op`; None where nothing else was in it."""
    if json.loads(file.stats)["maxValues"].get(COMMIT_LSN, 0) < lsn:
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


def _finished(file: FileWrite) -> Future[FileWrite]:
    done: Future[FileWrite] = Future()
    done.set_result(file)
    return done


def ensure_raw_table(lake: Lake, location: TableName, rows: pa.Schema) -> str:
    """Make the raw table at `location` where it is missing, with the columns of `rows`, its decoded changes' schema; returns its address.

    Columns that an existing one lacks are added; one that it has with another type gets a column beside.
    """
    path = lake.raw(location)
    wanted = partitioned_schema(fitted(_standing_schema(lake, path) or Schema([]), plain_schema(rows)), WINDOW)
    try:
        ensure_table(lake, path, wanted, partition_by=[WINDOW], configuration=_CONFIGURATION)
    except Clash as clash:
        raise changed_type(location, clash) from None
    return path


def commit_window(lake: Lake, key: str, writes: Iterable[TableWrite]) -> dict[str, TableError]:
    """Make a window's files part of their raw tables, one commit a table, tables made and widened as they need it.

    What has been committed already is left alone, so this may be done again after a crash, with the writes from the ledger's record, and
    by two at once. Returns the tables whose own fault it is that they could not be committed, by their addresses. Raises FileGone where a
    file is not there, LakeError where the lake cannot be written, ValueError where `key` is not a window's.
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
            table = ensure_table(lake, write.path, Schema.from_json(write.schema_json), partition_by=[WINDOW], configuration=_CONFIGURATION)
        except Clash as clash:
            raise changed_type(write.table, clash) from None
        for _ in range(ATTEMPTS):
            if not write.files or _has_window(table, key):
                return
            actions = [add_action(file, {WINDOW: key}) for file in _in_place(lake, key, write)]
            try:
                # The marker makes the slower of two that commit the same window look again, and find it there.
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
    """The files of a window, each in its partition's folder, where readers look that go by the folders' names."""
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
                f"The file {file.path} of table {write.table} in window {key} is gone from {write.path} before it became part of raw; "
                f"restore it, or run `pgwal drain`, which reads the window again."
            )
    return files

"""Write Parquet files in a lake, with types that every Delta reader takes, and make sure that they are on disk."""

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from pgwal_pipeline.lake.layout import Lake, filesystem, remove_file
from pgwal_pipeline.lake.records import FileWrite

ROW_GROUP_ROWS = 1 << 20
_MOST_TEXT = 3 << 29  # bytes of text in one array: its offsets have 31 bits


def plain_type(arrow: pa.DataType) -> pa.DataType:
    """Return `arrow` as a type that Delta has: no views, large or dictionary types; timestamps in microseconds, zoned ones in UTC."""
    if pa.types.is_string_view(arrow) or pa.types.is_large_string(arrow):
        return pa.string()
    if pa.types.is_binary_view(arrow) or pa.types.is_large_binary(arrow):
        return pa.binary()
    if pa.types.is_dictionary(arrow):
        return plain_type(arrow.value_type)
    if pa.types.is_timestamp(arrow):
        return pa.timestamp("us", None if arrow.tz is None else "UTC")
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return pa.list_(plain_type(arrow.value_type))
    if pa.types.is_map(arrow):
        return pa.map_(plain_type(arrow.key_type), plain_type(arrow.item_type))
    if pa.types.is_struct(arrow):
        return pa.struct([(field.name, plain_type(field.type)) for field in arrow])
    return arrow


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with every type plain, every column nullable and no metadata."""
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema])


def plain_tables(rows: pa.Table, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield `rows` cast to `schema`, their plain schema; in several pieces if a column holds more than 1.5 GiB of text.

    Text that is a view into a larger buffer is copied, so that the buffer can be freed.
    """
    if rows.num_rows > 1 and any(_text_bytes(column) > _MOST_TEXT for column in rows.columns):
        half = rows.num_rows // 2
        yield from plain_tables(rows.slice(0, half), schema)
        yield from plain_tables(rows.slice(half), schema)
    else:
        yield rows.cast(schema)


def _text_bytes(column: pa.ChunkedArray) -> int:
    if pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        return sum(_viewed_bytes(chunk) for chunk in column.chunks)
    if pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type) or pa.types.is_nested(column.type):
        return column.nbytes
    return 0


def _viewed_bytes(views: pa.Array) -> int:
    """The total length of an array's views: each is 16 bytes and begins with its length. Arrow has no kernel that adds these."""
    lengths = np.frombuffer(views.buffers()[1], dtype="<i4")[4 * views.offset : 4 * (views.offset + len(views)) : 4]
    return int(lengths.sum(dtype="i8"))


class ParquetFile:
    """A Parquet file being written at `path`, relative to the lake's root. It counts only once a Delta commit names it.

    `write` adds one or more row groups, `close` finishes the file, `discard` removes it. `statistics` are columns of integers that are
    never null; their smallest and largest values go into Delta's statistics. Only one thread at a time may use it.
    """

    def __init__(self, lake: Lake, path: str, schema: pa.Schema, statistics: Sequence[str] = ()) -> None:
        self.path = path
        self.size = 0
        self.rows = 0
        self._lake = lake
        self._fs = filesystem(lake.uri)
        self._statistics = tuple(statistics)
        self._limits: dict[str, tuple[int, int]] = {}
        make_folder(lake, str(PurePosixPath(path).parent))
        self._stream = self._fs.open_output_stream(path)
        self._writer = pq.ParquetWriter(
            self._stream,
            schema,
            compression="zstd",
            compression_level=1,
            # Dictionaries take twice the time to write, and save nothing when zstd follows (measured).
            use_dictionary=False,
            write_statistics=list(self._statistics) or False,  # pyright: ignore[reportArgumentType]
            store_decimal_as_integer=True,
            store_schema=False,
            # A bit that flipped on the disk is then an error; without checksums half of them are read as other values (tried).
            write_page_checksum=True,
        )

    def write(self, rows: pa.Table) -> None:
        """Write `rows`, which have the file's schema."""
        if rows.num_rows == 0:
            return
        self._writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
        self.rows += rows.num_rows
        self.size = self._stream.tell()
        for name in self._statistics:
            numbers = rows[name].to_numpy()
            least, most = int(numbers.min()), int(numbers.max())
            before = self._limits.get(name, (least, most))
            self._limits[name] = (min(least, before[0]), max(most, before[1]))

    def close(self, folder: str) -> FileWrite:
        """Finish the file, make sure that it is on disk, and return it with its path relative to `folder`, the Delta table's folder."""
        self._writer.close()
        self.size = self._stream.tell()
        self._stream.close()
        flush(self._lake, [self.path])
        stats = {
            "numRecords": self.rows,
            "minValues": {name: least for name, (least, _) in self._limits.items()},
            "maxValues": {name: most for name, (_, most) in self._limits.items()},
            "nullCount": dict.fromkeys(self._limits, 0),
        }
        return FileWrite(path=self.path.removeprefix(folder + "/"), size=self.size, rows=self.rows, stats=json.dumps(stats))

    def discard(self) -> None:
        """Stop writing and remove the file."""
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
            self._stream.close()
        discard_file(self._lake, self.path)


def discard_file(lake: Lake, path: str) -> None:
    """Remove a file that no commit names. Errors are ignored: vacuum removes what is left behind."""
    with suppress(OSError, pa.ArrowException):
        remove_file(lake.uri, path)


def new_file_name() -> str:
    """Return a unique name for a Parquet file."""
    return f"part-{uuid.uuid4().hex}.zstd.parquet"


def make_folder(lake: Lake, path: str) -> None:
    """Create the folder `path`, relative to the lake's root, with its parents, and fsync them. Does nothing on an object store."""
    folder = Path(lake.uri) / path
    if not lake.is_local or folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    while folder != Path(lake.uri).parent:
        folder = folder.parent
        _sync_folder(folder)


def flush(lake: Lake, paths: Iterable[str]) -> None:
    """Write the files at `paths`, relative to the lake's root, and their folders to disk (fsync).

    An object store has done so when it answers. Locally a power failure can lose a file that was only written, and the source does not keep
    what has been confirmed.
    """
    if not lake.is_local:
        return
    files = [Path(lake.uri) / path for path in paths]
    for file in files:
        _sync(file)
    for folder in {file.parent for file in files}:
        _sync_folder(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot, and a folder above the lake may not be readable
        _sync(path)


def move(lake: Lake, source: str, target: str) -> None:
    """Move a file inside the lake. Does nothing if only `target` exists. An object store copies the file on the server."""
    fs = filesystem(lake.uri)
    there, moved = fs.get_file_info([source, target])
    if there.type == pafs.FileType.NotFound and moved.type != pafs.FileType.NotFound:
        return
    if lake.is_local:
        make_folder(lake, str(PurePosixPath(target).parent))
        fs.move(source, target)
        flush(lake, [target])
    else:
        fs.copy_file(source, target)
        remove_file(lake.uri, source)


def add_action(file: FileWrite, partition: dict[str, str]) -> AddAction:
    """Return the Delta commit's action that adds `file` to its table."""
    return AddAction(file.path, file.size, partition, int(time.time() * 1000), True, file.stats)

"""A small append-only Delta table: of the rows with one key the newest is valid.

Every append carries the number of its last row as a Delta transaction, so appends are strictly ordered: the slower of two writers fails,
reads again and decides again. So every decision is made with all earlier rows known.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import RemoveAction

from pgwal_pipeline.lake.delta import ATTEMPTS, commit, crowded, ensure_table, lake_errors, open_table
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.parquet import ParquetFile, add_action, new_file_name

SEQUENCE = "seq"
"""The column that numbers the rows of a log from 1 on, in the order in which they were appended."""

_MARKER = "pgwal_ledger"
_MANY_FILES = 8
_LARGE_FILE = 1 << 20  # bytes; files of this size and more are not joined with others
_CONFIGURATION = {
    "delta.checkpointInterval": "20",  # a new reader reads the commits since the last checkpoint one by one
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
    "delta.enableExpiredLogCleanup": "true",
}


class RowLog:
    """The log at `lake.ledger(name)` with the columns of `schema`; the columns named in `key` identify a row. Threads may share one.

    `select` reduces the newest rows of all keys further, to the valid ones. A log that does not exist reads as no rows; reading creates
    nothing. All methods raise LakeError if the lake cannot be used.
    """

    def __init__(
        self, lake: Lake, name: str, schema: pa.Schema, key: Sequence[str], select: Callable[[pa.Table], pa.Table] = lambda rows: rows
    ) -> None:
        self._lake = lake
        self._uri = lake.ledger(name)
        self._folder = lake.relative(self._uri)
        self._schema = pa.schema([pa.field(SEQUENCE, pa.int64()), *schema])
        self._key = list(key)
        self._select = select
        self._lock = threading.RLock()
        self._table: DeltaTable | None = None
        self._version = -1
        self._sizes: dict[str, int] = {}
        self._files: dict[str, pa.Table] = {}
        self._valid_rows: pa.Table | None = None

    def rows(self) -> pa.Table:
        """Return the rows that are valid now, oldest first, with `seq` as the first column."""
        with self._lock, lake_errors(self._uri):
            self._refresh()
            return self._valid()

    def append(self, decide: Callable[[pa.Table], pa.Table]) -> None:
        """Append the rows that `decide` returns, given the valid rows. Its rows have no `seq`; if it returns none, nothing is written.

        `decide` is called again if another writer was faster, so it has seen every earlier row. Its errors pass through.
        """
        with self._lock, lake_errors(self._uri):
            self._refresh()
            if self._table is None:
                if decide(self._valid()).num_rows == 0:
                    return
                self._table = ensure_table(self._lake, self._uri, self._schema, configuration=_CONFIGURATION)
                self._load()
            for attempt in range(ATTEMPTS):
                rows = decide(self._valid())
                if rows.num_rows == 0:
                    return
                last = self._last()
                numbers = pa.array(range(last + 1, last + 1 + rows.num_rows), pa.int64())
                if self._commit([], rows.add_column(0, SEQUENCE, numbers), last + rows.num_rows):
                    self._join_small_files()
                    return
                time.sleep(random.uniform(0, min(0.5, 0.005 * 2**attempt)))  # noqa: S311 - two writers must not keep step
                self._refresh()
            raise crowded(self._uri)

    def rewrite(self, keep: Callable[[pa.Table], pa.Table]) -> None:
        """Delete all rows but those that `keep` returns, given the valid rows."""
        with self._lock, lake_errors(self._uri):
            for _ in range(ATTEMPTS):
                self._refresh()
                if not self._files or self._commit(list(self._files), keep(self._valid()), self._last()):
                    return
            raise crowded(self._uri)

    def _refresh(self) -> None:
        """Read the log's commits since the last call."""
        if self._table is None:
            self._table = open_table(self._lake, self._uri)
        else:
            try:
                self._table.update_incremental()
            except DeltaError:  # the version is so old that the commits after it have been cleaned up
                self._table = open_table(self._lake, self._uri)
        self._load()

    def _load(self) -> None:
        """Read those files of the table's version that have not been read yet. Files never change."""
        version = -1 if self._table is None else self._table.version()
        if version == self._version:
            return
        actions = pa.table({"path": [], "size_bytes": []}) if self._table is None else pa.table(self._table.get_add_actions(flatten=True))
        self._sizes = dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))
        self._files = {name: self._files[name] if name in self._files else self._read(name) for name in self._sizes}
        self._version = version
        self._valid_rows = None

    def _read(self, name: str) -> pa.Table:
        with lake_errors(f"{self._uri}/{name}"), filesystem(self._lake.uri).open_input_file(f"{self._folder}/{name}") as file:
            octets = file.read_buffer()
            try:
                # With so few rows, threads cost more than the reading.
                found = pq.ParquetFile(pa.BufferReader(octets), page_checksum_verification=True).read(use_threads=False)
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise pa.ArrowInvalid(f"Parquet file is damaged: {error}") from error
        columns = [
            found[field.name] if field.name in found.column_names else pa.nulls(found.num_rows, field.type) for field in self._schema
        ]
        return pa.table(columns, self._schema.names).cast(self._schema)

    def _valid(self) -> pa.Table:
        if self._valid_rows is None:
            rows = pa.concat_tables(self._files.values()) if self._files else self._schema.empty_table()
            newest = rows.group_by(self._key).aggregate([(SEQUENCE, "max")])[f"{SEQUENCE}_max"]
            self._valid_rows = self._select(_numbered(rows, newest).sort_by(SEQUENCE))
        return self._valid_rows

    def _last(self) -> int:
        return (None if self._table is None else self._table.transaction_version(_MARKER)) or 0

    def _join_small_files(self) -> None:
        """Join many small files into one, with only the valid rows. If another writer is faster, a later append does it."""
        small = [name for name, size in self._sizes.items() if size < _LARGE_FILE]
        if len(small) > _MANY_FILES:
            joined = pa.concat_tables([self._files[name] for name in small])
            self._commit(small, _numbered(self._valid(), joined[SEQUENCE]), self._last())

    def _commit(self, removed: Sequence[str], rows: pa.Table, last: int) -> bool:
        """Replace the files `removed` by one with `rows`; False, with nothing changed, if another writer was faster."""
        assert self._table is not None
        name = new_file_name()
        rows = rows.select(self._schema.names).cast(self._schema)
        file = ParquetFile(self._lake, f"{self._folder}/{name}", self._schema)
        file.write(rows)
        added = add_action(file.close(self._folder), {})
        now = int(time.time() * 1000)
        gone = [
            RemoveAction(path, data_change=True, deletion_timestamp=now, size=self._sizes[path], partition_values={}) for path in removed
        ]
        try:
            commit(self._lake, self._uri, self._table, [*gone, added], marker=Transaction(_MARKER, last))
        except CommitFailedError:
            file.discard()
            return False
        self._files[name] = rows
        self._load()
        return True


def _numbered(rows: pa.Table, numbers: pa.ChunkedArray) -> pa.Table:
    return rows.filter(pa.array(np.isin(rows[SEQUENCE].to_numpy(), numbers.to_numpy())))

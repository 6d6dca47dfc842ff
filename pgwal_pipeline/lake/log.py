"""A small append-only Delta table: of the rows with one key the newest is valid.

Every append carries the number of its last row as a Delta transaction, so appends are strictly ordered: the slower of two writers fails,
reads again and decides again. So every decision is made with all earlier rows known.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import RemoveAction

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.delta import ATTEMPTS, commit, crowded, ensure_table, lake_errors, open_table
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.parquet import ParquetFile, add_action, new_file_name

SEQUENCE = "seq"
"""The column that numbers the rows of a log from 1 on, in the order in which they were appended."""

_MARKER = "pgwal_ledger"
_MANY_FILES = 8
_TIERS = ((128 << 10, 500), (1 << 20, 5000))
"""The bytes and rows from which on a file is not joined with smaller ones, and with none at all: what is written again stays little."""
CONFIGURATION = {
    "delta.checkpointInterval": "20",  # a new reader reads the commits since the last checkpoint one by one
    # Each commit that is kept costs every reader and writer. A writer that slept for longer in the middle of its commit would write that in
    # the place of one that was removed, unseen.
    "delta.logRetentionDuration": "interval 6 hours",
    "delta.deletedFileRetentionDuration": "interval 6 hours",
    "delta.enableExpiredLogCleanup": "true",
}


ALL, NEWEST = -math.inf, math.inf
"""What `after` takes for all rows, and for those with the largest `order`."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a log: its bytes and rows, the numbers of its first and last row, and the largest `order` in it."""

    size: int
    rows: int
    first: float
    last: float
    order: float


class RowLog:
    """The log at `lake.ledger(name)` with the columns of `schema`; the columns named in `key` identify a row. Threads may share one.

    `select` reduces the newest rows of all keys further, to the valid ones. A log that does not exist reads as no rows; reading creates
    nothing. All methods raise LakeError if the lake cannot be used.

    `order` is a column of integers that are never null and the same in all rows with one key. Reads and appends that are only about rows
    past one value (`after`) then leave out older files, so that they cost the same however long the log is.
    """

    def __init__(
        self,
        lake: Lake,
        name: str,
        schema: pa.Schema,
        key: Sequence[str],
        select: Callable[[pa.Table], pa.Table] = lambda rows: rows,
        order: str | None = None,
    ) -> None:
        self._lake = lake
        self._uri = lake.ledger(name)
        self._folder = lake.relative(self._uri)
        self._schema = pa.schema([pa.field(SEQUENCE, pa.int64()), *schema])
        self._key = list(key)
        self._select = select
        self._order = order
        self._lock = threading.RLock()
        self._table: DeltaTable | None = None
        self._version = -1
        self._named: dict[str, _File] = {}
        self._files: dict[str, pa.Table] = {}
        self._valid_of: tuple[str, ...] | None = None
        self._valid_rows = self._schema.empty_table()

    def rows(self, after: float = ALL) -> pa.Table:
        """Return the rows that are valid now, oldest first, with `seq` as the first column.

        With `after` those whose `order` is past it, and the rows with the largest `order`; others may be among them. `NEWEST`: only the
        latter.
        """
        with self._lock, lake_errors(self._uri):
            self._refresh()
            return self._valid(after)

    def append(self, decide: Callable[[pa.Table], pa.Table], after: float = ALL) -> None:
        """Append the rows that `decide` returns, given the valid rows. Its rows have no `seq`; if it returns none, nothing is written.

        `decide` is called again if another writer was faster, so it has seen every earlier row. Its errors pass through. It is given the
        rows that `rows(after)` returns.
        """
        with self._lock, lake_errors(self._uri):
            self._refresh()
            if self._table is None:
                if decide(self._valid(after)).num_rows == 0:
                    return
                self._table = ensure_table(self._lake, self._uri, self._schema, configuration=CONFIGURATION)
                self._load()
            for attempt in range(ATTEMPTS):
                rows = decide(self._valid(after))
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
                if not self._named or self._commit(list(self._named), keep(self._valid()), self._last()):
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
        """Take the names of the files of the table's version. Files never change, and each is read when it is first needed."""
        version = -1 if self._table is None else self._table.version()
        if version == self._version:
            return
        self._named = {} if self._table is None else _named(self._table, self._order)
        self._files = {name: rows for name, rows in self._files.items() if name in self._named}
        self._version = version
        self._valid_of = None

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

    def _valid(self, after: float = ALL) -> pa.Table:
        names = self._needed(after)
        if names != self._valid_of:
            self._valid_rows = self._select(_newest(self._rows_of(names), self._key))
            self._valid_of = names
        return self._valid_rows

    def _needed(self, after: float) -> tuple[str, ...]:
        """The files that decide which rows past `after` are valid: those with such rows, and those with rows that were appended later."""
        found = self._named.values()
        newest = max((file.order for file in found), default=ALL)
        first = min((file.first for file in found if file.order > after or file.order == newest), default=0)
        return tuple(sorted(name for name, file in self._named.items() if file.last >= first))

    def _rows_of(self, names: Sequence[str]) -> pa.Table:
        self._files.update((name, self._read(name)) for name in names if name not in self._files)
        return pa.concat_tables([self._files[name] for name in names]) if names else self._schema.empty_table()

    def _last(self) -> int:
        return (None if self._table is None else self._table.transaction_version(_MARKER)) or 0

    def _join_small_files(self) -> None:
        """Join many small files into one, with only the valid rows. If another writer is faster, a later append does it."""
        for tier in range(len(_TIERS)):
            small = [name for name, file in self._named.items() if _tier(file) == tier]
            if len(small) > _MANY_FILES:
                joined = self._rows_of(small)
                first = min(self._named[name].first for name in small)
                later = tuple(sorted(name for name, file in self._named.items() if file.last >= first))
                valid = self._select(_newest(self._rows_of(later), self._key))
                self._commit(small, _numbered(valid, joined[SEQUENCE]), self._last())

    def _commit(self, removed: Sequence[str], rows: pa.Table, last: int) -> bool:
        """Replace the files `removed` by one with `rows`; False, with nothing changed, if another writer was faster."""
        assert self._table is not None
        name = new_file_name()
        rows = rows.select(self._schema.names).cast(self._schema)
        file = ParquetFile(self._lake, f"{self._folder}/{name}", self._schema, [SEQUENCE, *([self._order] if self._order else [])])
        file.write(rows)
        added = add_action(file.close(self._folder), {})
        now = int(time.time() * 1000)
        gone = [
            RemoveAction(path, data_change=True, deletion_timestamp=now, size=self._named[path].size, partition_values={})
            for path in removed
        ]
        if removed:
            failpoints.hit("ledger.in_join")
        try:
            commit(self._lake, self._uri, self._table, [*gone, added], marker=Transaction(_MARKER, last))
        except CommitFailedError:
            file.discard()
            return False
        self._table.update_incremental()
        self._files[name] = rows
        self._load()
        return True


def _named(table: DeltaTable, order: str | None) -> dict[str, _File]:
    """The files of `table` by name. One without statistics, of an older version, may have any rows."""
    found = pa.table(table.get_add_actions(flatten=True))

    def column(name: str, missing: float) -> list[Any]:
        values = found[name].to_pylist() if name in found.column_names else [None] * found.num_rows
        return [missing if value is None else value for value in values]

    limits = column("num_records", 0), column(f"min.{SEQUENCE}", 0), column(f"max.{SEQUENCE}", NEWEST), column(f"max.{order}", NEWEST)
    return {
        name: _File(size, *numbers)
        for name, size, *numbers in zip(found["path"].to_pylist(), found["size_bytes"].to_pylist(), *limits, strict=True)
    }


def _tier(file: _File) -> int:
    return sum(file.size >= size or file.rows >= rows for size, rows in _TIERS)


def _newest(rows: pa.Table, key: list[str]) -> pa.Table:
    """The newest row of each key, in the order of their numbers."""
    newest = rows.group_by(key).aggregate([(SEQUENCE, "max")])[f"{SEQUENCE}_max"]
    return _numbered(rows, newest).sort_by(SEQUENCE)


def _numbered(rows: pa.Table, numbers: pa.ChunkedArray) -> pa.Table:
    return rows.filter(pa.array(np.isin(rows[SEQUENCE].to_numpy(), numbers.to_numpy())))

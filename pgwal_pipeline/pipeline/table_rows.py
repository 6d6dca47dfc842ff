"""Read the rows of tables as Arrow, in pieces: one thread reads and decodes while the caller writes."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import pyarrow as pa

from pgwal_pipeline.decode import binary
from pgwal_pipeline.decode.batch import decode_copy
from pgwal_pipeline.postgres.copy import ChunkBounds, ChunkRead, ChunkReader, TableBusy
from pgwal_pipeline.values.relation import Relation

_AHEAD_BYTES = 4 << 20  # that may wait for the writer: one piece of a large table, or many small tables


class _Abandoned(Exception):
    """Raised in the reading thread when the caller has stopped iterating."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a table's rows, of those that meet the publication's condition."""

    relation: Relation
    bounds: ChunkBounds
    row_filter: str | None = None


@dataclass
class TableRows:
    """Ranges of tables, read once, one after another: as a context manager, take the `pieces` of each in their order.

    Several ranges are of small tables, of at most `most_bytes` on disk, and share a transaction. After an error in one of them the rest is
    read in a new transaction. About three pieces of 4 MiB are in memory at once. `key` is the key of hashes.
    """

    dsn: str
    ranges: Sequence[Range]
    exported_snapshot: str | None = None
    largest_row: int = 1 << 30
    most_bytes: int | None = None
    key: bytes = field(default=b"", repr=False)
    reads: dict[int, ChunkRead] = field(default_factory=dict)
    _items: "deque[tuple[int, pa.Table | BaseException | None, int]]" = field(default_factory=deque)
    _waiting: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _abandoned: bool = False

    def __enter__(self) -> Self:
        self._reader = threading.Thread(target=self._run, name="pgwal-copy", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._reader.join()

    def pieces(self, number: int) -> Iterator[pa.Table]:
        """Yield the rows of a range (`copy_schema` of the decoder); afterwards `reads` has what the read was of.

        What is left of the ranges before it is passed over. Raises what reading and decoding raise, and TableBusy for one of several tables
        that is locked or larger than `most_bytes`.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                of, item, size = self._items.popleft()
                self._waiting -= size
                self._changed.notify_all()
            if of < number:
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        number = 0
        while number < len(self.ranges):
            try:
                with ChunkReader(self.dsn, self.exported_snapshot) as reader:
                    fit = None if self.most_bytes is None else reader.begin_together(self._relations(number), self.most_bytes)
                    for following in range(number, len(self.ranges)):
                        number = following
                        if fit is not None and self.ranges[number].relation.oid not in fit:
                            self._put(number, TableBusy(f"Table {self.ranges[number].relation.table} is not small, or locked."), 0)
                        else:
                            self._read(reader, number)
                            self._put(number, None, 0)
            except _Abandoned:
                return
            except BaseException as error:  # noqa: BLE001 - carried to the iterating thread, which raises it
                try:
                    self._put(number, error, 0)
                except _Abandoned:
                    return
            number += 1

    def _relations(self, first: int) -> list[Relation]:
        return [one.relation for one in self.ranges[first:]]

    def _read(self, reader: ChunkReader, number: int) -> None:
        one = self.ranges[number]
        self.reads[number] = reader.read(
            one.relation,
            one.bounds,
            lambda rows, lengths: self._put(number, decode_copy(rows, lengths, one.relation, binary.TYPES, self.key), len(rows)),
            binary=binary.TYPES,
            row_filter=one.row_filter,
            largest_row=self.largest_row,
        )

    def _put(self, number: int, item: pa.Table | BaseException | None, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._waiting < _AHEAD_BYTES)
            if self._abandoned:
                raise _Abandoned
            self._items.append((number, item, size))
            self._waiting += size
            self._changed.notify_all()

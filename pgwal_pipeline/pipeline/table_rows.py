"""Read the rows of a table as Arrow, in pieces: one thread reads and decodes while the caller writes."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from pgwal_pipeline.decode import binary
from pgwal_pipeline.decode.batch import decode_copy
from pgwal_pipeline.postgres.copy import ChunkBounds, ChunkRead, read_chunk
from pgwal_pipeline.values.relation import Relation

_AHEAD = 1  # pieces that may wait for the writer


class _Abandoned(Exception):
    """Raised in the reading thread when the caller has stopped iterating."""


@dataclass
class TableRows:
    """A range of a table's rows, to be read once. Iterate over the pieces (in the decoder's `copy_schema`); `read` is set after the last.

    At most about three pieces are in memory at once. Iterating raises any error of reading and decoding.
    """

    dsn: str
    relation: Relation
    bounds: ChunkBounds
    row_filter: str | None = None
    exported_snapshot: str | None = None
    largest_row: int = 1 << 30
    read: ChunkRead | None = None
    _pieces: "queue.Queue[pa.Table | BaseException | None]" = field(default_factory=lambda: queue.Queue(_AHEAD))
    _abandoned: threading.Event = field(default_factory=threading.Event)

    def __iter__(self) -> Iterator[pa.Table]:
        reader = threading.Thread(target=self._run, name="pgwal-copy", daemon=True)
        reader.start()
        try:
            while (piece := self._pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self._abandoned.set()
            reader.join()

    def _run(self) -> None:
        try:
            self.read = read_chunk(
                self.dsn,
                self.relation,
                self.bounds,
                lambda rows, lengths: self._put(decode_copy(rows, lengths, self.relation, binary.TYPES)),
                binary=binary.TYPES,
                row_filter=self.row_filter,
                exported_snapshot=self.exported_snapshot,
                largest_row=self.largest_row,
            )
            self._put(None)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - carried to the iterating thread, which raises it
            self._put(error)

    def _put(self, piece: "pa.Table | BaseException | None") -> None:
        while True:
            if self._abandoned.is_set() and not isinstance(piece, BaseException):
                raise _Abandoned
            try:
                self._pieces.put(piece, timeout=0.2)
            except queue.Full:
                if self._abandoned.is_set():
                    return
            else:
                return

"""COPY (FORMAT binary) of text, rows whose every field is Postgres's output text framed by its length, to typed columns."""

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode.columns import Block, CellError, decode_columns
from pgwal_pipeline.decode.frames import Frames, lay
from pgwal_pipeline.decode.ragged import UnreadableError
from pgwal_pipeline.decode.tuples import NULL, SENT, Fields
from pgwal_pipeline.decode.types import TEXT_TYPE, copy_schema, target_of
from pgwal_pipeline.decode.vectors import Ints, Mask
from pgwal_pipeline.errors import DecodeError
from pgwal_pipeline.relation import Relation

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER = len(_SIGNATURE) + 8  # then 4 bytes of flags, and 4 that say how many more bytes of header follow
_TRAILER = b"\xff\xff"
_PIECE = 8 << 20  # bytes that are searched for rows at once


def decode_copy(blocks: Sequence[bytes | memoryview], relation: Relation) -> pa.Table:
    """Decode what COPY sent of a table, every column made text on the server. The schema is `copy_schema(relation)`.

    `blocks` may be cut anywhere; together they are whole rows. Header and trailer belong to COPY's first and last block; blocks from its
    middle have none. Raises DecodeError naming the table, the row, and the column if any.
    """
    schema = copy_schema(relation)
    targets = [target_of(column.type) for column in relation.columns]
    tables: list[pa.Table] = []
    done = 0
    try:
        for fields, first in _rows(blocks, len(targets)):
            (columns,) = decode_columns(fields, [Block(targets, relation.column_names, first)])
            text = pa.nulls(len(first), TEXT_TYPE) if columns.text is None else columns.text
            tables.append(pa.table([*columns.values, text], schema=schema))
            done += len(first)
    except UnreadableError as error:
        raise _error(relation, done + error.index, error.reason) from None
    except CellError as error:
        raise _error(relation, done + error.row, f"in column {relation.columns[error.column].name!r}, {error}") from None
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _rows(blocks: Sequence[bytes | memoryview], width: int) -> Iterator[tuple[Fields, Ints]]:
    """The rows of the blocks, some at a time: fields, and the first of each row. Raises UnreadableError, counting from the last given."""
    position, rest, header = 0, b"", True
    while position < len(blocks):
        begin, size = position, 0
        # At least as much as a row that goes on, so that a huge one is joined to its other parts few times.
        while position < len(blocks) and size < max(_PIECE, len(rest)):
            size += len(blocks[position])
            position += 1
        frames = lay([rest, *blocks[begin:position]])
        stop = int(frames.ends[-1])
        start = _header_size(frames.octets[: min(stop, _HEADER)].tobytes()) if header else 0
        header = False
        fields, first, end = _read(frames, start, stop, width)
        if len(first):
            yield fields, first
        rest = frames.octets[end:stop].tobytes()
        _check_rest(rest, width, last=position == len(blocks))


def _read(frames: Frames, start: int, stop: int, width: int) -> tuple[Fields, Ints, int]:
    """The rows that follow each other from `start` and lie before `stop`: all fields, the first of each row, and where the last ends."""
    # A row begins with its column count. Whatever looks like one is read as one, and then those are kept that follow each other.
    octets = frames.octets[start:stop]
    begins = start + np.flatnonzero((octets[:-1] == width >> 8) & (octets[1:] == width & 0xFF))
    at = begins + 2
    columns: list[tuple[Ints, Ints]] = []  # where each column's text begins, and its length or -1
    for _ in range(width):
        sizes = frames.word(at) >> 32
        starts = at + 4
        at = starts + np.maximum(sizes, 0)
        columns.append((starts, sizes))
        whole = (sizes >= -1) & (at <= stop)
        if not whole.all():
            begins, at, columns = begins[whole], at[whole], _only(columns, whole)
    rows = _chain(begins, at, start)
    if rows is not None:
        at, columns = at[rows], _only(columns, rows)
    count = len(at)
    fields = Fields.empty(frames.buffer, count * width, width)
    bounds, kinds = fields.bounds[: count * width].reshape(count, width, 2), fields.kinds[: count * width].reshape(count, width)
    for column, (starts, sizes) in enumerate(columns):
        bounds[:, column, 0] = starts
        bounds[:, column, 1] = starts + np.maximum(sizes, 0)
        kinds[:, column] = np.where(sizes < 0, NULL, SENT)
    return fields, np.arange(count) * width, int(at[-1]) if count else start


def _only(columns: list[tuple[Ints, Ints]], which: Mask | list[int]) -> list[tuple[Ints, Ints]]:
    return [(starts[which], sizes[which]) for starts, sizes in columns]


def _chain(begins: Ints, ends: Ints, start: int) -> list[int] | None:
    """Which of the pieces, ordered by where they begin, follow each other without a gap from `start` on; None where all do."""
    if not len(begins) or begins[0] != start:
        return []
    following = np.searchsorted(begins, ends)
    following[begins[np.minimum(following, len(begins) - 1)] != ends] = len(begins)
    if (following == np.arange(1, len(begins) + 1)).all():
        return None
    rows, number, after = [], 0, following.tolist()
    while number < len(after):
        rows.append(number)
        number = after[number]
    return rows


def _check_rest(rest: bytes, width: int, *, last: bool) -> None:
    """See that what follows the last whole row may begin a row; at the end of the blocks, that it is the trailer or nothing."""
    if last and rest in (b"", _TRAILER):
        return
    if len(rest) >= 2 and rest[:2] != width.to_bytes(2):
        raise UnreadableError(0, "something follows the end of the copy" if rest[:2] == _TRAILER else f"it has not {width} columns")
    at = 2
    for column in range(width):
        if at + 4 > len(rest):
            break
        (size,) = struct.unpack_from(">i", rest, at)
        if size < -1:
            raise UnreadableError(0, f"column {column + 1} has a length of {size}")
        at += 4 + max(size, 0)
    if last:
        raise UnreadableError(0, "it is cut off")


def _header_size(begin: bytes) -> int:
    """How many bytes come before the first row, given the first ones. Raises UnreadableError."""
    if not begin.startswith(_SIGNATURE):
        return 0
    if len(begin) < _HEADER:
        raise UnreadableError(0, "the header before it is cut off")
    flags, extension = struct.unpack_from(">II", begin, len(_SIGNATURE))
    if flags >> 16:
        raise UnreadableError(0, "the header before it has unknown flags")
    return _HEADER + extension


def _error(relation: Relation, row: int, reason: str) -> DecodeError:
    return DecodeError(f"Row {row + 1} of the copy of {relation.table} cannot be decoded: {reason}; copy the table again and report this.")

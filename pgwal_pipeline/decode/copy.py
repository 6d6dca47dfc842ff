"""COPY (FORMAT binary) of text, rows whose every field is Postgres's output text framed by its length, to typed columns."""

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode.columns import Block, CellError, decode_columns
from pgwal_pipeline.decode.frames import Frames, join
from pgwal_pipeline.decode.ragged import UnreadableError
from pgwal_pipeline.decode.tuples import NULL, SENT, Fields
from pgwal_pipeline.decode.types import TEXT_TYPE, copy_schema, target_of
from pgwal_pipeline.decode.vectors import Ints, Mask
from pgwal_pipeline.errors import DecodeError
from pgwal_pipeline.relation import Relation

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER = len(_SIGNATURE) + 8  # then 4 bytes of flags, and 4 that say how many more bytes of header follow
_TRAILER = b"\xff\xff"


def decode_copy(blocks: Sequence[bytes | memoryview], relation: Relation) -> pa.Table:
    """Decode what COPY sent of a table, every column made text on the server. The schema is `copy_schema(relation)`.

    `blocks` may be cut anywhere; when each is one row, as libpq gives them, they need not be searched for rows. Header and trailer belong
    to COPY's first and last block; blocks from its middle have none. Raises DecodeError naming the table, the row, and the column if any.
    """
    try:
        return _decode(_unwrapped(blocks), relation)
    except UnreadableError:
        pass
    try:
        return _decode(list(_search(b"".join(blocks))), relation)
    except UnreadableError as error:
        raise _error(relation, error.index, error.reason) from None


def _decode(rows: Sequence[bytes | memoryview], relation: Relation) -> pa.Table:
    """Decode whole rows. Raises UnreadableError for a row that is framed wrongly, DecodeError for a value."""
    schema = copy_schema(relation)
    tables = []
    done = 0
    for frames in join(rows):
        try:
            fields, first = _walk(frames, len(relation.columns))
        except UnreadableError as error:
            raise UnreadableError(done + error.index, error.reason) from None
        block = Block([target_of(column.type) for column in relation.columns], relation.column_names, first)
        try:
            (columns,) = decode_columns(fields, [block])
        except CellError as error:
            raise _error(relation, done + error.row, f"in column {relation.columns[error.column].name!r}, {error}") from None
        text = pa.nulls(len(frames), TEXT_TYPE) if columns.text is None else columns.text
        tables.append(pa.table([*columns.values, text], schema=schema))
        done += len(frames)
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _walk(frames: Frames, width: int) -> tuple[Fields, Ints]:
    """Read rows of `width` columns; give all fields, and the first of each row."""
    first = np.arange(len(frames)) * width
    fields = Fields.empty(frames.buffer, len(frames) * width, width)
    _check(frames.word(frames.starts) >> 48 == width, f"it has not the table's {width} columns")
    at = frames.starts + 2
    for column in range(width):
        sizes = frames.word(at) >> 32
        starts = at + 4
        at = starts + np.maximum(sizes, 0)
        _check((sizes >= -1) & (at <= frames.ends), f"column {column + 1} goes on past its end")
        field = first + column
        fields.kinds[field] = np.where(sizes < 0, NULL, SENT)
        fields.bounds[field, 0] = starts
        fields.bounds[field, 1] = at
    _check(at == frames.ends, "more follows where it should end")
    return fields, first


def _check(right: Mask, reason: str) -> None:
    if not right.all():
        raise UnreadableError(int(right.argmin()), reason)


def _unwrapped(blocks: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
    """The blocks without COPY's header and trailer, where they stand as libpq gives them."""
    rows = list(blocks)
    if rows and rows[0][: len(_SIGNATURE)] == _SIGNATURE:
        first = memoryview(rows[0])[_header_size(bytes(rows[0][:_HEADER])) :]
        rows[:1] = [first] if len(first) else []
    if rows and rows[-1] == _TRAILER:
        rows.pop()
    return rows


def _header_size(header: bytes) -> int:
    """How many bytes come before the first row. Raises UnreadableError."""
    if len(header) < _HEADER:
        raise UnreadableError(0, "its header is cut off")
    flags, extension = struct.unpack_from(">II", header, len(_SIGNATURE))
    if flags >> 16:
        raise UnreadableError(0, "its header has flags that are not known")
    return _HEADER + extension


def _search(whole: bytes) -> Iterator[memoryview]:
    """The rows of blocks that are cut in other places than between rows, found one field after the other."""
    view = memoryview(whole)
    at = _header_size(whole[:_HEADER]) if whole.startswith(_SIGNATURE) else 0
    found = 0
    while at < len(whole):
        begin = at
        try:
            (width,) = struct.unpack_from(">h", whole, at)
            at += 2
            if width == -1 and at == len(whole):
                return
            for _ in range(width):
                (size,) = struct.unpack_from(">i", whole, at)
                at += 4 + max(size, 0)
        except struct.error:
            raise UnreadableError(found, "it is cut off") from None
        if width < 0 or at > len(whole):
            raise UnreadableError(found, "it is cut off")
        yield view[begin:at]
        found += 1


def _error(relation: Relation, row: int, reason: str) -> DecodeError:
    return DecodeError(f"Row {row + 1} of the copy of {relation.table} cannot be decoded: {reason}; copy the table again and report this.")

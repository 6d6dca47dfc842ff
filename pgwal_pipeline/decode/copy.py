"""Decodes COPY (FORMAT binary), in which each field follows its length, into typed columns.

A field is Postgres's output text, or the type's binary form where that is cheaper to read.
"""

import struct
from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode.columns import Block, CellError, decode_columns
from pgwal_pipeline.decode.frames import Frames, lay
from pgwal_pipeline.decode.ragged import UnreadableError
from pgwal_pipeline.decode.tuples import NULL, SENT, Fields
from pgwal_pipeline.decode.types import TEXT_TYPE, binary_target_of, copy_schema, target_for
from pgwal_pipeline.decode.vectors import Ints
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline.values.relation import Relation

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER = len(_SIGNATURE) + 8  # 4 bytes of flags, and 4 with the length of the header extension
_TRAILER = b"\xff\xff"


def decode_copy(octets: bytearray, lengths: Sequence[int], relation: Relation, binary: Collection[int] = (), key: bytes = b"") -> pa.Table:
    """Decode the messages of a COPY of a table into the schema `copy_schema(relation)`.

    `octets` are messages of the given `lengths` end to end; the result refers to their memory. Each message is one row, as the protocol
    says of the server's CopyData. The header comes before the first row, in its message or in one of its own, and the trailer after the
    last row. Fields are text, except those of types whose OIDs are in `binary`, a subset of `binary.TYPES`; a protected column is text in
    any case, and `key` is the key of its hashes. Raises DecodeError naming the table, the row, and the column if there is one.
    """
    schema = copy_schema(relation)
    targets = [
        binary_target_of(column.type) if column.type.oid in binary and column.protection is None else target_for(column, key)
        for column in relation.columns
    ]
    try:
        fields, first = _read(lay(octets, lengths), len(targets))
        (columns,) = decode_columns(fields, [Block(targets, relation.column_names, range(len(targets)), first)])
    except UnreadableError as error:
        raise _error(relation, error.index, error.reason) from None
    except CellError as error:
        raise _error(relation, error.row, f"in column {relation.columns[error.column].name!r}, {error}") from None
    text = pa.nulls(len(first), TEXT_TYPE) if columns.text is None else columns.text
    return pa.table([*columns.values, text], schema=schema)


def _read(frames: Frames, width: int) -> tuple[Fields, Ints]:
    """Return the fields of all rows, and the first field of each row."""
    begins, ends = _rows(frames)
    at = begins + 2
    wrong = (at > ends) | (frames.word(begins) >> 48 != width)
    if wrong.any():
        raise UnreadableError(int(wrong.argmax()), f"it does not have {width} columns")
    count = len(at)
    fields = Fields.empty(frames.buffer, count * width, width)
    bounds, kinds = fields.bounds[: count * width].reshape(count, width, 2), fields.kinds[: count * width].reshape(count, width)
    for column in range(width):
        sizes = frames.word(at)
        sizes >>= 32
        at += 4
        _check_within(at, ends, column)
        bounds[:, column, 0] = at
        sent = sizes >= 0
        if not sent.all():
            if sizes.min() < -1:
                row = int(sizes.argmin())
                raise UnreadableError(row, f"column {column + 1} has a length of {sizes[row]}")
            sizes *= sent
        at += sizes
        _check_within(at, ends, column)
        bounds[:, column, 1] = at
        kinds[:, column] = np.where(sent, SENT, NULL)
    wrong = at != ends
    if wrong.any():
        raise UnreadableError(int(wrong.argmax()), "something follows its last column")
    return fields, np.arange(count) * width


def _check_within(at: Ints, ends: Ints, column: int) -> None:
    beyond = at > ends
    if beyond.any():
        raise UnreadableError(int(beyond.argmax()), f"column {column + 1} is cut off")


def _rows(frames: Frames) -> tuple[Ints, Ints]:
    """Return where each row begins and ends, without header and trailer."""
    begins, ends = frames.starts.copy(), frames.ends
    if len(begins):
        begins[0] += _header_size(frames.octets[: min(int(ends[0]), _HEADER)].tobytes())
        if begins[0] > ends[0]:
            raise UnreadableError(0, "the header before it is cut off")
    first = int(len(begins) > 0 and begins[0] == ends[0] > 0)
    last = len(begins)
    if last > first and frames.octets[begins[-1] : ends[-1]].tobytes() == _TRAILER:
        last -= 1
    return begins[first:last], ends[first:last]


def _header_size(begin: bytes) -> int:
    """Return how many bytes come before the first row; `begin` are the first bytes. Raises UnreadableError."""
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

"""Reads the tuples of many messages column by column: where each field's text is, and whether it has one.

All fields of all tuples are numbered in the order of the stream; a field is identified by its number. The fields of one
tuple are consecutive: column k of a tuple whose first field is f is the field f + k.
"""

import sys
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode.frames import Frames, words
from pgwal_pipeline.decode.ragged import UnreadableError, pick
from pgwal_pipeline.decode.vectors import Bytes, Ints, Mask

_SHOWN = 24  # bytes of a field that an error shows
SENT, NULL, UNCHANGED = ord("t"), ord("n"), ord("u")


@dataclass(frozen=True, slots=True)
class Fields:
    """Every field of a batch of messages, followed by a tuple of nulls as wide as the widest tuple, which starts at `absent`.

    `kinds` are the bytes with which pgoutput marks fields: SENT, NULL, or UNCHANGED for a TOASTed value that was not sent. `bounds` is
    (fields, 2) int32: where the text begins and ends in `buffer`. `source` is for each field the field whose value it takes; None if each
    field has its own.
    """

    buffer: pa.Buffer
    bounds: np.ndarray
    kinds: Bytes
    absent: int
    source: Ints | None = None

    @classmethod
    def empty(cls, buffer: pa.Buffer, count: int, widest: int) -> "Fields":
        """Return `count` fields to be filled in."""
        kinds = np.full(count + widest, NULL, np.uint8)
        bounds = np.empty((count + widest, 2), np.int32)
        bounds[count:] = buffer.size
        return cls(buffer, bounds, kinds, count)

    def resolve(self, fields: Ints) -> Ints:
        """Return the fields that hold the values of `fields`."""
        return fields if self.source is None else self.source[fields]

    def texts(self, fields: Ints, missing: Mask) -> pa.StringArray:
        """Return the texts of these fields as unchecked bytes; null where `missing` is set."""
        return pick(self.bounds, self.buffer, pa.array(fields * 2, mask=missing if missing.any() else None))

    def numbers(self, fields: Ints, missing: Mask, size: int) -> Ints:
        """Return the bytes of these fields as big-endian signed numbers of `size` bytes; undefined where `missing` is set.

        Raises UnreadableError for a field of another size.
        """
        begins = self.bounds[fields, 0].astype(np.int64)
        wrong = (self.bounds[fields, 1] - begins != size) & ~missing
        if wrong.any():
            index = int(wrong.argmax())
            octets = self.buffer[begins[index] : self.bounds[fields[index], 1]].to_pybytes()
            raise UnreadableError(index, f"{octets[:_SHOWN]!r} has {len(octets)} bytes and not {size}")
        numbers = words(self.buffer)[begins]
        if sys.byteorder == "little":
            numbers.byteswap(inplace=True)
        numbers >>= 64 - 8 * size
        return numbers


def walk(frames: Frames, fields: Fields, first: Ints, at: Ints, ends: Ints, widths: Ints) -> Ints:
    """Read tuples whose column counts have been read already; return where each ends.

    For each tuple: `first` is its first field, `at` where its first column begins, `ends` where its message ends, `widths` its number of
    columns, which must not increase from one tuple to the next. Raises UnreadableError for a column that goes on past its message's end.
    """
    at, field = at.copy(), first.copy()
    widest = int(widths[0]) if len(widths) else 0
    # Tuples that have a k-th column come before those that do not.
    having = np.searchsorted(-widths, -np.arange(widest), "left")
    for column, count in enumerate(having.tolist()):
        # In place, since allocating vectors costs more than the arithmetic: `at` becomes where the text begins, `stops` where it ends.
        begins, which = at[:count], field[:count]
        stops = frames.word(begins)
        kinds = (stops >> 56).astype(np.uint8)
        stops >>= 24
        stops &= 0xFFFFFFFF
        sent = kinds == SENT
        if sent.all():
            begins += 5
        else:
            stops *= sent
            begins += 1
            begins += 4 * sent.view(np.uint8)
        stops += begins
        beyond = stops > ends[:count]
        if beyond.any():
            raise UnreadableError(int(beyond.argmax()), f"column {column + 1} of a row goes on past the message's end")
        fields.kinds[which] = kinds
        fields.bounds[which, 0] = begins
        fields.bounds[which, 1] = stops
        begins[:] = stops
        which += 1
    return at


def check_kinds(fields: Fields) -> int | None:
    """Return the first field that is neither text nor null nor unchanged; None if there is none."""
    known = (fields.kinds == SENT) | (fields.kinds == NULL) | (fields.kinds == UNCHANGED)
    return None if known.all() else int(known.argmin())


def fill_unchanged(fields: Fields, old: Ints, new: Ints, widths: Ints) -> Fields:
    """Fill columns that an update did not send with the value of the old row that came with it, if that row has one.

    `old`, `new`: the first fields of the updates' two tuples; `widths`: their column counts.
    """
    if not (fields.kinds == UNCHANGED).any() or not len(new):
        return fields
    within = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
    before, after = np.repeat(old, widths) + within, np.repeat(new, widths) + within
    filled = (fields.kinds[after] == UNCHANGED) & (fields.kinds[before] == SENT)
    source = np.arange(len(fields.kinds))
    source[after[filled]] = before[filled]
    return replace(fields, source=source)

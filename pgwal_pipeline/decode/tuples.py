"""Tuples of many messages read column by column: where each field's text lies and whether there is one.

All fields of all tuples form one table in the order of the stream; a field is named by its index there. The fields of one tuple follow each
other, so that column k of a tuple whose first field is f is the field f + k.
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
    """Every field of a run of messages, and after the last one a tuple of nulls, as wide as the widest, that starts at `absent`.

    `kinds` are the bytes that pgoutput marks fields with: SENT, NULL, or UNCHANGED for a TOASTed value that was not sent. `bounds` is
    (fields, 2) int32: where the text begins and ends in `buffer`. `source` names for each field the one whose value it takes, where that is
    not simply itself.
    """

    buffer: pa.Buffer
    bounds: np.ndarray
    kinds: Bytes
    absent: int
    source: Ints | None = None

    @classmethod
    def empty(cls, buffer: pa.Buffer, count: int, widest: int) -> "Fields":
        """Room for `count` fields, to be filled in."""
        kinds = np.full(count + widest, NULL, np.uint8)
        bounds = np.empty((count + widest, 2), np.int32)
        bounds[count:] = buffer.size
        return cls(buffer, bounds, kinds, count)

    def resolve(self, fields: Ints) -> Ints:
        """The fields that hold the values of these."""
        return fields if self.source is None else self.source[fields]

    def texts(self, fields: Ints, missing: Mask) -> pa.StringArray:
        """The texts of these fields, unchecked bytes; null where `missing` says so."""
        return pick(self.bounds, self.buffer, pa.array(fields * 2, mask=missing if missing.any() else None))

    def numbers(self, fields: Ints, missing: Mask, size: int) -> Ints:
        """These fields' bytes as big-endian signed numbers of `size` bytes; no meaning where `missing` says so.

        Raises UnreadableError for a field that has another size.
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
    """Read tuples whose column counts have been read already, and give where each ends.

    `first`: for each tuple its first field. `at`: where its first column is. `ends`: where its message ends. `widths`: how many columns it
    has; they must not grow from one tuple to the next. Raises UnreadableError for a column that does not end before its message does.
    """
    at, field = at.copy(), first.copy()
    widest = int(widths[0]) if len(widths) else 0
    # Tuples that have a k-th column come before those that have none.
    having = np.searchsorted(-widths, -np.arange(widest), "left")
    for column, count in enumerate(having.tolist()):
        # In place, as fresh vectors cost more than what is done to them: `at` becomes where the text begins, `stops` where it ends.
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
    """The first field that is neither text, null nor unchanged; None when there is no such field."""
    known = (fields.kinds == SENT) | (fields.kinds == NULL) | (fields.kinds == UNCHANGED)
    return None if known.all() else int(known.argmin())


def fill_unchanged(fields: Fields, old: Ints, new: Ints, widths: Ints) -> Fields:
    """Give columns that an update did not send the value of the old row that came with it, where that row has one.

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

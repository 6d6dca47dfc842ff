"""Splits the text of one-dimensional arrays, `{1,NULL,"a b"}`, into elements, a whole column at a time."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode.ragged import Ragged, UnreadableError, pick
from pgwal_pipeline.decode.vectors import Bytes, Ints, Mask

_OPEN, _CLOSE, _QUOTE, _ESCAPE, _PLAIN = b'{}"\\.'
_OTHER_SHAPE = r"(?s)\A((\[-?[0-9]+:-?[0-9]+\])+=\{.*\}|\{\{.*\}\})\z"
_NULL = np.frombuffer(b"NULL", np.uint8)


@dataclass(frozen=True, slots=True)
class Split:
    """The elements of all arrays of a column: those of the i-th are `elements[offsets[i]:offsets[i + 1]]`.

    `misfits` marks arrays of another shape (several dimensions, or a lower bound that is not 1), which have no elements here; None if there
    are none.
    """

    elements: pa.StringArray
    offsets: Ints
    misfits: Mask | None

    def rows(self) -> Ints:
        """Return for each element the index of its array."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def split(texts: Ragged, delimiter: str) -> Split:
    """Split the texts of arrays into elements; a null has none. Raises UnreadableError for text that is not an array's."""
    escapes = _escapes(texts.octets)
    outline = _outline(texts, escapes)
    opens = np.flatnonzero(outline == _OPEN)
    closes = np.flatnonzero(outline == _CLOSE)
    valid = texts.valid_mask()
    first, last = texts.offsets[:-1][valid], texts.offsets[1:][valid] - 1
    if not (np.array_equal(opens, first) and np.array_equal(closes, last)):
        return _without_other_shapes(texts, delimiter, opens)
    return _elements(texts, outline, escapes, delimiter)


def _escapes(octets: Bytes) -> Ints:
    """Return the positions of the backslashes that escape the next byte: in a sequence of backslashes every other one."""
    found = np.flatnonzero(octets == _ESCAPE)
    if not len(found):
        return found
    order = np.arange(len(found))
    begins = np.ones(len(found), np.bool_)
    begins[1:] = np.diff(found) != 1
    run = np.maximum.accumulate(np.where(begins, order, 0))
    return found[(order - run) % 2 == 0]


def _outline(texts: Ragged, escapes: Ints) -> Bytes:
    """Return the bytes with everything inside quotes replaced, so that only structural braces, delimiters and quotes remain."""
    outline = texts.octets.copy()
    if len(escapes):
        outline[escapes] = _PLAIN
        outline[np.minimum(escapes + 1, len(outline) - 1)] = _PLAIN
    quotes = outline == _QUOTE
    if not quotes.any():
        if len(escapes):
            raise _malformed(texts, texts.row_of(int(escapes[0])))
        return outline
    inside = np.cumsum(quotes, dtype=np.uint8) & 1 == 1  # the overflow of a byte keeps odd and even
    loose = escapes[~inside[escapes]]
    if len(loose):
        raise _malformed(texts, texts.row_of(int(loose[0])))
    ends = texts.offsets[1:][texts.lengths > 0] - 1
    torn = inside[ends]
    if torn.any():
        raise _malformed(texts, texts.row_of(int(ends[torn.argmax()])))
    outline[inside & ~quotes] = _PLAIN
    return outline


def _without_other_shapes(texts: Ragged, delimiter: str, opens: Ints) -> Split:
    """Mark the arrays of another shape as misfits and split the others."""
    valid = texts.valid_mask()
    braces = np.diff(np.searchsorted(opens, texts.offsets))
    begins = np.zeros(len(texts), np.uint8)
    some = texts.lengths > 0
    begins[some] = texts.octets[texts.offsets[:-1][some]]
    misfits = valid & ((braces > 1) | (begins == ord("[")))
    wrong = (valid & ~misfits & (begins != _OPEN)) | (misfits & ~texts.matching(_OTHER_SHAPE))
    if not misfits.any() or wrong.any():
        raise _malformed(texts, int(wrong.argmax()) if wrong.any() else _first_unclosed(texts))
    done = split(texts.without(misfits), delimiter)
    return Split(done.elements, done.offsets, misfits)


def _first_unclosed(texts: Ragged) -> int:
    """Return the index of the first array that is not one pair of braces; there must be one."""
    return int((~texts.matching(r'(?s)\A\{([^{}"\\]|"([^"\\]|\\.)*")*\}\z') & texts.valid_mask()).argmax())


def _elements(texts: Ragged, outline: Bytes, escapes: Ints, delimiter: str) -> Split:
    """Split arrays that are each one pair of braces around the elements."""
    filled = texts.lengths > 2
    separates = outline == ord(delimiter)
    before, after = separates.copy(), separates
    before[texts.offsets[:-1][filled]] = True
    after[texts.offsets[1:][filled] - 1] = True
    starts, ends = np.flatnonzero(before) + 1, np.flatnonzero(after)
    offsets = np.searchsorted(starts, texts.offsets)
    quoted = outline[starts] == _QUOTE
    wrong = ends <= starts
    quotes = np.flatnonzero(outline == _QUOTE)
    if len(quotes):
        held = np.searchsorted(quotes, ends) - np.searchsorted(quotes, starts)
        wrong |= (held != 2 * quoted) | (quoted & (outline[ends - 1] != _QUOTE))
    if wrong.any():
        raise _malformed(texts, texts.row_of(int(starts[wrong.argmax()]) - 1))
    starts, ends = starts + quoted, ends - quoted
    null = _nulls(texts.octets, starts, ends) & ~quoted
    octets = texts.octets
    if len(escapes):
        kept = np.ones(len(octets), np.bool_)
        kept[escapes] = False
        octets = octets[kept]
        starts, ends = starts - np.searchsorted(escapes, starts), ends - np.searchsorted(escapes, ends)
    bounds = np.empty((len(starts), 2), np.int32)
    bounds[:, 0], bounds[:, 1] = starts, ends
    which = pa.array(np.arange(0, 2 * len(starts), 2), mask=null if null.any() else None)
    return Split(pick(bounds, octets, which), offsets, None)


def _nulls(octets: Bytes, starts: Ints, ends: Ints) -> Mask:
    null = ends - starts == len(_NULL)
    candidates = np.flatnonzero(null)
    null[candidates] = (octets[starts[candidates, None] + np.arange(len(_NULL))] == _NULL).all(axis=1)
    return null


def _malformed(texts: Ragged, index: int) -> UnreadableError:
    return texts.unreadable(index, "array")

"""String arrays as numpy vectors: all bytes in one, and the offsets at which strings begin and end."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgwal_pipeline.decode.vectors import Bytes, Ints, Mask

_SHOWN = 60  # characters of a value that an error shows


class UnreadableError(ValueError):
    """A value or message cannot be read: its index among those read together, and the reason."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


@dataclass(frozen=True)
class Ragged:
    """A string array without unused bytes: the i-th string is `octets[offsets[i]:offsets[i + 1]]`, and a null has no bytes.

    `validity` is Arrow's bitmap of `array`, None if nothing is null.
    """

    array: pa.StringArray
    octets: Bytes
    offsets: Ints
    validity: pa.Buffer | None

    @classmethod
    def of(cls, array: pa.StringArray) -> "Ragged":
        """Return the strings of an array. The memory is shared if the array has no offset and its nulls have no bytes."""
        ragged = cls._shared(array)
        plain = array.offset == 0 and (ragged.valid is None or not ragged.lengths[~ragged.valid].any())
        return ragged if plain else cls._shared(array.take(pa.array(np.arange(len(array)), mask=np.asarray(array.is_null()))))

    def without(self, which: Mask) -> "Ragged":
        """Return the same strings, with those that `which` marks made null."""
        gone = which if self.valid is None else which | ~self.valid
        return Ragged._shared(self.array.take(pa.array(np.arange(len(self)), mask=gone)))

    def only(self, indices: Ints) -> "Ragged":
        """Return the strings at these indices."""
        return Ragged._shared(self.array.take(pa.array(indices)))

    @classmethod
    def _shared(cls, array: pa.StringArray) -> "Ragged":
        validity, positions, data = array.buffers()
        offsets = np.frombuffer(positions, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        octets = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        return cls(array, octets[offsets[0] : offsets[-1]], offsets - offsets[0], validity if array.null_count else None)

    def __len__(self) -> int:
        return len(self.array)

    @cached_property
    def lengths(self) -> Ints:
        """The number of bytes of each string."""
        return np.diff(self.offsets)

    @cached_property
    def valid(self) -> Mask | None:
        """The mask of strings that are not null; None if no string is null."""
        return None if self.validity is None else np.asarray(self.array.is_valid())

    def valid_mask(self) -> Mask:
        """Return the mask of strings that are not null, as a new vector."""
        return np.ones(len(self), np.bool_) if self.valid is None else self.valid.copy()

    def row_of(self, position: int) -> int:
        """Return the index of the string that holds the byte at `position`."""
        return int(np.searchsorted(self.offsets, position, "right")) - 1

    def holding(self, octets: Mask) -> Mask:
        """Return the mask of strings that hold one of the marked bytes."""
        held = np.zeros(len(self), np.bool_)
        positions = np.flatnonzero(octets)
        if len(positions):
            held[np.searchsorted(self.offsets, positions, "right") - 1] = True
        return held

    def bytes_at(self, index: int) -> bytes:
        """Return the bytes of the string at `index`."""
        return self.octets[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def matching(self, pattern: str) -> Mask:
        """Return the mask of strings that match a regular expression (RE2's); nulls do not match."""
        found = pc.call_function("match_substring_regex", [self.array.view(pa.binary())], pc.MatchSubstringOptions(pattern))
        return np.asarray(found.fill_null(False))

    def unreadable(self, index: int, wanted: object) -> UnreadableError:
        """Return the error for the string at `index`, which is no text of the type `wanted`."""
        shown = self.bytes_at(index).decode(errors="backslashreplace")
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
        return UnreadableError(index, f"{shown!r} is no {wanted} as Postgres writes it")


def offsets_of(lengths: Ints) -> Ints:
    """Return the offsets at which strings of these lengths begin and end when laid end to end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def assemble(arrow: pa.DataType, length: int, *buffers: pa.Buffer | np.ndarray | bytes | None) -> pa.Array:
    """Return an array of a flat type from its buffers, the validity bitmap first."""
    return pa.Array.from_buffers(arrow, length, [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers])


def pick(bounds: np.ndarray, data: pa.Buffer | np.ndarray, which: pa.Array) -> pa.StringArray:
    """Copy pieces of `data` into a compact string array; they need not be UTF-8.

    `bounds` is (n, 2) int32, ascending: the i-th piece lies from `bounds[i, 0]` to `bounds[i, 1]`. `which` are int64 indices of pieces,
    each multiplied by two; null gives null.
    """
    # n pieces and the n - 1 gaps between them make one string array whose offsets are the bounds; taking the even elements copies in C++.
    if not len(bounds):
        return pa.nulls(len(which), pa.string())
    return assemble(pa.string(), 2 * len(bounds) - 1, None, bounds, data).take(which)

"""Lay many byte strings end to end in one buffer, so that numpy can read the same field of all of them at once.

Positions are byte offsets into that buffer, as int64 vectors. The buffer ends in zeros that belong to no string, so a field of fixed size
can be read wherever a string should have it. Comparing positions with `ends` catches what was read past a string's own end.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode.vectors import Bytes, Ints
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline.values.lsn import format_lsn

PORTION = 64 << 20
"""The most bytes in one buffer, unless a single string has more. The vectors that describe a field take ten times the bytes of a null."""

HEAD = 8
"""How many bytes a message that changes a row has before its first column: kind, oid, tag and column count."""

_CHANGES = b"IUD"
_PADDING = bytes(64)
_SHOWN = 24  # how many bytes of a message an error shows


@dataclass(frozen=True, slots=True)
class Frames:
    """Byte strings end to end in one buffer: the i-th is `octets[starts[i]:ends[i]]`.

    `words[p]` is the 8 bytes from p on, in the machine's byte order. `positions` are the strings' WAL positions, if they have any. `heads`
    has the index of each string that was cut down to its head, with the length in bytes of the whole string. `guards` says of a table's oid
    whether errors must not show the values of its rows.
    """

    buffer: pa.Buffer
    octets: Bytes
    words: Ints
    starts: Ints
    ends: Ints
    positions: Sequence[int] = ()
    heads: Mapping[int, int] = field(default_factory=dict)
    guards: Callable[[int], bool] | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def first(self, count: int) -> "Frames":
        """Return the first `count` strings, on the same buffer."""
        return replace(self, starts=self.starts[:count], ends=self.ends[:count], positions=self.positions[:count])

    def octet(self, positions: Ints) -> Bytes:
        """Return the byte at each position."""
        return self.octets[positions]

    def word(self, positions: Ints) -> Ints:
        """Return the signed big-endian 64-bit number at each position."""
        words = self.words[positions]
        return words.byteswap(inplace=True) if sys.byteorder == "little" else words

    def bytes_of(self, index: int) -> bytes:
        """Return the string at `index`."""
        return self.octets[self.starts[index] : self.ends[index]].tobytes()

    def table_error(self, index: int, reason: str, table: object = None) -> DecodeError:
        """Return `message_error` with the oid of the table that the message belongs to; the oid follows the kind byte."""
        error = self.message_error(index, reason, table)
        error.oid = int.from_bytes(error.payload[1:5]) if len(error.payload) >= 5 else 0
        return error

    def message_error(self, index: int, reason: str, table: object = None) -> DecodeError:
        """Return the error for the replication message at `index`, with its WAL position and its first bytes."""
        payload = self.bytes_of(index)
        size = len(payload)
        if self.guards is not None and payload[:1] in (b"I", b"U", b"D") and self.guards(int.from_bytes(payload[1:5])):
            payload = payload[:HEAD]
        lsn = self._lsn(index)
        kind = chr(payload[0]) if payload and 32 < payload[0] < 127 else "unknown"
        of_table = "" if table is None else f" of {table}"
        return DecodeError(
            f"The {kind} message{of_table} at WAL position {format_lsn(lsn)} cannot be decoded: {reason} (it has {size} bytes and "
            f"starts with {payload[:_SHOWN].hex(' ') or 'nothing'}).",
            lsn=lsn,
            payload=payload,
        )

    def _lsn(self, index: int) -> int:
        """Return the WAL position of the message at `index`, or of the last one before it: Relation and Type messages have no position."""
        return next((lsn for lsn in reversed(self.positions[: index + 1]) if lsn), 0)


def heads_of_large(messages: Sequence[bytes], largest: int) -> tuple[list[bytes], dict[int, int]]:
    """Cut each message that changes a row and has more than `largest` bytes down to its head.

    Returns all messages, and the original length in bytes of each one that was cut, by index.
    """
    large = {index: len(message) for index, message in enumerate(messages) if len(message) > largest and message[0] in _CHANGES}
    return [message[:HEAD] if index in large else message for index, message in enumerate(messages)], large


def join(parts: Sequence[bytes], positions: Sequence[int] = (), heads: Mapping[int, int] | None = None) -> Iterator[Frames]:
    """Lay `parts` end to end in as few buffers of at most PORTION bytes as their order allows; a longer part gets a buffer of its own.

    `positions` are the parts' WAL positions; `heads` is as in `Frames`.
    """
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    through = np.cumsum(lengths)
    first, before = 0, 0
    while first < len(parts):
        last = max(int(np.searchsorted(through, before + PORTION, "right")), first + 1)
        frames = _laid(parts if last - first == len(parts) else parts[first:last], lengths[first:last], positions[first:last])
        yield replace(frames, heads={index - first: size for index, size in heads.items() if first <= index < last}) if heads else frames
        first, before = last, int(through[last - 1])


def lay(octets: bytearray, lengths: Sequence[int]) -> Frames:
    """Return the strings of these lengths that lie end to end in `octets`, which is extended and kept as the buffer."""
    octets += _PADDING
    return _framed(octets, np.array(lengths, np.int64), ())


def _laid(parts: Sequence[bytes], lengths: Ints, positions: Sequence[int]) -> Frames:
    return _framed(b"".join([*parts, _PADDING]), lengths, positions)


def _framed(joined: bytes | bytearray, lengths: Ints, positions: Sequence[int]) -> Frames:
    if len(joined) >= 1 << 31:
        raise DecodeError("A single row of more than 2 GiB cannot be decoded; leave its table out of the publication.")
    ends = np.cumsum(lengths)
    return Frames(pa.py_buffer(joined), np.frombuffer(joined, np.uint8), words(joined), ends - lengths, ends, positions)


def words(octets: bytes | bytearray | pa.Buffer) -> Ints:
    """Return the 8 bytes from each position on, in the machine's byte order.

    They overlap and are unaligned on purpose: one gather reads a kind byte together with the length after it.
    """
    return np.ndarray((len(octets) - 7,), np.int64, octets, strides=(1,))

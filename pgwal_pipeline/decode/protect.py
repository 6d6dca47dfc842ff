"""Turns the texts of protected columns into what arrives: a keyed hash, or a mask. The texts themselves go no further than this."""

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgwal_pipeline.decode.ragged import assemble
from pgwal_pipeline.values.protection import mask_of

_BLOCK = 64  # bytes of SHA-256
_DIGITS = 64  # of a hash in hexadecimal
_SAMPLE = 4096  # values that show how many of a column's are different; updates repeat what they do not change
_REPEATED = 0.8  # the share of different values up to which finding them costs less than hashing all
_SHOWN = 4  # characters that the mask `last4` leaves

Protect = Callable[[pa.StringArray], pa.StringArray]
"""Returns what arrives for the texts of a column. They need not be UTF-8; what arrives is. Null stays null."""


@lru_cache(maxsize=256)
def protect_with(protection: str, key: bytes) -> Protect:
    """Return the function for a column's protection; `key` is the key of hashes."""
    return _last_four if mask_of(protection) == "last4" else _Hashes(key)


class _Hashes:
    """HMAC-SHA-256 with one key, in lower-case hexadecimal digits."""

    def __init__(self, key: bytes) -> None:
        block = (hashlib.sha256(key).digest() if len(key) > _BLOCK else key).ljust(_BLOCK, b"\0")
        # What the key contributes is hashed once and copied, in half the time that `hmac.digest` takes for a short text.
        self._inner = hashlib.sha256(bytes(octet ^ 0x36 for octet in block))
        self._outer = hashlib.sha256(bytes(octet ^ 0x5C for octet in block))

    def __call__(self, texts: pa.StringArray) -> pa.StringArray:
        octets = texts.view(pa.binary())
        sample = octets.slice(0, _SAMPLE)
        if len(sample.unique()) < _REPEATED * len(sample):
            coded = octets.dictionary_encode()
            return self._all(coded.dictionary).take(coded.indices)
        return self._all(octets)

    def _all(self, octets: pa.BinaryArray) -> pa.StringArray:
        missing = np.asarray(octets.is_null())
        inner, outer = self._inner.copy, self._outer.copy
        digests = []
        for text in octets.drop_null().to_pylist():
            first, second = inner(), outer()
            first.update(text)
            second.update(first.digest())
            digests.append(second.digest())
        offsets = np.zeros(len(octets) + 1, np.int32)
        np.cumsum(np.where(missing, 0, _DIGITS), out=offsets[1:])
        validity = np.packbits(~missing, bitorder="little") if missing.any() else None
        return assemble(pa.string(), len(octets), validity, offsets, b"".join(digests).hex().encode())


def _last_four(texts: pa.StringArray) -> pa.StringArray:
    """Write `*` for each character but the last four, for all of them where there are four or fewer.

    Text that is not UTF-8 shows none of its bytes.
    """
    octets = texts.view(pa.binary())
    try:
        known = octets.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if value is None else _masked(value) for value in octets.to_pylist()], pa.string())
    lengths = _call("utf8_length", known)
    short = _call("less_equal", lengths, _SHOWN)
    stars = _call("binary_repeat", "*", _call("if_else", short, lengths, _call("subtract", lengths, _SHOWN)))
    ends = pc.call_function("utf8_slice_codeunits", [known], pc.SliceOptions(-_SHOWN))
    return _call("binary_join_element_wise", stars, _call("if_else", short, "", ends), "")


def _call(name: str, *values: object) -> pa.Array:
    return pc.call_function(name, [value if isinstance(value, pa.Array) else pa.scalar(value) for value in values])


def _masked(octets: bytes) -> str:
    try:
        text = octets.decode()
    except UnicodeDecodeError:
        return "*" * len(octets)
    return "*" * len(text) if len(text) <= _SHOWN else "*" * (len(text) - _SHOWN) + text[-_SHOWN:]

"""Casts Postgres's output text to typed Arrow arrays, a whole column at a time.

A text is one of three kinds. An ordinary value becomes its typed value. A misfit is a valid value that the Arrow type cannot hold, or text
that is not UTF-8; it becomes null and is marked, so that its text can be kept. Text that the type never has raises UnreadableError: the
stream is damaged, or the session that sent it lacked the output settings that the decoder needs.
"""

import binascii
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode import arrays
from pgwal_pipeline.decode.ragged import Ragged, UnreadableError, assemble, offsets_of
from pgwal_pipeline.decode.types import Target, target_of
from pgwal_pipeline.decode.vectors import Mask
from pgwal_pipeline.values.relation import PgType

_DATE = r"\A(-?infinity|[0-9]{4,7}-[0-9]{2}-[0-9]{2}( BC)?)\z"
_TIMESTAMP = r"\A(-?infinity|[0-9]{4,6}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?( BC)?)\z"
_TIMESTAMPTZ = _TIMESTAMP.replace("( BC)?", r"\+00( BC)?")
_NOT_FINITE = r"\A(NaN|-?Infinity)\z"
_NUMERIC = r"\A-?[0-9]+(\.[0-9]+)?\z"
_INT64_DIGITS = 18  # decimals of up to this many digits are read as 64-bit integers
_YEAR_ONE = -719_162  # days from 1970-01-01 back to 0001-01-01
_DAY = 86_400_000_000  # microseconds


@dataclass(frozen=True, slots=True)
class Cast:
    """A typed array, and the mask of its nulls that stand for a value it cannot hold; None if there are none."""

    values: pa.Array
    misfits: Mask | None = None


def cast_text(texts: pa.StringArray, declared: PgType) -> tuple[pa.Array, Mask | None]:
    """Cast Postgres's output text to an array of `arrow_type(declared)`; return it and the mask of misfits, None if there are none.

    Raises UnreadableError, with the index of the first such text, for text that no value of the type has.
    """
    done = cast_to(texts, target_of(declared))
    return done.values, done.misfits


def cast_to(texts: pa.StringArray, target: Target) -> Cast:
    """Cast as `cast_text` does, to a type found before. Texts need not be UTF-8: in a string column others are misfits."""
    if texts.null_count == len(texts):
        return Cast(pa.nulls(len(texts), target.arrow))
    if target.protect is not None:
        return Cast(target.protect(texts))
    if target.binary is not None:
        return Cast(texts.view(target.arrow))
    if target.element is not None:
        return _lists(texts, target, target.element)
    return _CASTS[target.arrow.id](Ragged.of(texts), target.arrow)


def _strings(texts: Ragged, _: pa.DataType) -> Cast:
    if texts.octets.max(initial=0) < 0x80:
        return Cast(texts.array)
    octets = texts.array.view(pa.binary())
    try:
        return Cast(octets.cast(pa.string()))
    except pa.ArrowInvalid:
        misfits = np.array([value is not None and not _is_utf8(value) for value in octets.to_pylist()])
        return Cast(texts.without(misfits).array, misfits)


def _is_utf8(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True


def kept(texts: pa.StringArray) -> pa.StringArray:
    """Return the texts of misfits in the form that is stored.

    Bytes that are not UTF-8, which a database in SQL_ASCII may hold, are written as Postgres writes bytea.
    """
    octets = texts.view(pa.binary())
    try:
        return octets.cast(pa.string())
    except pa.ArrowInvalid:
        values = octets.to_pylist()
        return pa.array([value if value is None or _is_utf8(value) else b"\\x" + value.hex().encode() for value in values]).cast(
            pa.string()
        )


def _integers(texts: Ragged, arrow: pa.DataType) -> Cast:
    # Arrow would also accept hexadecimal digits.
    return Cast(_arrow_cast(_up_to(texts, "9", arrow), arrow))


def _floats(texts: Ragged, arrow: pa.DataType) -> Cast:
    values = _arrow_cast(texts, arrow)
    # NaN and Infinity are values. Overflow, and other spellings of them that Arrow accepts, are not.
    _check(texts, ~np.isfinite(values.fill_null(0).to_numpy()), _NOT_FINITE, arrow)
    return Cast(values)


def _booleans(texts: Ragged, arrow: pa.DataType) -> Cast:
    valid = texts.valid_mask()
    if not (texts.lengths[valid] == 1).all():
        raise texts.unreadable(int((valid & (texts.lengths != 1)).argmax()), arrow)
    letters = np.zeros(len(texts), np.uint8)
    letters[valid] = texts.octets
    true = letters == ord("t")
    wrong = valid & ~true & (letters != ord("f"))
    if wrong.any():
        raise texts.unreadable(int(wrong.argmax()), arrow)
    return Cast(assemble(arrow, len(texts), texts.validity, np.packbits(true, bitorder="little")))


def _binaries(texts: Ragged, arrow: pa.DataType) -> Cast:
    valid = texts.valid_mask()
    lengths, starts = texts.lengths, texts.offsets[:-1]
    wrong = valid & ((lengths < 2) | (lengths & 1 == 1))
    prefixes = starts[valid & ~wrong]
    wrong[np.flatnonzero(valid & ~wrong)] = (texts.octets[prefixes] != ord("\\")) | (texts.octets[prefixes + 1] != ord("x"))
    if wrong.any():
        raise texts.unreadable(int(wrong.argmax()), arrow)
    digits = np.ones(len(texts.octets), np.bool_)
    digits[prefixes] = digits[prefixes + 1] = False
    try:
        octets = binascii.unhexlify(texts.octets[digits].tobytes())
    except ValueError:
        _check(texts, valid, r"\A\\x([0-9a-f]{2})*\z", arrow)
        raise
    offsets = offsets_of(np.where(valid, (lengths - 2) // 2, 0))
    return Cast(assemble(arrow, len(texts), texts.validity, offsets.astype(np.int32), octets))


def _dates(texts: Ragged, arrow: pa.DataType) -> Cast:
    # Every date that is a misfit is longer or shorter than year-month-day.
    return _moments(texts, arrow, texts.lengths == 10, _DATE, _YEAR_ONE)


def _timestamps(texts: Ragged, arrow: pa.DataType) -> Cast:
    shortest = 22 if arrow.tz else 19
    fits = texts.lengths >= shortest  # else an infinity
    starts, ends = texts.offsets[:-1][fits], texts.offsets[1:][fits]
    # A year of more than four digits has no dash there; a date before Christ ends in a letter.
    fits[fits] = (texts.octets[starts + 4] == ord("-")) & (texts.octets[ends - 1] <= ord("9"))
    return _moments(texts, arrow, fits, _TIMESTAMPTZ if arrow.tz else _TIMESTAMP, _YEAR_ONE * _DAY)


def _moments(texts: Ragged, arrow: pa.DataType, fits: Mask, pattern: str, earliest: int) -> Cast:
    """Cast dates or timestamps: those that `fits` marks become values, the others misfits, which must match `pattern`."""
    texts, misfits = _without(texts, fits, pattern, arrow)
    values = _arrow_cast(_up_to(texts, ":", arrow), arrow)
    counts = values.view(pa.int32() if arrow.bit_width == 32 else pa.int64()).fill_null(earliest).to_numpy()
    if counts.min(initial=earliest) < earliest:  # there is no year zero
        raise texts.unreadable(int(counts.argmin()), arrow)
    return Cast(values, misfits)


def _decimals(texts: Ragged, arrow: pa.DataType) -> Cast:
    texts, misfits = _without(texts, ~texts.holding(texts.octets > ord("9")), _NOT_FINITE, arrow)
    values = _short_decimals(texts, arrow) if arrow.precision <= _INT64_DIGITS else _long_decimals(texts, arrow)
    if values is not None:
        return Cast(values, misfits)
    whole, scale = arrow.precision - arrow.scale, arrow.scale
    digits = f"0*[0-9]{{1,{whole}}}" if whole else "0+"
    fraction = rf"(\.[0-9]{{1,{scale}}})?" if scale else ""
    texts, too_long = _without(texts, texts.matching(rf"\A-?({digits}){fraction}\z"), _NUMERIC, arrow)
    if too_long is not None:
        misfits = too_long if misfits is None else misfits | too_long
    return Cast(_arrow_cast(texts, arrow), misfits)


def _long_decimals(texts: Ragged, arrow: pa.DataType) -> pa.Array | None:
    try:
        return texts.array.cast(arrow)
    except pa.ArrowInvalid:
        return None


def _short_decimals(texts: Ragged, arrow: pa.DataType) -> pa.Array | None:
    """Read decimals that fit 64 bits as integers without their point; None if a value is too long or lacks the scale's digits."""
    octets, offsets = texts.octets, texts.offsets
    if arrow.scale:
        ends = offsets[1:] if texts.valid is None else offsets[1:][texts.valid]
        points = octets == ord(".")
        expected = ends - (arrow.scale + 1)
        found = np.flatnonzero(points)
        if len(found) != len(expected) or (found != expected).any():
            return None
        octets = octets[~points]
        offsets = offsets.copy()
        offsets[1:] -= np.arange(1, len(offsets)) if texts.valid is None else np.cumsum(texts.valid)
    digits = assemble(pa.string(), len(texts), texts.validity, offsets.astype(np.int32), octets)
    try:
        numbers = digits.cast(pa.int64()).fill_null(0).to_numpy()
    except pa.ArrowInvalid:
        return None
    limit = 10**arrow.precision
    if numbers.max() >= limit or numbers.min() <= -limit:
        return None
    wide = np.empty((len(numbers), 2), np.int64)
    wide[:, 0], wide[:, 1] = numbers, numbers >> 63
    return assemble(arrow, len(texts), texts.validity, wide)


def _lists(texts: pa.StringArray, target: Target, element: Target) -> Cast:
    ragged = Ragged.of(texts)
    split = arrays.split(ragged, target.delimiter)
    try:
        done = cast_to(split.elements, element)
    except UnreadableError as error:
        raise UnreadableError(int(split.rows()[error.index]), f"in an array, {error.reason}") from None
    misfits, values, offsets = split.misfits, done.values, split.offsets
    if done.misfits is not None:
        rows = split.rows()
        misfits = np.zeros(len(texts), np.bool_) if misfits is None else misfits.copy()
        misfits[rows[done.misfits]] = True
        values = values.filter(pa.array(~misfits[rows]))
        offsets = offsets_of(np.where(misfits, 0, np.diff(offsets)))
    missing = ~ragged.valid_mask()
    if misfits is not None:
        missing |= misfits
    lists = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), values, type=target.arrow, mask=pa.array(missing) if missing.any() else None
    )
    return Cast(lists, misfits)


def _arrow_cast(texts: Ragged, arrow: pa.DataType) -> pa.Array:
    try:
        return texts.array.cast(arrow)
    except pa.ArrowInvalid:
        raise texts.unreadable(_first_failing(texts.array, arrow), arrow) from None


def _first_failing(values: pa.Array, arrow: pa.DataType) -> int:
    """Return the index of the first value that Arrow does not cast; the array must have one."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values.slice(low, middle - low).cast(arrow)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def _without(texts: Ragged, fits: Mask, pattern: str, arrow: pa.DataType) -> tuple[Ragged, Mask | None]:
    """Make the texts that do not fit null; return the texts and the mask of these. Each of them must match `pattern`."""
    misfits = texts.valid_mask() & ~fits
    if not misfits.any():
        return texts, None
    _check(texts, misfits, pattern, arrow)
    return texts.without(misfits), misfits


def _check(texts: Ragged, among: Mask, pattern: str, arrow: pa.DataType) -> None:
    """Raise UnreadableError for the first of the texts in `among` that does not match `pattern`."""
    indices = np.flatnonzero(among)
    if len(indices):
        wrong = ~texts.only(indices).matching(pattern)
        if wrong.any():
            raise texts.unreadable(int(indices[wrong.argmax()]), arrow)


def _up_to(texts: Ragged, letter: str, arrow: pa.DataType) -> Ragged:
    """Return the texts. Raises UnreadableError if a byte is greater than `letter`."""
    beyond = texts.octets > ord(letter)
    if beyond.any():
        raise texts.unreadable(texts.row_of(int(beyond.argmax())), arrow)
    return texts


_CASTS: dict[int, Callable[[Ragged, pa.DataType], Cast]] = {
    pa.string().id: _strings,
    pa.bool_().id: _booleans,
    pa.int16().id: _integers,
    pa.int32().id: _integers,
    pa.int64().id: _integers,
    pa.float32().id: _floats,
    pa.float64().id: _floats,
    pa.decimal128(1).id: _decimals,
    pa.date32().id: _dates,
    pa.timestamp("us").id: _timestamps,
    pa.binary().id: _binaries,
}

"""Reads values in their types' binary form, as COPY sends them, into typed Arrow arrays, a whole column at a time.

For types of a fixed size this only changes the byte order; text would have to be formatted and parsed. The forms are those of the send
functions in Postgres's src/backend/utils/adt, which have not changed since 8.4. A value that the Arrow type cannot hold becomes null and a
misfit, as in `casts`; `written` returns the text that Postgres would have sent for it.
"""

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode.ragged import assemble
from pgwal_pipeline.decode.vectors import Ints, Mask

_EPOCH_DAY = 10_957  # days from 1970-01-01 to 2000-01-01, from where Postgres counts
_DAY = 86_400_000_000  # microseconds
_SECOND = 1_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31, from 1970-01-01
_DATE_ENDS = (-(1 << 31), (1 << 31) - 1)  # the infinities
_TIMESTAMP_ENDS = (-(1 << 63), (1 << 63) - 1)
_BYTEA, _OID = 17, 26

SIZES = {16: 1, 20: 8, 21: 2, 23: 4, _OID: 4, 700: 4, 701: 8, 1082: 4, 1114: 8, 1184: 8}
"""The bytes of a value, by its type's OID: bool, int8, int2, int4, oid, float4, float8, date, timestamp, timestamptz."""

TYPES = frozenset({_BYTEA, *SIZES})
"""The OIDs of all types whose binary form is read. That of bytea is its bytes."""


def read(numbers: Ints, missing: Mask, arrow: pa.DataType, oid: int) -> tuple[pa.Array, Mask | None]:
    """Return an array of `arrow` from values of a type in SIZES, and the mask of misfits, None if there are none.

    `numbers` are the values' bytes read as big-endian signed numbers. Those that `missing` marks become null.
    """
    if pa.types.is_temporal(arrow):
        return _moments(numbers, missing, arrow)
    validity = np.packbits(~missing, bitorder="little") if missing.any() else None
    if pa.types.is_boolean(arrow):
        return assemble(arrow, len(numbers), validity, np.packbits(numbers != 0, bitorder="little")), None
    values = numbers & 0xFFFFFFFF if oid == _OID else numbers.astype(f"i{SIZES[oid]}", copy=False)
    if pa.types.is_floating(arrow):
        values = values.view(f"f{SIZES[oid]}")
        wrong = np.isnan(values)
        if wrong.any():  # NaN has many bit patterns; all become one
            values[wrong] = np.nan
    return assemble(arrow, len(numbers), validity, values), None


def written(numbers: Ints, arrow: pa.DataType) -> pa.StringArray:
    """Return the texts of dates and timestamps that were misfits, as Postgres writes them with the settings of `dsn.connect`."""
    if pa.types.is_date(arrow):
        return pa.array([_date(days) for days in numbers.tolist()], pa.string())
    zone = "+00" if arrow.tz else ""
    return pa.array([_timestamp(moment, zone) for moment in numbers.tolist()], pa.string())


def _moments(counts: Ints, missing: Mask, arrow: pa.DataType) -> tuple[pa.Array, Mask | None]:
    """Return dates or timestamps from counts since 2000-01-01. Years 1 to 9999 are values, all others misfits."""
    day = 1 if pa.types.is_date(arrow) else _DAY
    misfits = (counts < (_FIRST_DAY - _EPOCH_DAY) * day) | (counts >= (_LAST_DAY + 1 - _EPOCH_DAY) * day)
    misfits &= ~missing
    nulls = missing | misfits
    validity = np.packbits(~nulls, bitorder="little") if nulls.any() else None
    values = np.where(nulls, 0, counts) + _EPOCH_DAY * day
    array = assemble(arrow, len(counts), validity, values.astype(f"i{arrow.bit_width // 8}", copy=False))
    return array, misfits if misfits.any() else None


def _date(days: int) -> str:
    if days in _DATE_ENDS:
        return "-infinity" if days < 0 else "infinity"
    date, era = _civil(days)
    return date + era


def _timestamp(moment: int, zone: str) -> str:
    if moment in _TIMESTAMP_ENDS:
        return "-infinity" if moment < 0 else "infinity"
    days, rest = divmod(moment, _DAY)
    seconds, fraction = divmod(rest, _SECOND)
    minutes, second = divmod(seconds, 60)
    date, era = _civil(days)
    part = f".{fraction:06}".rstrip("0") if fraction else ""
    return f"{date} {minutes // 60:02}:{minutes % 60:02}:{second:02}{part}{zone}{era}"


def _civil(days: int) -> tuple[str, str]:
    """Return the day as year-month-day in the proleptic Gregorian calendar, and ` BC` or nothing; `days` counts from 2000-01-01.

    Years begin in March here, so that a leap day is the last day of its year, and repeat in cycles of 400 years, as in Howard Hinnant's
    "chrono-Compatible Low-Level Date Algorithms".
    """
    cycle, day = divmod(days + _EPOCH_DAY + 719_468, 146_097)
    year = (day - day // 1_460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    month += 3 if month < 10 else -9
    year += 400 * cycle + (month <= 2)
    return f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02}", "" if year > 0 else " BC"

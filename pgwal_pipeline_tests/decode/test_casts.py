import math
import struct
from datetime import date, datetime
from decimal import Context, Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgwal_pipeline.decode.casts import cast_text
from pgwal_pipeline.values.relation import PgType
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.casting import MISFIT, check, refused, texts
from pgwal_pipeline_tests.decode.wire import array_of, numeric

UTC = ZoneInfo("UTC")


def test_booleans() -> None:
    check(wire.BOOL, [("t", True), (None, None), ("f", False)] * 9)
    assert refused(wire.BOOL, "t", None, "true").index == 2
    assert refused(wire.BOOL, None, "t", "", "f").index == 2
    assert refused(wire.BOOL, "t", "x").index == 1


@pytest.mark.parametrize(("declared", "bits"), [(wire.INT2, 16), (wire.INT4, 32), (wire.INT8, 64)], ids=["int2", "int4", "int8"])
def test_integers(declared: PgType, bits: int) -> None:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    check(declared, [(str(low), low), (str(high), high), ("0", 0), (None, None), ("-7", -7)])
    for bad in (str(high + 1), str(low - 1), "", "-", "0x1F", "1.5", "+1", " 1", "1e2", b"\xff"):
        assert refused(declared, "1", None, bad, "2").index == 2, bad


def test_oids_are_unsigned() -> None:
    check(wire.OID, [("0", 0), ("4294967295", 4294967295), (None, None)])


def test_doubles() -> None:
    check(
        wire.FLOAT8,
        [
            *[("1.5", 1.5), ("NaN", math.nan), ("Infinity", math.inf), ("-Infinity", -math.inf), ("-0", -0.0), ("5e-324", 5e-324)],
            *[("1.7976931348623157e+308", 1.7976931348623157e308), ("1e+20", 1e20), (None, None)],
        ],
    )
    for bad in ("1e+999", "infinity", "inf", "nan(1)", "", "1,5", "0x1p3"):
        assert refused(wire.FLOAT8, "NaN", "2.5", None, bad).index == 3, bad


def test_floats_are_rounded_once() -> None:
    values = [0.1, 3.4028235e38, 1e-45, 16777216.0, 1.1754944e-38]
    exact = [struct.unpack("f", struct.pack("f", value))[0] for value in values]
    check(wire.FLOAT4, list(zip(["0.1", "3.4028235e+38", "1e-45", "1.6777216e+07", "1.1754944e-38"], exact, strict=True)))
    assert refused(wire.FLOAT4, "1", "1e+39").index == 1


@given(st.lists(st.floats(width=64), min_size=1))
def test_any_double(numbers: list[float]) -> None:
    shown = ["NaN" if math.isnan(n) else "Infinity" if n == math.inf else "-Infinity" if n == -math.inf else repr(n) for n in numbers]
    check(wire.FLOAT8, list(zip(shown, numbers, strict=True)))


def test_decimals() -> None:
    check(numeric(4, 2), [("12.34", Decimal("12.34")), ("-99.99", Decimal("-99.99")), ("0.05", Decimal("0.05")), (None, None)])
    check(numeric(4, 2), [("NaN", MISFIT), ("0.00", Decimal("0.00")), (None, None), ("-0.01", Decimal("-0.01"))])
    check(numeric(2, 2), [("0.05", Decimal("0.05")), ("-0.99", Decimal("-0.99"))])
    check(numeric(18, 0), [("9" * 18, Decimal("9" * 18)), ("-" + "9" * 18, Decimal("-" + "9" * 18)), ("0", Decimal(0))])
    check(
        numeric(38, 10),
        [("9" * 28 + "." + "9" * 10, Decimal("9" * 28 + "." + "9" * 10)), ("NaN", MISFIT), ("-0.0000000001", Decimal("-1E-10"))],
    )


@pytest.mark.parametrize("precision", [4, 24])
def test_decimals_beyond_precision_are_kept_as_text(precision: int) -> None:
    whole = "9" * (precision - 2)
    cases = [(f"{whole}.99", Decimal(f"{whole}.99")), (f"1{whole}.00", MISFIT), ("1.234", MISFIT), ("9" * 60, MISFIT), (None, None)]
    check(numeric(precision, 2), cases)
    check(numeric(precision, 2), [("Infinity", MISFIT), ("-Infinity", MISFIT), ("1.5", Decimal("1.50")), ("7", Decimal("7.00"))])
    for bad in ("", "abc", "1.2.3", "--1", "1e5", ".", "0x10"):
        assert refused(numeric(precision, 2), "1.00", None, bad).index == 2, bad


@given(st.data(), st.integers(1, 38))
def test_any_decimal(data: st.DataObject, precision: int) -> None:
    scale = data.draw(st.integers(0, precision))
    limit = 10**precision - 1
    unscaled = data.draw(st.lists(st.none() | st.integers(-limit, limit), min_size=1))
    numbers = [None if number is None else Decimal(number).scaleb(-scale, Context(prec=60)) for number in unscaled]
    check(numeric(precision, scale), [(None if number is None else f"{number:f}", number) for number in numbers])


def test_dates() -> None:
    check(
        wire.DATE,
        [
            ("2024-02-29", date(2024, 2, 29)),
            ("0001-01-01", date(1, 1, 1)),
            ("9999-12-31", date(9999, 12, 31)),
            (None, None),
            ("infinity", MISFIT),
            ("-infinity", MISFIT),
            ("0044-03-15 BC", MISFIT),
            ("10000-01-01", MISFIT),
            ("5874897-12-31", MISFIT),
        ],
    )
    check(wire.DATE, [("infinity", MISFIT)] * 3)
    for bad in ("2024-02-30", "2024-13-01", "0000-01-01", "05/06/2024", "05-06-2024", "", "Infinity", "2024-1-1", "20240101ab", "now"):
        assert refused(wire.DATE, "2024-01-01", None, "infinity", bad).index == 3, bad


def test_timestamps() -> None:
    check(
        wire.TIMESTAMP,
        [
            ("2024-05-06 07:08:09", datetime(2024, 5, 6, 7, 8, 9)),
            ("2024-05-06 07:08:09.1", datetime(2024, 5, 6, 7, 8, 9, 100_000)),
            ("2024-05-06 07:08:09.123456", datetime(2024, 5, 6, 7, 8, 9, 123_456)),
            ("0001-01-01 00:00:00", datetime(1, 1, 1)),
            ("9999-12-31 23:59:59.999999", datetime(9999, 12, 31, 23, 59, 59, 999_999)),
            (None, None),
            ("infinity", MISFIT),
            ("-infinity", MISFIT),
            ("0044-03-15 12:00:00 BC", MISFIT),
            ("0044-03-15 12:00:00.25 BC", MISFIT),
            ("10000-01-01 00:00:00", MISFIT),
            ("294276-12-31 23:59:59.999999", MISFIT),
        ],
    )
    for bad in (
        "2024-05-06",
        "2024-05-06 07:08",
        "2024-05-06 07:08:09+00",
        "Mon May 06 07:08:09 2024",
        "2024-02-30 00:00:00",
        "0000-05-06 07:08:09",
    ):
        assert refused(wire.TIMESTAMP, "2024-05-06 07:08:09", "infinity", bad).index == 2, bad


def test_timestamps_with_a_zone() -> None:
    check(
        wire.TIMESTAMPTZ,
        [
            ("2024-05-06 07:08:09+00", datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)),
            ("2024-05-06 07:08:09.12+00", datetime(2024, 5, 6, 7, 8, 9, 120_000, tzinfo=UTC)),
            ("9999-12-31 23:59:59.999999+00", datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
            (None, None),
            ("infinity", MISFIT),
            ("0044-03-15 12:00:00+00 BC", MISFIT),
            ("10000-01-01 00:00:00.5+00", MISFIT),
        ],
    )
    for bad in ("2024-05-06 07:08:09", "2024-05-06 07:08:09 CET", "0044-03-15 12:00:00+02 BC"):
        assert refused(wire.TIMESTAMPTZ, "2024-05-06 07:08:09+00", bad).index == 1, bad


@given(st.lists(st.none() | st.datetimes().map(lambda moment: moment.replace(fold=0)), min_size=1))
def test_any_timestamp(moments: list[datetime | None]) -> None:
    def shown(moment: datetime) -> str:
        fraction = f".{moment.microsecond:06d}".rstrip("0") if moment.microsecond else ""
        return f"{moment.year:04d}-{moment:%m-%d %H:%M:%S}{fraction}"

    check(wire.TIMESTAMP, [(moment and shown(moment), moment) for moment in moments])
    check(wire.TIMESTAMPTZ, [(moment and shown(moment) + "+00", moment and moment.replace(tzinfo=UTC)) for moment in moments])
    check(wire.DATE, [(moment and f"{moment.year:04d}-{moment:%m-%d}", moment and moment.date()) for moment in moments])


def test_bytea() -> None:
    check(wire.BYTEA, [("\\x", b""), ("\\x00ff1a", b"\x00\xff\x1a"), (None, None), ("\\x41", b"A")])
    for bad in ("", "x", "\\x1", "\\xzz", "\\001", "4141", "\\X41", "x\\41"):
        assert refused(wire.BYTEA, "\\x00", None, bad, "\\x01").index == 2, bad


@given(st.lists(st.none() | st.binary(), min_size=1))
def test_any_bytea(values: list[bytes | None]) -> None:
    check(wire.BYTEA, [(None if value is None else "\\x" + value.hex(), value) for value in values])


def test_text() -> None:
    check(wire.TEXT, [("", ""), ("plain", "plain"), (None, None), ("żółć 𝄞\n", "żółć 𝄞\n"), ("{}", "{}")])
    check(wire.JSONB, [("fine", "fine"), ("é", "é"), (None, None), (b"caf\xe9", MISFIT), (b"\xff", MISFIT), ("", "")])
    # Valid as one run of bytes, but a character straddles two values.
    check(wire.TEXT, [(b"\xc3", MISFIT), (b"\xa9", MISFIT)])
    check(array_of(wire.TEXT), [("{é}", ["é"]), (b"{a,\xe9}", MISFIT), (b"{{a},{\xe9}}", MISFIT), (None, None), ("{a,b}", ["a", "b"])])


def test_text_of_types_without_a_column_type_stays_as_it_is() -> None:
    for declared in (wire.MONEY, numeric(), numeric(50, 2), wire.BOX):
        check(declared, [("$1,234.50", "$1,234.50"), ("NaN", "NaN"), (None, None)])


def test_slices_and_hidden_bytes() -> None:
    """A slice, or a null that has bytes behind it, reads like any other array."""
    whole = texts(["1.00", "2.00", None, "3.00"])
    values, _ = cast_text(whole.slice(1, 2), numeric(6, 2))
    assert values.to_pylist() == [Decimal("2.00"), None]
    hidden = pa.Array.from_buffers(
        pa.string(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([0, 1, 5, 6], np.int32)), pa.py_buffer(b"tjunkf")]
    )
    values, _ = cast_text(hidden, wire.BOOL)
    assert values.to_pylist() == [True, None, False]


def test_nothing() -> None:
    for declared in (wire.TEXT, wire.BOOL, numeric(4, 2), array_of(wire.DATE), wire.BYTEA):
        check(declared, [])
        check(declared, [(None, None)] * 3)

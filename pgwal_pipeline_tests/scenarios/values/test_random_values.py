"""Random values of each type, drawn by hypothesis and made by Postgres: the lake has them value by value, by snapshot and by stream."""

import json
import math
from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.values.comparison import assert_values, quoted
from pgwal_pipeline_tests.support import Source

ROWS = 75  # values of each type, which go by snapshot and by stream

_LABELS = ["", "ok", 'it\'s "odd", {so}', "ключ\\", "null"]
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_DAY = 86_400_000_000  # microseconds
_JULIAN = 2_451_545  # the Julian day of 2000-01-01; the first day that Postgres knows is 0
_INTERVAL_MONTHS = 178_000_000 * 12
_SETUP = f"""CREATE TYPE label AS ENUM ({", ".join(map(quoted, _LABELS))});
CREATE TYPE pair AS (a int, b text, c numeric[]); CREATE DOMAIN price AS numeric(8, 2)"""

characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
texts = st.text(characters)
odd_texts = st.text(st.sampled_from("\"'\\{}(),; \n\tnulNUL\x7f\x80\u2028é😀")) | texts


def integers(bits: int) -> st.SearchStrategy[str]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1).map(str)


def decimals(precision: int, scale: int) -> st.SearchStrategy[str]:
    """Of up to so many digits, as Postgres takes them; NaN too."""
    most = 10**precision - 1
    return st.sampled_from(["NaN"]) | st.integers(-most, most).map(lambda unscaled: f"{unscaled}e-{scale}")


def days(low: int, high: int) -> st.SearchStrategy[int]:
    """Days from 2000 on: at the limits, anywhere between them, and in the years that a column of the lake can hold."""
    usual = st.dates().map(lambda day: (day - date(2000, 1, 1)).days)
    return st.sampled_from([low, low + 1, high - 1, high]) | st.integers(low, high) | usual | usual


def jsons(strings: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings
    nested = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3), max_leaves=6)
    return st.builds(json.dumps, nested, ensure_ascii=st.booleans(), indent=st.none() | st.just(1))


def ranges(bounds: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    some = st.tuples(bounds, bounds).map(sorted)
    whole = st.builds(lambda pair, low, high: f"{low}{pair[0]},{pair[1]}{high}", some, st.sampled_from("[("), st.sampled_from("])"))
    return st.sampled_from(["empty", "(,)"]) | whole | bounds.map(lambda low: f"[{low},)") | bounds.map(lambda high: f"(,{high}]")


def clock(micros: int) -> str:
    minutes, rest = divmod(micros, 60_000_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1_000_000:02}.{rest % 1_000_000:06}"


def number(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value == math.inf else "-Infinity" if value == -math.inf else repr(value)


_clocks = st.integers(0, _DAY).map(clock)
_days = days(-_JULIAN, 2_145_031_948).map(lambda day: f"J{day + _JULIAN}")
_micros = st.builds(
    lambda day, micros: str(day * _DAY + micros), days(-_JULIAN, 106_751_982), st.integers(0, _DAY - 1) | st.sampled_from([0, _DAY - 1])
)
_intervals = st.builds(
    "{} mons {} days {} microseconds".format,
    st.integers(-_INTERVAL_MONTHS, _INTERVAL_MONTHS) | st.integers(-30, 30),
    st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-400, 400),
    st.integers(-(1 << 62), 1 << 62) | st.integers(-100_000_000, 100_000_000),
)
_finite = st.floats(allow_nan=False, allow_infinity=False)
_networks = st.builds(lambda address, cut: f"{address}/{cut % (address.max_prefixlen + 1)}", st.ip_addresses(), st.integers(0, 128))

# Type: how its values are drawn, and the SQL that makes one of what was drawn.
TYPES: dict[str, tuple[st.SearchStrategy[str], str]] = {
    "bool": (st.sampled_from("tf"), "%s::bool"),
    "int2": (integers(16), "%s::int2"),
    "int4": (integers(32), "%s::int4"),
    "int8": (integers(64), "%s::int8"),
    "oid": (st.integers(0, (1 << 32) - 1).map(str), "%s::oid"),
    "float4": (st.floats(width=32).map(number), "%s::float4"),
    "float8": (st.floats().map(number), "%s::float8"),
    "numeric": (
        st.sampled_from(["NaN", "Infinity", "-Infinity"])
        | st.builds("{}e{}".format, st.integers(-(10**50), 10**50), st.integers(-400, 400))
        | st.builds("{}.{}".format, st.integers(), st.from_regex(r"\A[0-9]{0,30}\Z")),
        "%s::numeric",
    ),
    "numeric(38,38)": (decimals(38, 38), "%s::numeric"),
    "numeric(38,0)": (decimals(38, 0), "%s::numeric"),
    "numeric(39,0)": (decimals(39, 0), "%s::numeric"),
    "numeric(9,2)": (decimals(9, 2), "%s::numeric"),
    "numeric(5,-2)": (st.integers(-9_999_949, 9_999_949).map(str), "%s::numeric"),
    "price": (decimals(8, 2), "%s::numeric"),
    "money": (integers(64), "(%s::numeric / 100)::money"),
    "date": (st.sampled_from(["infinity", "-infinity"]) | _days, "%s::date"),
    "timestamp": (_micros, "'2000-01-01'::timestamp + (%s || ' microseconds')::interval"),
    "timestamptz": (_micros, "'2000-01-01 00:00+00'::timestamptz + (%s || ' microseconds')::interval"),
    "time": (_clocks, "%s::time"),
    "timetz": (st.builds("{}{:+03}:{:02}:{:02}".format, _clocks, st.integers(-15, 15), *[st.integers(0, 59)] * 2), "%s::timetz"),
    "interval": (_intervals, "%s::interval"),
    "bytea": (st.binary().map(lambda octets: "\\x" + octets.hex()), "%s::bytea"),
    "text": (odd_texts, "%s::text"),
    "varchar(7)": (odd_texts.map(lambda text: text[:7]), "%s::varchar"),
    "char(5)": (odd_texts.map(lambda text: text[:5]), "%s::text"),
    "json": (jsons(st.text(st.characters(exclude_categories=["Cs"]))), "%s::json"),
    "jsonb": (jsons(texts), "%s::jsonb"),
    "uuid": (st.uuids().map(str), "%s::uuid"),
    "label": (st.sampled_from(_LABELS), "%s::label"),
    "pair": (
        st.fixed_dictionaries(
            {},
            optional={"a": st.integers(-9, 9), "b": odd_texts, "c": st.lists(st.none() | st.integers(), max_size=3)},
        ).map(json.dumps),
        "jsonb_populate_record(NULL::pair, %s::jsonb)",
    ),
    "int4range": (ranges(st.integers(-(1 << 31), (1 << 31) - 2)), "%s::int4range"),
    "numrange": (ranges(_finite.map(lambda value: value + 0.0)), "%s::numrange"),
    "int8multirange": (
        st.lists(ranges(st.integers(-99, 99)), max_size=4).map(lambda some: "{" + ",".join(some) + "}"),
        "%s::int8multirange",
    ),
    "bit(4)": (st.from_regex(r"\A[01]{4}\Z"), "%s::bit(4)"),
    "varbit": (st.from_regex(r"\A[01]{0,20}\Z"), "%s::varbit"),
    "inet": (_networks, "%s::inet"),
    "cidr": (_networks, "network(%s::inet)"),
    "macaddr": (st.from_regex(r"\A[0-9a-f]{12}\Z"), "%s::macaddr"),
    "point": (st.builds("({},{})".format, st.floats().map(number), st.floats().map(number)), "%s::point"),
    "tsvector": (
        st.lists(texts.filter(bool), max_size=4).map(json.dumps),
        "array_to_tsvector(ARRAY(SELECT jsonb_array_elements_text(%s::jsonb)))",
    ),
    "pg_lsn": (st.builds("{:X}/{:X}".format, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1)), "%s::pg_lsn"),
}  # fmt: skip
KINDS = list(TYPES)
COLUMNS = [f"c{number}" for number in range(len(KINDS))]

# What an array is: its dimensions, their lower bounds, and for each element which value of the type it is; -1 for NULL.
_ARRAYS = st.builds(
    lambda dimensions, lower, elements: (dimensions, lower, elements[: math.prod(dimensions)] if dimensions else []),
    st.just([]) | st.just([3]) | st.lists(st.integers(1, 4), min_size=1, max_size=1) | st.lists(st.integers(1, 3), min_size=2, max_size=3),
    st.just([1, 1, 1]) | st.lists(st.integers(-5, 5), min_size=3, max_size=3),
    st.lists(st.integers(-1, ROWS - 1), min_size=27, max_size=27),
)


def drawn(strategy: st.SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """`count` examples as hypothesis draws them, the same ones for a number while it and the code around it stay as they are."""
    found: list[Any] = []

    @seed(number)
    @settings(max_examples=count, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=_SLOW)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def literal(dimensions: Sequence[int], lower: Sequence[int], elements: Sequence[str | None]) -> str:
    """An array as Postgres reads it."""
    if not dimensions:
        return "{}"
    parts = ["NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in elements]
    for size in reversed(dimensions):
        parts = ["{" + ",".join(parts[place : place + size]) + "}" for place in range(0, len(parts), size)]
    bounds = "".join(f"[{low}:{low + size - 1}]" for low, size in zip(lower, dimensions, strict=False))
    return f"{bounds}={parts[0]}"


def _insert(source: Source, first: int, pools: Sequence[Sequence[str | None]], shapes: Sequence[Any]) -> None:
    """`ROWS` rows from `first` on: in the one table a value of each type, or null, in the other an array of each."""
    with source.connect() as conn, conn.transaction(), conn.cursor() as cursor:
        cursor.execute("SET TimeZone = 'UTC'")
        makers = [maker for _, maker in TYPES.values()]
        statement = f"INSERT INTO scalars VALUES (%s, {', '.join(makers)})"
        cursor.executemany(
            statement.encode(),
            [
                (
                    first + row,
                    *(pool[(first + row) % len(pool)] for pool, maker in zip(pools, makers, strict=True) for _ in range(maker.count("%s"))),
                )
                for row in range(ROWS)
            ],
        )
        written = ", ".join(f"CASE WHEN {column} IS DISTINCT FROM NULL THEN format('%s', {column}) END" for column in COLUMNS)
        cursor.execute(f"SELECT {written} FROM scalars WHERE id >= {first} ORDER BY id".encode())
        rows = cursor.fetchall()
        values = ", ".join(f"%s::{kind}[]" for kind in KINDS)
        cursor.executemany(
            f"INSERT INTO lists VALUES (%s, {values})".encode(),
            [
                (first + number, *(_array(rows, place, *shapes[(number + 7 * place) % len(shapes)]) for place in range(len(KINDS))))
                for number in range(ROWS)
            ],
        )


def _array(rows: Sequence[Sequence[str | None]], place: int, dimensions: Sequence[int], lower: Sequence[int], which: Sequence[int]) -> str:
    return literal(dimensions, lower, [None if row < 0 else rows[row][place] for row in which])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_values(source: Source, pipeline: Pipeline) -> None:
    source.sql(_SETUP)
    for table, suffix in (("scalars", ""), ("lists", "[]")):
        declared = ", ".join(f"{column} {kind}{suffix}" for column, kind in zip(COLUMNS, KINDS, strict=True))
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, {declared})")
    pools = [drawn(st.one_of(*[strategy] * 9, st.none()), ROWS, place) for place, (strategy, _) in enumerate(TYPES.values())]
    shapes = drawn(_ARRAYS, ROWS, len(pools))
    _insert(source, 0, pools, shapes)
    pipeline.sync()
    _insert(source, 1000, pools, shapes)
    source.sql("UPDATE scalars SET id = id + 5000 WHERE id % 7 = 0; UPDATE lists SET id = id + 5000 WHERE id % 7 = 0")
    pipeline.sync()
    for table, suffix in (("scalars", ""), ("lists", "[]")):
        assert source.value(f"SELECT count(*) FROM {table}") == 2 * ROWS
        assert_values(pipeline, table, [kind + suffix for kind in KINDS], COLUMNS)

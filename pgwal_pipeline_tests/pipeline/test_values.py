"""Every type at its limits, alone and in arrays, by snapshot and by stream: value by value as the source has it."""

import math
from collections.abc import Sequence
from datetime import datetime
from decimal import Context, Decimal
from typing import Any

import polars as pl
import psycopg2
import psycopg2.errors
import pytest

from pgwal_pipeline_tests.pipeline.conftest import Pipeline
from pgwal_pipeline_tests.support import Source

_ALL_DIGITS = Context(prec=1000)
_MOMENTS = ["infinity", "-infinity", "4713-01-01 BC", "0001-12-31 BC", "0001-01-01", "1582-10-04", "1582-10-15", "1899-12-31", "9999-12-31"]
_EXACT = ["0", "1", "-1", "0.5", "NaN"]

# Type: literals. Types that a server lacks are left out.
VALUES: dict[str, Sequence[str]] = {
    "bool": ["t", "f"],
    "int2": ["-32768", "32767", "0"],
    "int4": ["-2147483648", "2147483647"],
    "int8": ["-9223372036854775808", "9223372036854775807"],
    "oid": ["0", "4294967295"],
    "float4": ["NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38", "0.1"],
    "float8": ["NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1"],
    "numeric": [*_EXACT, "Infinity", "-Infinity", "1e-16383", "123456789012345678901234567890123456789012345678901234567890.5", "1.50"],
    "numeric(38,38)": ["0.99999999999999999999999999999999999999", "-0.00000000000000000000000000000000000001", "NaN"],
    "numeric(38,0)": ["99999999999999999999999999999999999999", "-99999999999999999999999999999999999999", "NaN"],
    "numeric(39,0)": ["999999999999999999999999999999999999999", "NaN"],
    "numeric(5,-2)": ["1234567", "-50"],
    "numeric(9,2)": [*_EXACT, "1234567.89", "-1234567.89"],
    "money": ["-92233720368547758.08", "92233720368547758.07", "0"],
    "date": [*_MOMENTS, "10000-01-01", "5874897-12-31"],
    "timestamp": [*_MOMENTS, "9999-12-31 23:59:59.999999", "10000-01-01 00:00:00", "294276-12-31 23:59:59.999999"],
    "timestamptz": [*_MOMENTS, "9999-12-31 23:59:59.999999+00", "10000-01-01 00:00:00+00", "0001-01-01 00:00+05", "2020-06-01 12:00+05:30"],
    "time": ["00:00", "24:00:00", "23:59:59.999999"],
    "timetz": ["00:00+15:59", "24:00:00-15:59", "12:00:00.000001+00"],
    "interval": ["178000000 years", "-178000000 years", "1 mon -1 days +00:00:00.000001", "0", "-00:00:01"],
    "bytea": ["", "\\x00", "\\xdeadbeef00ff", "\\x" + "ab" * 5000],
    "text": ["", " ", "".join(map(chr, range(1, 128))), "𝔘𝔫𝔦 😀 é", "x" * 20000, "\\N", "NULL", '{"a"}', "%s {} $1"],
    "varchar(7)": ["", "1234567", "a b"],
    "char(5)": ["", "a", "ab   ", "12345"],
    '"char"': ["", "a", "\\351"],
    "name": ["", "a" * 63],
    "json": ['{"a": 1e400, "a": 12345678901234567890123}', "null", ' [1,  2] ', '"\\ud83d\\ude00"'],
    "jsonb": ['{"a": 12345678901234567890123.0, "b": [null]}', "null", '"é"'],
    "xml": ["<a>1 &lt; 2</a>", "text"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "mood": ["sad", "ok", "it's \"odd\", {so}"],
    "price": ["1.5", "NaN"],
    "dear_price": ["2.25"],
    "pair": ['(1,"a ""b"", c")', "(,)", '(1,"")'],
    "int4range": ["empty", "[1,5)", "(,)", "[3,]"],
    "tstzrange": ["[2020-01-01 00:00+02,infinity)", "empty"],
    "int4multirange": ["{}", "{[1,3),[5,)}"],
    "bit(4)": ["0101"],
    "varbit": ["", "1"],
    "inet": ["10.0.0.1", "10.0.0.0/8", "::1/64"],
    "cidr": ["10.0.0.0/8", "::/0", "1.2.3.4/32"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "point": ["(1,-0.1)", "(Infinity,NaN)"],
    "box": ["(2,2),(0,0)"],
    "path": ["[(0,0),(1,1)]"],
    "circle": ["<(0,0),1e-300>"],
    "tsvector": ["'a':1A 'b':2", ""],
    "tsquery": ["'a' & !'b'"],
    "pg_lsn": ["FFFFFFFF/FFFFFFFF", "0/0"],
    "regclass": ["pg_class"],
    "hstore": ['"a"=>NULL, "b"=>"c,d"'],
    "citext": ["Ab"],
    "ltree": ["a.b.c"],
    "vector": ["[1,2,3.5]"],
}  # fmt: skip
_SETUP = """CREATE TYPE mood AS ENUM ('sad', 'ok', 'it''s "odd", {so}'); CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN price AS numeric(8, 2); CREATE DOMAIN dear_price AS price CHECK (value > 1)"""
_FITS = {
    "date": "isfinite({v}) AND extract(year FROM {v}) BETWEEN 1 AND 9999",
    "timestamp": "isfinite({v}) AND extract(year FROM {v}) BETWEEN 1 AND 9999",
    "timestamptz": "isfinite({v}) AND extract(year FROM {v} AT TIME ZONE 'UTC') BETWEEN 1 AND 9999",
    "decimal": "{v} <> 'NaN'",
}
_DECIMAL = ("numeric(38,38)", "numeric(38,0)", "numeric(9,2)", "price", "dear_price")
_TYPED = {"bool", "int2", "int4", "int8", "float4", "float8", "oid", "date", "timestamp", "timestamptz", "bytea", *_DECIMAL}


def _fits(kind: str, value: str) -> str:
    """SQL that tells whether the column of the lake can hold a value."""
    return _FITS.get("decimal" if kind in _DECIMAL else kind, "true").format(v=value)


def _typed(kind: str, value: str) -> str:
    if kind in _TYPED:
        return value + {"float4": "::float8", "price": "::numeric", "dear_price": "::numeric"}.get(kind, "")
    return f"CASE WHEN {value} IS DISTINCT FROM NULL THEN format('%s', {value}) END"


def value_and_text(kind: str, column: str, *, is_list: bool) -> str:
    """Two columns: the value where it fits, Postgres's text where it does not."""
    if is_list:
        # Not unnest, which makes columns of a composite's parts.
        elements = f"(SELECT n, {column}[n] AS e FROM generate_subscripts({column}, 1) n) u"
        whole = f"(SELECT bool_and({_fits(kind, 'e')}) FROM {elements} WHERE e IS DISTINCT FROM NULL)"
        fits = f"coalesce(array_ndims({column}) = 1 AND array_lower({column}, 1) = 1, true) AND coalesce({whole}, true)"
        listed = f"(SELECT coalesce(array_agg({_typed(kind, 'e')} ORDER BY n), '{{}}') FROM {elements})"
        value = f"CASE WHEN {column} IS NOT NULL AND {fits} THEN {listed} END"
    else:
        fits = f"({_fits(kind, column)})"
        value = f"CASE WHEN {fits} THEN {_typed(kind, column)} END"
    return f"{value}, CASE WHEN NOT ({fits}) THEN format('%s', {column}) END"


def exact(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (value, math.copysign(1, value))
    if isinstance(value, Decimal):
        return value.normalize(_ALL_DIGITS)
    if isinstance(value, list):
        return tuple(map(exact, value))
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    return bytes(value) if isinstance(value, memoryview) else value


def lake_values(pipeline: Pipeline, table: str, columns: Sequence[str]) -> dict[int, tuple[Any, ...]]:
    """The rows of `current` by their `id`: for each column its value, then its text where it does not fit."""
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = next(pointer for name, pointer in publish.tables.items() if name.name == table)
    rows = pl.scan_delta(pointer.path, version=pointer.version).collect().to_dicts()
    texts = [dict(row["_pgwal_text"] or {}) for row in rows]
    return {
        row["id"]: tuple(part for column in columns for part in (exact(row[column]), text.get(column)))
        for row, text in zip(rows, texts, strict=True)
    }


def _known_types(source: Source) -> list[str]:
    for extension in ("hstore", "citext", "ltree", "vector"):
        if source.value("SELECT count(*) FROM pg_available_extensions WHERE name = %s", extension):
            source.sql(f"CREATE EXTENSION {extension}")
    source.sql(_SETUP)
    return [kind for kind in VALUES if _has(source, kind)]


def _has(source: Source, kind: str) -> bool:
    try:
        source.sql(f"SELECT {quoted(VALUES[kind][0])}::{kind} IS NULL")
    except (psycopg2.errors.UndefinedObject, psycopg2.errors.FeatureNotSupported):  # an extension, or XML in a server built without it
        return False
    return True


def quoted(value: str) -> str:
    """A literal of SQL."""
    return "'" + value.replace("'", "''") + "'"


def _insert(source: Source, kinds: Sequence[str], first: int) -> None:
    """A row for the nth value of each type, then one of nulls; in the other table lists of them, of every form."""
    forms = [
        "ARRAY[{a}]",
        "ARRAY[{a}, NULL, {b}]",
        "(ARRAY[{a}])[2:1]",
        "ARRAY[[{a}, {b}], [{b}, NULL]]",
        "array_fill({b}, ARRAY[2], ARRAY[3])",
    ]
    for n in range(max(len(VALUES[kind]) for kind in kinds) + 1):
        plain, lists = [], []
        for kind in kinds:
            literals = [f"({quoted(value)}::{kind})" for value in VALUES[kind]]
            plain.append(literals[n] if n < len(literals) else "NULL")
            a, b = literals[n % len(literals)], literals[(n + 1) % len(literals)]
            lists.append([*forms, "NULL"][n % (len(forms) + 1)].format(a=a, b=b))
        source.sql(f"INSERT INTO plain SELECT {first + n}, {', '.join(plain)}")
        source.sql(f"INSERT INTO lists SELECT {first + n}, {', '.join(lists)}")


def source_values(source: Source, table: str, kinds: Sequence[str], columns: Sequence[str]) -> dict[int, tuple[Any, ...]]:
    """The rows of `table` as the lake should have them, as `lake_values` gives them; `kinds` are the columns' types."""
    wanted = ", ".join(
        value_and_text(kind.removesuffix("[]"), column, is_list=kind.endswith("[]")) for kind, column in zip(kinds, columns, strict=True)
    )
    with source.connect() as conn:
        conn.execute("SET TimeZone = 'UTC'")
        rows = conn.execute(f"SELECT id, {wanted} FROM {table}".encode()).fetchall()
    return {row[0]: tuple(map(exact, row[1:])) for row in rows}


@pytest.mark.timeout(900)
def test_every_type_at_its_limits(source: Source, pipeline: Pipeline) -> None:
    kinds = _known_types(source)
    assert len(kinds) >= 45
    columns = [f"c{number}" for number in range(len(kinds))]
    for table, suffix in (("plain", ""), ("lists", "[]")):
        declared = ", ".join(f"{column} {kind}{suffix}" for column, kind in zip(columns, kinds, strict=True))
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, {declared})")
    _insert(source, kinds, 0)
    # What a role or a database sets changes nothing in the lake.
    for setting in ("DateStyle = 'SQL, DMY'", "IntervalStyle = 'sql_standard'", "TimeZone = 'Asia/Kolkata'", "extra_float_digits = -15",
                    "bytea_output = 'escape'", "client_encoding = 'LATIN1'", "xmloption = 'document'"):  # fmt: skip
        source.sql(f"ALTER DATABASE {source.database} SET {setting}")
    pipeline.sync()
    _insert(source, kinds, 100)
    source.sql("UPDATE plain SET id = id + 200 WHERE id < 3")
    pipeline.sync()
    for setting in ("DateStyle", "IntervalStyle", "TimeZone", "extra_float_digits", "bytea_output", "client_encoding", "xmloption"):
        source.sql(f"ALTER DATABASE {source.database} RESET {setting}")
    for table, suffix in (("plain", ""), ("lists", "[]")):
        assert_values(pipeline, table, [kind + suffix for kind in kinds], columns)


def assert_values(pipeline: Pipeline, table: str, kinds: Sequence[str], columns: Sequence[str]) -> None:
    """`current` has just the source's rows, value by value, and the text of each value that does not fit."""
    expected, found = source_values(pipeline.source, table, kinds, columns), lake_values(pipeline, table, columns)
    assert expected.keys() == found.keys()
    parts = [f"{kind} {part}" for kind in kinds for part in ("value", "text")]
    wrong = [
        (table, key, part, wanted, got)
        for key, row in expected.items()
        for part, wanted, got in zip(parts, row, found[key], strict=True)
        if wanted != got
    ]
    assert wrong == []

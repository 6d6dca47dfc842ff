"""Every type at its limits, alone and in arrays, by snapshot and by stream: value by value as the source has it."""

from collections.abc import Sequence

import psycopg2
import psycopg2.errors
import pytest

from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.values.comparison import assert_values, quoted
from pgwal_pipeline_tests.support import Source

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

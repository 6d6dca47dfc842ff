"""What a real server sends, by stream and by COPY, is read as the values that were written."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pgwal_pipeline.decode import binary
from pgwal_pipeline.decode.batch import Decoded, Decoder
from pgwal_pipeline.postgres import catalog, slot
from pgwal_pipeline.postgres.copy import ChunkBounds
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline_tests.decode.streams import plain
from pgwal_pipeline_tests.decode.wire import decoded_copy
from pgwal_pipeline_tests.support import Source, copy_messages


@dataclass(frozen=True)
class Text:
    """A value that its column cannot hold: null there, and this text beside it."""

    shown: str


TYPES = """
    create type mood as enum ('sad', 'so so', 'happy');
    create type pair as (a int, b text);
    create domain price as numeric(10,2) check (value >= 0);
    create domain few as int[] check (cardinality(value) < 5);
    create domain cheap as price;
"""
# Declared type, the value as SQL, and as what it must be read.
CASES: list[tuple[str, str, Any]] = [
    ("bool", "true", True),
    ("bool", "false", False),
    ("int2", "-32768", -32768),
    ("int4", "2147483647", 2147483647),
    ("int8", "-9223372036854775808", -9223372036854775808),
    ("oid", "4294967295::oid", 4294967295),
    ("float4", "0.1", 0.10000000149011612),
    ("float4", "'-Infinity'", -math.inf),
    ("float8", "1.1e-300", 1.1e-300),
    ("float8", "'NaN'", math.nan),
    ("float8", "'Infinity'", math.inf),
    ("float8", "0", 0.0),
    ("float8", "'-0'::float8", -0.0),
    ("numeric(12,2)", "-1234567890.12", Decimal("-1234567890.12")),
    ("numeric(12,2)", "5", Decimal("5.00")),
    ("numeric(5,5)", "0.00001", Decimal("0.00001")),
    ("numeric(38,10)", "1234567890123456789012345678.0123456789", Decimal("1234567890123456789012345678.0123456789")),
    ("numeric(18,0)", "999999999999999999", Decimal(999999999999999999)),
    ("numeric(12,2)", "'NaN'", Text("NaN")),
    ("numeric(30,2)", "'NaN'", Text("NaN")),
    ("numeric", "1.500", "1.500"),
    ("numeric", "'NaN'", "NaN"),
    ("numeric(1000)", "1" + "0" * 60, "1" + "0" * 60),
    ("money", "(-1234.5)::numeric::money", "-$1,234.50"),
    ("date", "'2024-02-29'", date(2024, 2, 29)),
    ("date", "'0001-01-01'", date(1, 1, 1)),
    ("date", "'9999-12-31'", date(9999, 12, 31)),
    ("date", "'infinity'", Text("infinity")),
    ("date", "'0044-03-15 BC'", Text("0044-03-15 BC")),
    ("date", "'5874897-12-31'", Text("5874897-12-31")),
    ("timestamp", "'2024-05-06 07:08:09'", datetime(2024, 5, 6, 7, 8, 9)),
    ("timestamp", "'2024-05-06 07:08:09.120'", datetime(2024, 5, 6, 7, 8, 9, 120_000)),
    ("timestamp(0)", "'1969-12-31 23:59:59.9'", datetime(1970, 1, 1)),
    ("timestamp", "'9999-12-31 23:59:59.999999'", datetime(9999, 12, 31, 23, 59, 59, 999_999)),
    ("timestamp", "'-infinity'", Text("-infinity")),
    ("timestamp", "'4713-01-01 00:00:00.5 BC'", Text("4713-01-01 00:00:00.5 BC")),
    ("timestamp", "'294276-12-31 23:59:59'", Text("294276-12-31 23:59:59")),
    ("timestamptz", "'2024-05-06 07:08:09.000001+02'", datetime(2024, 5, 6, 5, 8, 9, 1)),
    ("timestamptz", "'1890-01-01 00:00:00 Europe/Berlin'", datetime(1889, 12, 31, 23, 6, 32)),
    ("timestamptz", "'infinity'", Text("infinity")),
    ("timestamptz", "'0001-01-01 00:00:00+00 BC'", Text("0001-01-01 00:00:00+00 BC")),
    ("bytea", "'\\x00ff41'", b"\x00\xffA"),
    ("bytea", "''", b""),
    ("text", "''", ""),
    ("text", "E'żółw 𝄞\\n\\t\"'", 'żółw 𝄞\n\t"'),
    ("text", "repeat('long ', 5000)", "long " * 5000),
    ("varchar(5)", "'abc'", "abc"),
    ("char(5)", "'abc'", "abc  "),
    ('"char"', "'x'", "x"),
    ("name", "'a name'", "a name"),
    ("json", """'{"b": 1,  "a": [null]}'""", '{"b": 1,  "a": [null]}'),
    ("jsonb", """'{"b": 1,  "a": [null]}'""", '{"a": [null], "b": 1}'),
    ("uuid", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("time", "'04:05:06.7'", "04:05:06.7"),
    ("timetz", "'04:05:06+02'", "04:05:06+02"),
    ("interval", "'1 year 2 mons -3 days 04:05:06.7'", "1 year 2 mons -3 days +04:05:06.7"),
    ("bit(3)", "B'101'", "101"),
    ("varbit", "B''", ""),
    ("inet", "'192.168.0.1'", "192.168.0.1"),
    ("inet", "'192.168.0.1/24'", "192.168.0.1/24"),
    ("cidr", "'10.0.0.0/8'", "10.0.0.0/8"),
    ("macaddr", "'08:00:2b:01:02:03'", "08:00:2b:01:02:03"),
    ("int4range", "'[1,5]'", "[1,6)"),
    ("tstzrange", "'[2024-01-01 00:00:00+01,)'", '["2023-12-31 23:00:00+00",)'),
    ("point", "'(1,2.5)'", "(1,2.5)"),
    ("box", "'(1,1),(0,0)'", "(1,1),(0,0)"),
    ("tsvector", "'a fat cat'", "'a' 'cat' 'fat'"),
    ("mood", "'so so'", "so so"),
    ("pair", "row(1, 'x y')::pair", '(1,"x y")'),
    ("price", "1.5", Decimal("1.50")),
    ("cheap", "2", Decimal("2.00")),
    ("int2vector", "'1 2 3'", "1 2 3"),
    ("pg_lsn", "'16/B374D848'", "16/B374D848"),
    ("int4[]", "'{1,NULL,-3}'", [1, None, -3]),
    ("int4[]", "'{}'", []),
    ("int4[]", "'{{1,2},{3,4}}'", Text("{{1,2},{3,4}}")),
    ("int4[]", "'[0:1]={1,2}'", Text("[0:1]={1,2}")),
    ("int4[3][2]", "'{7}'", [7]),
    ("text[]", """array['a', '', null, 'NULL', 'x y', 'q"\\', '{,}', 'é']""", ["a", "", None, "NULL", "x y", 'q"\\', "{,}", "é"]),
    ("varchar(3)[]", "array['abc']", ["abc"]),
    ("numeric(6,2)[]", "array[1.5, null]", [Decimal("1.50"), None]),
    ("numeric(6,2)[]", "array[1.5, 'NaN']", Text("{1.50,NaN}")),
    ("numeric[]", "array[1.5, 'NaN']", ["1.5", "NaN"]),
    ("bytea[]", "array['\\x01'::bytea, '']", [b"\x01", b""]),
    ("bool[]", "array[true, false]", [True, False]),
    ("float8[]", "array['NaN'::float8, 1e300]", [math.nan, 1e300]),
    ("date[]", "array['2024-01-01'::date]", [date(2024, 1, 1)]),
    ("date[]", "array['2024-01-01'::date, 'infinity']", Text("{2024-01-01,infinity}")),
    ("timestamptz[]", "array['2024-05-06 07:08:09+02'::timestamptz]", [datetime(2024, 5, 6, 5, 8, 9)]),
    ("jsonb[]", """array['{"a": "b,c"}'::jsonb, '1']""", ['{"a": "b,c"}', "1"]),
    ("box[]", "array['(1,1),(0,0)'::box, '(3,3),(2,2)']", ["(1,1),(0,0)", "(3,3),(2,2)"]),
    ("point[]", "array['(1,2)'::point]", ["(1,2)"]),
    ("mood[]", "array['sad', 'so so']::mood[]", ["sad", "so so"]),
    ("pair[]", "array[row(1, 'x')::pair]", ["(1,x)"]),
    ("price[]", "array[1.5::price, null]", [Decimal("1.50"), None]),
    ("few", "'{1,2}'", [1, 2]),
    ("few[]", """'{"{1,2}","{}"}'""", [[1, 2], []]),
]


@contextmanager
def streaming(source: Source) -> Iterator[tuple[Decoder, ReplicationStream, Any]]:
    """A slot and a stream over everything that is written from now on, with a decoder that asks the catalog."""
    name = f"decode_{source.database}"[-50:]
    source.sql("create publication everything for all tables")
    slot.create(source.dsn, name, blocked_timeout=20, warn=lambda _: None)
    with connect(source.dsn) as conn:
        version = conn.info.server_version
        decoder = Decoder(lambda message: catalog.describe(conn, message), 0, 1 << 62)
        with ReplicationStream.open(source.dsn, name, "everything", 0, server_version=version) as stream:
            yield decoder, stream, conn


def read_all(source: Source, decoder: Decoder, stream: ReplicationStream, max_bytes: int = 1 << 20) -> list[Decoded]:
    """What the stream has up to now."""
    target = source.value("select pg_current_wal_flush_lsn() - '0/0'")
    fed, deadline = [], time.monotonic() + 30
    while stream.server_position < target or (fed and fed[-1].in_transaction):
        assert time.monotonic() < deadline
        messages = stream.read(max_bytes, 0.2)
        if messages:
            fed.append(decoder.feed(messages.payloads, messages.positions))
        else:
            stream.request_reply()
    return fed


def copy_of(source: Source, relation: Relation) -> pa.Table:
    """The rows, which must be the same whether their values came as text or, where that is read, in binary form."""
    tables = []
    for types in (frozenset[int](), binary.TYPES):
        _, messages = copy_messages(source.dsn, relation, ChunkBounds(None, None), binary=types)
        tables.append(decoded_copy(messages, relation, types))
    assert repr(tables[0].to_pylist()) == repr(tables[1].to_pylist())
    return tables[1]


def assert_cases(rows: pa.Table) -> None:
    """The one row of a table whose columns are the cases' holds what they say."""
    rows.validate(full=True)
    texts = dict(rows["_pgwal_text"].to_pylist()[0] or [])
    wrong = []
    for number, (declared, literal, expected) in enumerate(CASES):
        name = f"c{number}"
        (value,) = plain(rows[name].to_pylist())
        value = plain(value) if isinstance(value, list) else value
        found = Text(texts.pop(name)) if name in texts and value is None else value
        if repr(found) != repr(expected):
            wrong.append((declared, literal, expected, found))
    assert not wrong
    assert not texts


def test_every_type(source_matrix: Source) -> None:
    source = source_matrix
    source.sql(TYPES)
    columns = ", ".join(f"c{number} {declared}" for number, (declared, _, _) in enumerate(CASES))
    with streaming(source) as (decoder, stream, conn):
        source.sql(f"create table everything (id int primary key, {columns})")
        source.sql(f"insert into everything values (1, {', '.join(literal for _, literal, _ in CASES)})")
        source.sql("insert into everything values (2)")
        fed = read_all(source, decoder, stream)
        (changes,) = [changes for decoded in fed for changes in decoded.changes]
        assert changes.rows["id"].to_pylist() == [1, 2]
        assert_cases(changes.rows.slice(0, 1))
        nulls = changes.rows.slice(1).to_pylist()[0]
        assert all(nulls[f"c{number}"] is None for number in range(len(CASES)))
        (relation,) = catalog.tables_of(conn, "everything")
    assert relation.columns == changes.relation.columns
    source.sql("delete from everything where id = 2")
    copied = copy_of(source, relation)
    assert_cases(copied)
    # Both ways give the same, bit for bit.
    names = [*relation.column_names, "_pgwal_text"]
    assert repr(copied.select(names).to_pylist()) == repr(changes.rows.slice(0, 1).select(names).to_pylist())


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_every_kind_of_change(source: Source, max_bytes: int) -> None:
    big = "".join(chr(97 + octet % 26) for octet in os.urandom(20_000))
    with streaming(source) as (decoder, stream, _):
        source.sql("create table keyed (id int primary key, name text, big text)")
        source.sql("create table whole (id int primary key, name text, big text)")
        source.sql("create table bag (a int, b text)")
        source.sql("alter table whole replica identity full; alter table bag replica identity full")
        for statement in (
            "insert into keyed values (1, 'a', %s), (2, 'b', null)",
            "insert into whole values (1, 'a', %s)",
        ):
            source.sql(statement, big)
        source.sql("update keyed set name = 'x' where id = 1")
        source.sql("update keyed set id = 10 where id = 1")
        source.sql("update keyed set name = null where id = 2")
        source.sql("delete from keyed where id = 10")
        source.sql("update whole set name = 'x'")
        source.sql("update whole set id = 2")
        source.sql("insert into bag values (1, 'x'); update bag set b = 'x'; update bag set a = 2; delete from bag")
        with source.connect().transaction():
            source.sql("begin; insert into bag values (3, null); truncate bag, keyed; insert into keyed values (5, 'z', 'small'); commit")
        source.sql("alter table keyed add column extra int default 7")
        source.sql("update keyed set name = 'y'")
        fed = read_all(source, decoder, stream, max_bytes)
    rows: dict[str, list[Any]] = {}
    for changes in [changes for decoded in fed for changes in decoded.changes]:
        in_order = sorted(
            changes.rows.to_pylist(), key=lambda row: (row["_pgwal_commit_lsn"], row["_pgwal_ordinal"], row["_pgwal_op"] != "K")
        )
        for row in in_order:
            values = ["big" if row[name] == big else row[name] for name in changes.relation.column_names]
            made = (row["_pgwal_op"], row["_pgwal_ordinal"], *values, row["_pgwal_unchanged"])
            rows.setdefault(changes.relation.table.name, []).append(made)
    assert rows["keyed"] == [
        ("I", 0, 1, "a", "big", None),
        ("I", 1, 2, "b", None, None),
        ("U", 0, 1, "x", None, ["big"]),
        ("K", 0, 1, None, None, None),
        ("U", 0, 10, "x", None, ["big"]),
        ("U", 0, 2, None, None, None),
        ("D", 0, 10, None, None, None),
        ("T", rows["keyed"][7][1], None, None, None, None),
        ("I", 3, 5, "z", "small", None),
        ("U", 0, 5, "y", "small", 7, None),
    ]
    assert rows["whole"] == [
        ("I", 0, 1, "a", "big", None),
        ("U", 0, 1, "x", "big", None),
        ("K", 0, 1, "x", "big", None),
        ("U", 0, 2, "x", "big", None),
    ]
    assert rows["bag"] == [
        ("I", 0, 1, "x", None),
        ("K", 1, 1, "x", None),
        ("U", 1, 1, "x", None),
        ("K", 2, 1, "x", None),
        ("U", 2, 2, "x", None),
        ("D", 3, 2, "x", None),
        ("I", 0, 3, None, None),
        ("T", rows["bag"][7][1], None, None, None),
    ]
    assert {rows["bag"][7][1], rows["keyed"][7][1]} == {1, 2}


def test_many_rows_by_both_ways(source: Source) -> None:
    source.sql("create table made (id int primary key, a text, b numeric(10,3), c timestamptz, d float8, e int[])")
    with streaming(source) as (decoder, stream, conn):
        source.sql(
            "insert into made select i, repeat(chr(97 + i % 26), i % 40), i / 7.0, '2000-01-01+00'::timestamptz + i * interval '1h 1us', "
            "random(), array[i, i + 1] from generate_series(1, 20000) i"
        )
        fed = read_all(source, decoder, stream, 100_000)
        (relation,) = catalog.tables_of(conn, "everything")
    assert len(fed) > 5
    streamed = pa.concat_tables([changes.rows for decoded in fed for changes in decoded.changes]).select(list(relation.column_names))
    copied = copy_of(source, relation).select(list(relation.column_names))
    assert streamed.num_rows == 20_000
    assert streamed.sort_by("id").combine_chunks().equals(copied.sort_by("id").combine_chunks())
    assert sum(decoded.transactions for decoded in fed) == 1

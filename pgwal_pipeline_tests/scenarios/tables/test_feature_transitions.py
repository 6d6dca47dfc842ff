"""A table gets a column of a type or with a name that is new to its Delta tables: every layer takes it, every reader reads it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable, QueryBuilder

from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline_tests.oracle import rows_of, source_rows
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.tables.mapped_columns import assert_equal_by_spark
from pgwal_pipeline_tests.support import Source

# A value of each type of the type table, as SQL; a text from which a column may be altered to it.
TYPES: Mapping[str, tuple[str, str]] = {
    "bool": ("true", "t"),
    "int2": ("7", "7"),
    "int4": ("7", "7"),
    "int8": ("7", "7"),
    "float4": ("1.5", "1.5"),
    "float8": ("1.5", "1.5"),
    "oid": ("7", "7"),
    "numeric(10,2)": ("1.25", "1.25"),
    "numeric": ("1.25", "1.25"),
    "money": ("1.25", "1.25"),
    "date": ("'2020-02-03'", "2020-02-03"),
    "timestamp": ("'2020-02-03 04:05:06'", "2020-02-03 04:05:06"),
    "timestamptz": ("'2020-02-03 04:05:06Z'", "2020-02-03 04:05:06Z"),
    "bytea": (r"'\x0102'", r"\x0102"),
    "text": ("'x'", "x"),
    "varchar(9)": ("'x'", "x"),
    "char(3)": ("'x'", "x"),
    "name": ("'x'", "x"),
    "json": ("'{\"a\": 1}'", '{"a": 1}'),
    "jsonb": ("'{\"a\": 1}'", '{"a": 1}'),
    "uuid": ("'00000000-0000-0000-0000-000000000001'", "00000000-0000-0000-0000-000000000001"),
    "mood": ("'glad'", "glad"),
    "time": ("'04:05:06'", "04:05:06"),
    "timetz": ("'04:05:06+01'", "04:05:06+01"),
    "interval": ("'1 day'", "1 day"),
    "bit(3)": ("'101'", "101"),
    "inet": ("'10.0.0.1'", "10.0.0.1"),
    "macaddr": ("'08:00:2b:01:02:03'", "08:00:2b:01:02:03"),
    "int4range": ("'[1,5)'", "[1,5)"),
    "int4multirange": ("'{[1,5)}'", "{[1,5)}"),
    "point": ("'(1,2)'", "(1,2)"),
    "line": ("'{1,2,3}'", "{1,2,3}"),
    "lseg": ("'[(1,2),(3,4)]'", "[(1,2),(3,4)]"),
    "box": ("'(3,4),(1,2)'", "(3,4),(1,2)"),
    "path": ("'((1,2),(3,4))'", "((1,2),(3,4))"),
    "polygon": ("'((1,2),(3,4))'", "((1,2),(3,4))"),
    "circle": ("'<(1,2),3>'", "<(1,2),3>"),
    "tsvector": ("'a b'", "a b"),
    "tsquery": ("'a & b'", "a & b"),
    "jsonpath": ("'$.a'", "$.a"),
    "cidr": ("'10.0.0.0/8'", "10.0.0.0/8"),
    "macaddr8": ("'08:00:2b:ff:fe:01:02:03'", "08:00:2b:ff:fe:01:02:03"),
    "varbit(5)": ("'101'", "101"),
    "tstzrange": ("'[2020-02-03 00:00:00Z,)'", "[2020-02-03 00:00:00Z,)"),
    "pg_lsn": ("'0/1A'", "0/1A"),
    "xid8": ("'7'", "7"),
    "pair": ("'(1,x)'", "(1,x)"),
    "amount": ("1.25", "1.25"),
    "moments": ("'{2020-02-03 04:05:06}'", "{2020-02-03 04:05:06}"),
    "int4[]": ("'{1,2}'", "{1,2}"),
    "text[]": ("'{a,b}'", "{a,b}"),
    "timestamp[]": ("'{2020-02-03 04:05:06}'", "{2020-02-03 04:05:06}"),
    "timestamptz[]": ("'{2020-02-03 04:05:06Z}'", "{2020-02-03 04:05:06Z}"),
    "numeric(10,2)[]": ("'{1.25}'", "{1.25}"),
    "bytea[]": (r"""'{"\\x01"}'""", r'{"\\x01"}'),
    "bool[]": ("'{t,f}'", "{t,f}"),
    "box[]": ("'{(3,4),(1,2)}'", "{(3,4),(1,2)}"),
}
# Types of extensions, where the server has them.
EXTENSIONS: Mapping[str, tuple[str, str]] = {
    "citext": ("'Xy'", "Xy"),
    "hstore": ("'a=>1'", "a=>1"),
    "ltree": ("'a.b'", "a.b"),
    "vector": ("'[1,2]'", "[1,2]"),
}
_MADE = (
    "CREATE TYPE mood AS ENUM ('glad', 'sad')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN amount AS numeric(10,2)",
    "CREATE DOMAIN moments AS timestamp[]",
)
_WAYS = ("added", "unseen", "default", "altered")
# Types that Delta has a feature of its own for, beside one that it has none for.
_SHORT = ("timestamp", "moments", "bytea")
_ODD = "a b,;{}()=\t"


def tables_of(types: list[str]) -> dict[str, tuple[str, str]]:
    """A table for each type and way, by name."""
    return {f"t{number}_{way}": (kind, way) for number, kind in enumerate(types) for way in _WAYS}


def here(source: Source, kinds: Mapping[str, tuple[str, str]]) -> list[str]:
    """Those of the types of extensions that the server has; their extensions are made."""
    found = [kind for kind in kinds if source.sql("SELECT FROM pg_available_extensions WHERE name = %s", kind)]
    for kind in found:
        source.sql(f"CREATE EXTENSION {kind}")
    return found


def made(source: Source, names: Mapping[str, Any]) -> None:
    for statement in _MADE:
        source.sql(statement)
    for name in names:
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")


def changed(source: Source, name: str, kind: str, way: str) -> None:
    """Give a table a column `c` of a type."""
    value, text = {**TYPES, **EXTENSIONS}[kind]
    source.sql(f"INSERT INTO {name} VALUES (1, %s)", text)
    match way:
        case "added":
            source.sql(f"ALTER TABLE {name} ADD COLUMN c {kind}")
            source.sql(f"INSERT INTO {name} VALUES (2, 'x', {value})")
        case "unseen":
            source.sql(f"ALTER TABLE {name} ADD COLUMN c {kind}")
        case "default":
            source.sql(f"ALTER TABLE {name} ADD COLUMN c {kind} DEFAULT {value}")
            source.sql(f"INSERT INTO {name} (id) VALUES (2)")
        case _:
            source.sql(f"ALTER TABLE {name} ALTER COLUMN v TYPE {kind} USING v::{kind}")
            source.sql(f"INSERT INTO {name} VALUES (2, {value})")


def settled(pipeline: Pipeline) -> None:
    """Sync until nothing is to be read again; a schema change with no row behind it shows after the next one."""
    for _ in range(3):
        report = pipeline.sync()
        assert report.errors == {}
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}


def assert_read_by_all(pipeline: Pipeline, spark: Any, table: str) -> None:
    """Spark and delta-rs read every layer to the same number of rows, and Polars `current` where nothing is mapped."""
    place = pipeline.ledger.tables()[TableName.parse(table)].location
    for path in (pipeline.lake.raw(place), pipeline.lake.snapshot(place), pipeline.lake.current(place)):
        found = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT * FROM t").read_all()
        assert spark.read.format("delta").load(path).count() == found.num_rows
        if "columnMapping" not in (DeltaTable(path).protocol().reader_features or ()):
            assert pl.scan_delta(path).collect().height == found.num_rows


def assert_layers_equal(source: Source, pipeline: Pipeline, table: str) -> None:
    """The snapshot in force holds just the source's rows, and raw the row that came last with each of its values."""
    state = pipeline.ledger.tables()[TableName.parse(table)]
    assert state.generation is not None
    with source.connect() as conn:
        columns, expected = source_rows(conn, table)
    attempts = [chunk.attempt for chunk in pipeline.ledger.chunks(state.location, state.generation)]
    read = pl.scan_delta(pipeline.lake.snapshot(state.location)).filter(pl.col("_pgwal_chunk").is_in(attempts)).collect()
    assert rows_of(read.select(columns)) == expected, table
    inserted = pl.scan_delta(pipeline.lake.raw(state.location)).filter((pl.col("_pgwal_op") == "I") & (pl.col("id") == 2)).collect()
    if inserted.height:
        # A column whose type was changed has its values in another one from then on.
        held = {
            name: [
                column for column in inserted.columns if column == name or (column.startswith("_pgwal_") and column.endswith(f"_{name}"))
            ]
            for name in columns
        }
        chosen = [next((column for column in held[name][::-1] if inserted[column][0] is not None), name) for name in columns]
        assert rows_of(inserted.select(chosen)) == Counter({row: count for row, count in expected.items() if row[0] == 2}), table


_OTHERS = [kind for kind in TYPES if kind not in _SHORT]


@pytest.mark.parametrize(
    "types",
    [
        pytest.param(list(_SHORT), id="some"),
        *(pytest.param(_OTHERS[part::6], id=f"others{part}", marks=pytest.mark.soak) for part in range(6)),
        pytest.param([], id="extensions", marks=pytest.mark.soak),
    ],
)
def test_a_column_of_a_type_that_the_table_has_not_had(types: list[str], source: Source, pipeline: Pipeline, spark: Any) -> None:
    types = types or here(source, EXTENSIONS)
    if not types:
        pytest.skip(f"this server has none of the extensions {', '.join(EXTENSIONS)}")
    names = tables_of(types)
    made(source, names)
    pipeline.sync()
    for name, (kind, way) in names.items():
        changed(source, name, kind, way)
    settled(pipeline)
    pipeline.assert_current(*(f"public.{name}" for name in names))
    assert pipeline.resnapshot(*(f"public.{name}" for name in names)).errors == {}
    for name in names:
        assert_layers_equal(source, pipeline, f"public.{name}")
        assert_read_by_all(pipeline, spark, f"public.{name}")


@pytest.mark.parametrize("beside", [pytest.param(["timestamp"], id="one"), pytest.param(list(TYPES), id="each", marks=pytest.mark.soak)])
def test_a_column_is_made_anew_with_another_type_beside_a_name_that_needs_mapping(
    beside: list[str], source: Source, pipeline: Pipeline, spark: Any
) -> None:
    """A name that Delta maps comes late, and a column is dropped and made anew as each of three others."""
    names = {f"t{number}": kind for number, kind in enumerate(beside)}
    made(source, names)
    for name, kind in names.items():
        source.sql(f"ALTER TABLE {name} ADD COLUMN c {kind}")
        source.sql(f"INSERT INTO {name} VALUES (1, 'x', {TYPES[kind][0]})")
    pipeline.sync()
    for other in ("int4", "timestamp[]", "text"):
        for name, kind in names.items():
            again = "bool" if kind == other else other
            source.sql(f"ALTER TABLE {name} DROP COLUMN c")
            source.sql(f"ALTER TABLE {name} ADD COLUMN c {again}")
            source.sql(f"UPDATE {name} SET c = {TYPES[again][0]}")
            if other == "timestamp[]":
                source.sql(f"ALTER TABLE {name} ADD COLUMN {quote_ident(_ODD)} timestamp")
                source.sql(f"UPDATE {name} SET {quote_ident(_ODD)} = '2020-02-03'")
        settled(pipeline)
        for name in names:
            assert_equal_by_spark(source, pipeline, spark, name)


def test_tables_made_before_their_features_were_known_are_widened(source: Source, pipeline: Pipeline, spark: Any) -> None:
    """As the accident was met: (int, text) and (int, date), two alterations, two syncs, and a table beside them."""
    source.sql("CREATE TABLE a (id int PRIMARY KEY, v text)")
    source.sql("CREATE TABLE b (id int PRIMARY KEY, d date)")
    source.sql("CREATE TABLE beside (id int PRIMARY KEY)")
    for table, value in (("a", "'x'"), ("b", "'2020-01-01'")):
        source.sql(f"INSERT INTO {table} VALUES (1, {value})")
    pipeline.sync()
    for table in "ab":
        path = pipeline.lake.current(TableName("public", table))
        assert "timestampNtz" not in (DeltaTable(path).protocol().reader_features or ())
    source.sql("ALTER TABLE a ADD COLUMN at timestamp")
    source.sql("ALTER TABLE b ALTER d TYPE timestamp")
    source.sql("INSERT INTO a VALUES (2, 'y', '2021-01-01 01:02:03')")
    source.sql("INSERT INTO b VALUES (2, '2021-01-01 01:02:03')")
    source.sql("INSERT INTO beside VALUES (1)")
    settled(pipeline)
    pipeline.assert_current("public.a", "public.b", "public.beside")
    for table in ("public.a", "public.b"):
        assert_read_by_all(pipeline, spark, table)

"""Every kind of table: keys of many types, odd names, partitions, inheritance, generated columns, column lists and row filters."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
import psycopg2
import psycopg2.errors
import pytest

from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline_tests.oracle import assert_equal
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.values.comparison import exact, value_and_text
from pgwal_pipeline_tests.support import Source

# Type of the key: its values, some of them equal for Postgres though they are written differently.
KEYS = {
    "numeric": ["1.0", "1.000", "NaN", "-0.5", "1e20", "0"],
    "numeric(9,2)": ["1.00", "1.5", "NaN", "-0.5", "12", "0"],
    "char(5)": ["a", "a ", "b", "", "ab", "B"],
    "uuid": [f"00000000-0000-0000-0000-00000000000{n}" for n in range(6)],
    "timestamptz": ["infinity", "-infinity", "0044-03-15 BC", "2020-01-01 00:00+02", "9999-12-31", "10001-01-01"],
    "date": ["infinity", "-infinity", "0044-03-15 BC", "2020-01-01", "9999-12-31", "10001-01-01"],
    "bytea": ["\\x", "\\x00", "\\xff", "\\x0001", "abc", "\\x80"],
    "float8": ["-0", "0", "NaN", "Infinity", "1e-300", "0.1"],
    'text COLLATE "folded"': ["A", "a", "é", "É", "", "b"],
    "int4range": ["empty", "[1,2]", "[1,3)", "(,)", "[5,)", "[7,9)"],
    "bool": ["t", "f", "t", "f", "t", "f"],
}
SOME_KEYS = ("numeric", "char(5)", "timestamptz", "float8", 'text COLLATE "folded"')
# Those with a % or a line break in them are in test_hostile, too.
SOME_NAMES = ("Case", "case", 'quo"te do.t', "sla/sh", "emo😀ji ünï", "..", "*?[x] #,& tail ")
NAMES = (*SOME_NAMES, "per%cent", "new\nline", "CASE", "a b", "back\\slash", "n" * 63, "select a'b;--<b>{}", "_delta_log", "x=y")


def differ(source: Source, table: str, column: str, rng: random.Random, values: list[str], kind: str) -> None:
    """Random changes of a table (key, v): equal keys collide, which the source refuses."""
    base = kind.split(" COLLATE")[0]
    for _ in range(12):
        one, other = (f"{_literal(value)}::{base}" for value in rng.sample(values, 2))
        statement = rng.choice(
            [
                f"INSERT INTO {table} VALUES ({one}, 1) ON CONFLICT ({column}) DO UPDATE SET v = {table}.v + 1",
                f"UPDATE {table} SET v = v + 10 WHERE {column} = {one}",
                f"UPDATE {table} SET {column} = {other} WHERE {column} = {one} AND NOT EXISTS ("
                f"SELECT FROM {table} x WHERE x.{column} = {other} AND x.{column} <> {one})",
                f"DELETE FROM {table} WHERE {column} = {one}",
            ]
        )
        source.sql(statement)


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kinds", [pytest.param(SOME_KEYS, id="some"), pytest.param(tuple(KEYS), id="all", marks=pytest.mark.soak)])
def test_keys_of_many_types(kinds: Sequence[str], source: Source, pipeline: Pipeline) -> None:
    try:
        source.sql("CREATE COLLATION folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    except psycopg2.errors.FeatureNotSupported:  # a server built without ICU has no collation that calls different strings equal
        source.sql('CREATE COLLATION folded FROM "C"')
    tables = {f"key_{number}": kind for number, kind in enumerate(kinds)}
    for seed, (table, kind) in enumerate(tables.items()):
        source.sql(f"CREATE TABLE {table} (k {kind} PRIMARY KEY, v int)")
        differ(source, table, "k", random.Random(seed), KEYS[kind], kind)
    source.sql("CREATE TABLE swapped (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO swapped VALUES (1, 'one'), (2, 'two'), (3, 'three')")
    source.sql("CREATE TABLE pairs (a text, b int, c int, PRIMARY KEY (b, a))")
    source.sql("INSERT INTO pairs SELECT 'a' || i % 3, i, i FROM generate_series(1, 9) i")
    pipeline.sync()
    for seed, (table, kind) in enumerate(tables.items()):
        differ(source, table, "k", random.Random(100 + seed), KEYS[kind], kind)
    moves = "; ".join(f"UPDATE swapped SET id = {new} WHERE id = {old}" for old, new in ((1, -1), (2, 1), (-1, 2)))
    source.sql(f"BEGIN; {moves}; COMMIT")
    source.sql(
        "BEGIN; DELETE FROM swapped WHERE id = 3; INSERT INTO swapped VALUES (3, 'again'); UPDATE swapped SET id = 4 WHERE id = 1; COMMIT"
    )
    source.sql("UPDATE pairs SET a = 'moved', b = b + 100 WHERE b % 2 = 0")
    pipeline.sync()
    pipeline.assert_current("public.swapped", "public.pairs")
    publish = pipeline.ledger.publish()
    assert publish is not None
    source.sql("SET TimeZone = 'UTC'")
    for table, kind in tables.items():
        wanted = source.sql(f"SELECT {value_and_text(kind, 'k', is_list=False)}, v FROM {table}")
        pointer = publish.tables[TableName("public", table)]
        rows = pl.scan_delta(pointer.path, version=pointer.version).collect().to_dicts()
        found = [(row["k"], dict(row["_pgwal_text"] or {}).get("k"), row["v"]) for row in rows]
        assert Counter(tuple(map(exact, row)) for row in wanted) == Counter(tuple(map(exact, row)) for row in found), kind


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [pytest.param(SOME_NAMES, id="some"), pytest.param(NAMES, id="all", marks=pytest.mark.soak)])
def test_names_with_anything_in_them(names: Sequence[str], source: Source, pipeline: Pipeline) -> None:
    source.sql('CREATE SCHEMA "S p.a"')
    tables = [TableName("public", name) for name in names] + [TableName("S p.a", "Case")]
    for table in tables:
        # Readers but Spark do not know column mapping, which some characters need.
        mapped = set(" ,;{}()\n\t=") & set(table.name)
        column = "c" if mapped or table.name.lower() in ("case", "id") else quote_ident(table.name)
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, {column} text)")
        source.sql(f"INSERT INTO {table} VALUES (1, {_literal(table.name)}), (2, NULL)")
    pipeline.sync()
    for table in tables[::3]:
        source.sql(f"UPDATE {table} SET id = 3 WHERE id = 2")
    pipeline.sync()
    pipeline.assert_current(*map(str, tables))
    assert len({path.lower() for path in map(pipeline.lake.current, tables)}) == len(tables)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kinds_of_tables(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE parts (id int, d int, v text, PRIMARY KEY (id, d)) PARTITION BY RANGE (d)")
    source.sql("CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    source.sql("CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (10) TO (100) PARTITION BY LIST (id)")
    source.sql("CREATE TABLE parts_rest PARTITION OF parts_high DEFAULT")
    source.sql("INSERT INTO parts SELECT i, i, 'v' || i FROM generate_series(1, 20) i")
    source.sql("CREATE TABLE parent (id int PRIMARY KEY, v int); CREATE TABLE child (w int, PRIMARY KEY (id)) INHERITS (parent)")
    source.sql("INSERT INTO parent VALUES (1, 1); INSERT INTO child VALUES (2, 2, 2)")
    source.sql("CREATE TABLE made (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int, twice int GENERATED ALWAYS AS (a * 2) STORED)")
    source.sql("INSERT INTO made (a) VALUES (1), (2)")
    source.sql("CREATE TABLE indexed (a int NOT NULL, b text NOT NULL, c int); CREATE UNIQUE INDEX by_b ON indexed (b)")
    source.sql("ALTER TABLE indexed REPLICA IDENTITY USING INDEX by_b; INSERT INTO indexed VALUES (1, 'x', 1), (1, 'y', 2)")
    source.sql("CREATE TABLE bare (); ALTER TABLE bare REPLICA IDENTITY FULL; INSERT INTO bare DEFAULT VALUES")
    source.sql("CREATE UNLOGGED TABLE quick (id int PRIMARY KEY); CREATE VIEW seen AS SELECT 1 AS one")
    tables = ["parts", "child", "made", "indexed"]
    pipeline.sync()
    source.sql("UPDATE parts SET d = d + 10 WHERE d IN (3, 4); DELETE FROM parts WHERE id = 15")
    source.sql("CREATE TABLE parts_more PARTITION OF parts FOR VALUES FROM (100) TO (200); INSERT INTO parts VALUES (7, 150, 'new')")
    source.sql("UPDATE parts SET v = 'upd' WHERE d > 90")
    source.sql("UPDATE child SET v = 7; INSERT INTO made (a) VALUES (5); UPDATE made SET a = 9 WHERE id = 1")
    source.sql("UPDATE indexed SET b = 'z' WHERE b = 'x'; UPDATE indexed SET c = 5 WHERE b = 'y'")
    source.sql("BEGIN; INSERT INTO made (a) VALUES (6); SAVEPOINT s; INSERT INTO made (a) VALUES (7); ROLLBACK TO s; COMMIT")
    source.sql("BEGIN; INSERT INTO indexed VALUES (2, 'two-phase', 0); PREPARE TRANSACTION 'later'")
    source.sql("SELECT pg_logical_emit_message(true, 'x', 'y'); SELECT pg_logical_emit_message(false, 'x', 'y')")
    generation = {name: state.generation for name, state in pipeline.ledger.tables().items()}
    pipeline.sync()
    assert {name: state.generation for name, state in pipeline.ledger.tables().items()} == generation, "a new partition brings no rows"
    pipeline.assert_current(*(f"public.{table}" for table in tables))
    source.sql("COMMIT PREPARED 'later'")
    source.sql(
        "CREATE TABLE brought (id int NOT NULL, d int NOT NULL, v text, PRIMARY KEY (id, d)); INSERT INTO brought VALUES (8, 250, 'old')"
    )
    source.sql("ALTER TABLE parts ATTACH PARTITION brought FOR VALUES FROM (200) TO (300)")
    pipeline.drain()
    pipeline.sync()
    pipeline.assert_current(*(f"public.{table}" for table in tables))
    source.sql("TRUNCATE parts_low")
    pipeline.drain()
    pipeline.sync()
    source.sql("ALTER TABLE parts DETACH PARTITION brought")
    pipeline.drain()
    pipeline.sync()
    pipeline.assert_current("public.parts")
    states = {name.name: state.state for name, state in pipeline.ledger.tables().items()}
    assert (states["quick"], "seen" in states) == ("skipped", False)


@pytest.mark.soak
def test_a_thousand_columns(source: Source, pipeline: Pipeline) -> None:
    source.sql(f"CREATE TABLE wide (id int PRIMARY KEY, {', '.join(f'c{n} int' for n in range(999))})")
    source.sql("INSERT INTO wide (id, c0, c998) VALUES (1, 2, 3)")
    pipeline.sync()
    source.sql("UPDATE wide SET c500 = 1; INSERT INTO wide (id) VALUES (2)")
    pipeline.sync()
    pipeline.assert_current("public.wide")


@pytest.mark.timeout(900)
def test_column_lists_and_row_filters_of_a_publication_of_the_users(
    source: Source, make_pipeline: Callable[..., Pipeline], spark: Any
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, a int, secret text); INSERT INTO t SELECT i, i, 's' FROM generate_series(1, 20) i")
    source.sql("CREATE PUBLICATION theirs FOR TABLE t (id, a) WHERE (id % 2 = 0)")
    pipeline = make_pipeline(publication="theirs")
    pipeline.spark = lambda: spark
    pipeline.sync()
    source.sql("UPDATE t SET id = id + 101 WHERE id IN (4, 20); UPDATE t SET id = 42 WHERE id = 8; UPDATE t SET id = 40 WHERE id = 7")
    source.sql("INSERT INTO t VALUES (50, 50, 'x'), (51, 51, 'x')")
    pipeline.sync()
    source.sql("CREATE VIEW published AS SELECT id, a FROM t WHERE id % 2 = 0")
    source.sql("CREATE TABLE expected AS SELECT * FROM published")
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = publish.tables[TableName("public", "t")]
    assert_equal(source, "public.expected", pointer.path, pointer.version)
    # More of the table is published: its rows from before are in no stream.
    source.sql("ALTER PUBLICATION theirs SET TABLE t WHERE (id < 30)")
    pipeline.sync()
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = publish.tables[TableName("public", "t")]
    source.sql("DROP TABLE expected; CREATE TABLE expected AS SELECT * FROM t WHERE id < 30")
    assert_equal(source, "public.expected", pointer.path, pointer.version)

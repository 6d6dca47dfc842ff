"""Databases in other encodings than UTF-8: text and names arrive as the Unicode they stand for; bytes that are no text are kept."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source, fresh_source


@contextmanager
def pipeline_on(server: Postgres, encoding: str, make_pipeline: Callable[..., Pipeline], spark: Any, **settings: Any) -> Iterator[Pipeline]:
    with fresh_source(server, encoding) as source:
        pipeline = make_pipeline(source_dsn=source.dsn, **settings)
        pipeline.source, pipeline.spark = source, lambda: spark
        yield pipeline


def test_latin1(postgres: Postgres, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    letters = "".join(map(chr, [*range(1, 127), *range(160, 256)]))
    with pipeline_on(postgres, "LATIN1", make_pipeline, spark, snapshot_chunk_rows=50) as pipeline:
        source = pipeline.source
        source.sql('CREATE SCHEMA "Ä"; CREATE TYPE gemüt AS ENUM (\'fröhlich\', \'trüb\'); CREATE TYPE "pär" AS (a int, "ß" text)')
        source.sql(
            'CREATE TABLE "Ä"."straße" ("schlüssel-é" text PRIMARY KEY, "größe" text, c char(5), list text[], j json, b jsonb, e gemüt,'
            ' p "pär", raw bytea)'
        )

        def insert(first: int) -> None:
            source.sql(
                "INSERT INTO \"Ä\".\"straße\" SELECT 'é' || i || 'ÿ', %s, 'éa', ARRAY['ä', NULL, '{\"ü}'], '{\"ö\": \"\\u00e9\"}',"
                ' \'{"ö": "é"}\', \'trüb\', (i, \'ß"\')::"pär", %s FROM generate_series(%s::int, %s) i',
                letters,
                bytes(range(256)),
                first,
                first + 199,
            )

        insert(1)
        source.sql('ANALYZE "Ä"."straße"')
        pipeline.sync()
        insert(1001)
        source.sql('UPDATE "Ä"."straße" SET "schlüssel-é" = \'ø\' || "schlüssel-é", "größe" = \'¿\' WHERE "schlüssel-é" LIKE \'é1%\'')
        source.sql('ALTER TABLE "Ä"."straße" ADD "ñ" text; UPDATE "Ä"."straße" SET "ñ" = \'Ñ\' WHERE "schlüssel-é" LIKE \'ø%\'')
        source.sql('DELETE FROM "Ä"."straße" WHERE "schlüssel-é" = \'é2ÿ\'')
        pipeline.sync()
        assert len(pipeline.ledger.chunks(TableName("Ä", "straße"), _generation(pipeline, TableName("Ä", "straße")))) > 2
        pipeline.assert_current('"Ä"."straße"')


def _generation(pipeline: Pipeline, table: TableName) -> str:
    generation = pipeline.ledger.tables()[table].generation
    assert generation is not None
    return generation


def _change(source: Source, first: int) -> None:
    """Rows whose text is UTF-8, or not, or not even a text: `x'…'` are bytes in no encoding that anybody knows."""
    source.sql(
        "INSERT INTO mixed SELECT CASE i % 3 WHEN 0 THEN 'k' || i WHEN 1 THEN 'ключ' || i ELSE bytes('\\xe9') || i END,"
        " CASE i % 4 WHEN 0 THEN 'plain' WHEN 1 THEN bytes('\\x636166e9') WHEN 2 THEN '\\x636166e9' END,"
        " CASE i % 5 WHEN 0 THEN ARRAY['é', NULL] WHEN 1 THEN ARRAY['a', bytes('\\xff')] WHEN 2 THEN ARRAY[[bytes('\\xff')]] END, i"
        f" FROM generate_series({first}, {first + 199}) i"
    )
    source.sql("INSERT INTO bag SELECT CASE i % 2 WHEN 0 THEN 'é' ELSE bytes('\\xe9') END FROM generate_series(1, 6) i")


def _wanted(source: Source, columns: str, table: str) -> Counter[tuple[Any, ...]]:
    rows = source.sql(f"SELECT {columns} FROM {table}")
    return Counter(tuple(part for cell in row for part in _parts(cell)) for row in rows)


def _parts(cell: Any) -> tuple[Any, Any]:
    """A value and its text as the lake should have them, of the bytes of a text."""
    if not isinstance(cell, memoryview):
        return cell, None
    try:
        return cell.tobytes().decode(), None
    except UnicodeDecodeError:
        return None, "\\x" + cell.hex()


def _found(pipeline: Pipeline, table: str, *columns: str) -> Counter[tuple[Any, ...]]:
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = publish.tables[TableName("public", table)]
    rows = pl.scan_delta(pointer.path, version=pointer.version).collect().to_dicts()
    texts = [dict(row["_pgwal_text"] or {}) for row in rows]
    return Counter(
        tuple(part for column in columns for part in (_cell(row[column]), text.get(column))) for row, text in zip(rows, texts, strict=True)
    )


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, list) else value


def test_sql_ascii(postgres: Postgres, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    """Text that is not UTF-8 is null in its column, its bytes stand in `_pgwal_text`; keys of such bytes are keys like others."""
    with pipeline_on(postgres, "SQL_ASCII", make_pipeline, spark, snapshot_chunk_rows=20) as pipeline:
        source = pipeline.source
        source.sql("CREATE FUNCTION bytes(bytea) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT convert_from($1, 'SQL_ASCII') $$")
        source.sql("CREATE TABLE mixed (k text PRIMARY KEY, v text, list text[], n int)")
        source.sql("CREATE TABLE bag (v text); ALTER TABLE bag REPLICA IDENTITY FULL")
        odd = TableName("public", "таблица 😀")
        source.sql(f"CREATE TABLE {odd} ({quote_ident('ключ')} text PRIMARY KEY, v varchar(9)); INSERT INTO {odd} VALUES ('é', 'żółć')")
        _change(source, 1)
        source.sql("ANALYZE mixed")
        pipeline.sync()
        assert len(pipeline.ledger.chunks(TableName("public", "mixed"), _generation(pipeline, TableName("public", "mixed")))) > 1
        _change(source, 1001)
        source.sql("UPDATE mixed SET k = bytes('\\xfe') || n WHERE n IN (5, 6, 7, 1005)")
        source.sql("UPDATE mixed SET v = bytes('\\xfe') WHERE n IN (8, 9)")
        source.sql("UPDATE mixed SET k = 'good' || n WHERE n IN (11, 14, 1007); DELETE FROM mixed WHERE n IN (20, 21, 1020)")
        source.sql("DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE v = bytes('\\xe9') LIMIT 2); UPDATE bag SET v = v || v")
        source.sql(f"INSERT INTO {odd} VALUES ('😀', NULL)")
        pipeline.sync()
        pipeline.assert_current(str(odd))
        lists = "CASE n % 5 WHEN 0 THEN '[''é'', None]' END, convert_to(CASE WHEN n % 5 IN (1, 2) THEN format('%s', list) END, 'SQL_ASCII')"
        text = "convert_to(k, 'SQL_ASCII'), convert_to(v, 'SQL_ASCII'), n"
        assert _found(pipeline, "mixed", "k", "v", "n") == _wanted(source, text, "mixed")
        listed = Counter((value, kept, n) for value, _, _, kept, n, _ in _wanted(source, f"{lists}, n", "mixed").elements())
        assert Counter((value, kept, n) for value, kept, n, _ in _found(pipeline, "mixed", "list", "n").elements()) == listed
        assert _found(pipeline, "bag", "v") == _wanted(source, "convert_to(v, 'SQL_ASCII')", "bag")
        assert verify(pipeline.settings, pipeline.spark, [TableName("public", "mixed")], progress=Silent()).equal
        # A name that is no text can be followed under no name: it is refused before anything is read, until it has another one.
        source.sql("DO $$ BEGIN EXECUTE format('CREATE TABLE %I (id int PRIMARY KEY)', bytes('\\xe9')); END $$")
        with pytest.raises(SourceRefused, match=r"a name or a text that it cannot write as UTF-8.*0xe9.*rename it"):
            pipeline.drain()
        source.sql("DO $$ BEGIN EXECUTE format('ALTER TABLE %I RENAME TO better', bytes('\\xe9')); END $$")
        pipeline.drain()

"""The tables of a publication, as the server's own view has them, and while one of them is locked."""

import random

import psycopg2
import pytest

from pgwal_pipeline.postgres import catalog, dsn
from pgwal_pipeline.postgres.publication_query import published_sql
from pgwal_pipeline.postgres.storage import storages
from pgwal_pipeline_tests.support import Source

pytestmark = pytest.mark.matrix

_TABLES = """
    CREATE SCHEMA s;
    CREATE TABLE plain (id int PRIMARY KEY, v text, w int);
    CREATE TABLE s.inside (id int PRIMARY KEY, v text);
    CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
    CREATE TABLE parent (id int PRIMARY KEY);
    CREATE TABLE child () INHERITS (parent);
    CREATE TABLE parted (id int, k int, PRIMARY KEY (id, k)) PARTITION BY LIST (k);
    CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1);
    CREATE TABLE s.parted_2 PARTITION OF parted FOR VALUES IN (2, 3) PARTITION BY LIST (k);
    CREATE TABLE parted_2a PARTITION OF s.parted_2 FOR VALUES IN (2);
    CREATE TABLE empty_root (id int, k int) PARTITION BY LIST (k);
    CREATE TABLE generated (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED, gone int);
    ALTER TABLE generated DROP COLUMN gone;
    CREATE VIEW seen AS SELECT 1 AS one
"""
_NAMES = ("plain", "s.inside", "parent", "child", "parted", "parted_1", "s.parted_2", "parted_2a", "empty_root", "generated")


def _publications(version: int) -> list[str]:
    rng = random.Random(5)
    made = ["FOR ALL TABLES", "", *("FOR TABLE " + ", ".join(rng.sample(_NAMES, rng.randint(1, 5))) for _ in range(12))]
    if version >= 150000:
        made += ["FOR TABLES IN SCHEMA s", "FOR TABLES IN SCHEMA public", "FOR TABLES IN SCHEMA s, TABLE parted"]
        made += ["FOR TABLES IN SCHEMA s, TABLE plain", "FOR TABLE plain (id, w) WHERE (w > 1), s.inside"]
        made += ["FOR TABLE ONLY parent WHERE (id > 3)", "FOR TABLE parted_1 (k, id), parted"]
    options = ["publish_via_partition_root = true", "publish_via_partition_root = false"]
    if version >= 180000:
        options.append("publish_generated_columns = stored")
        made.append("FOR TABLE generated (id, g)")
    found = [f"{one} WITH ({option})" for one in made for option in options]
    return [*found, "FOR TABLE parted (id, k), parted_1 (k, id) WITH (publish_via_partition_root)"] if version >= 150000 else found


def test_it_says_what_the_view_says(source_matrix: Source) -> None:
    source = source_matrix
    version = int(source.value("SHOW server_version_num"))
    source.sql(_TABLES)
    with dsn.connect(source.dsn) as conn:
        for number, publication in enumerate(_publications(version)):
            source.sql(f"CREATE PUBLICATION p{number} {publication}")
            filters = "rowfilter" if version >= 150000 else "NULL::text"
            expected = {
                (schema, table): (row_filter, attnames)
                for schema, table, row_filter, attnames in source.sql(
                    f"SELECT schemaname::text, tablename::text, {filters}, {'attnames::text[]' if version >= 150000 else 'NULL::text[]'}"
                    f" FROM pg_publication_tables WHERE pubname = 'p{number}'"
                )
            }
            found = {(t.relation.table.schema, t.relation.table.name): t for t in catalog.published_tables(conn, f"p{number}")}
            assert found.keys() == expected.keys(), publication
            for name, (row_filter, attnames) in expected.items():
                assert found[name].row_filter == row_filter, publication
                if version >= 180000:
                    assert list(found[name].relation.column_names) == list(attnames or ()), publication
            rows = source.sql(published_sql(version).replace("%s", f"'p{number}'"))
            assert len(rows) == len(expected), publication


def test_a_locked_table_holds_up_nobody(source_matrix: Source) -> None:
    source = source_matrix
    source.sql(_TABLES)
    filters = " WHERE (id > 3)" if source.value("SHOW server_version_num") >= "150000" else ""
    source.sql(f"CREATE PUBLICATION p FOR TABLE plain{filters}, parted, generated WITH (publish_via_partition_root = true)")
    with psycopg2.connect(source.dsn) as locking, dsn.connect(source.dsn) as conn:
        locking.cursor().execute("LOCK TABLE plain, parted, parted_1, generated IN ACCESS EXCLUSIVE MODE")
        conn.execute(b"SET lock_timeout = '1s'")
        found = catalog.tables_of(conn, "p")
        assert {relation.table.name for relation in found} == {"plain", "parted", "generated"}
        assert storages(conn, "p", [relation.oid for relation in found]).keys() == {relation.oid for relation in found}
    locking.close()

"""What values and keys are made of beyond the types' limits: labels that come later, domains, collations, settings, ways to write."""

from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.embedded.postgres import Postgres, servers
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source, fresh_source

_TABLES = (
    "CREATE EXTENSION citext",
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE DOMAIN scores AS int[] CHECK (cardinality(VALUE) < 9)",
    "CREATE DOMAIN best AS scores",
    "CREATE TABLE moods (id int PRIMARY KEY, m mood, ms mood[], s scores, b best)",
    "CREATE TABLE shapes (id int PRIMARY KEY, a line, b lseg, c polygon, d path, e circle, f box, g point)",
    "CREATE TABLE names (name citext PRIMARY KEY, v int)",
    "CREATE TABLE paid (id int PRIMARY KEY, price money, at timestamptz, span interval, f float8, d date, o bytea)",
)
_BEFORE = (
    "INSERT INTO moods VALUES (1, 'sad', '{sad,NULL,ok}', '{1,NULL,3}', '{}'), (2, NULL, NULL, NULL, NULL)",
    "INSERT INTO shapes VALUES (1, '{1,-1,0}', '[(0,0),(1,1)]', '((0,0),(1,0),(1,1))', "
    "'[(0,0),(1,1)]', '<(1,2),3>', '(1,1),(0,0)', '(1,2)')",
    "INSERT INTO names VALUES ('Ann', 1), ('bob', 2), ('Cy', 3)",
    "INSERT INTO paid VALUES (1, 12.5, '2020-01-02 03:04:05.678901+02', '1 year 2 mons -3 days 04:05:06', 0.1, '2020-02-01', '\\x00ff')",
)
_AFTER = (
    "ALTER TYPE mood ADD VALUE 'glad' AFTER 'ok'",
    "INSERT INTO moods VALUES (3, 'glad', '{glad,sad}', '{7}', '{8,9}')",
    "UPDATE moods SET m = 'glad', b = '[3:4]={5,6}' WHERE id = 1",
    "UPDATE shapes SET c = '((5,5),(6,5),(6,6),(5,6))', a = '{0,1,2.5}' WHERE id = 1",
    "INSERT INTO shapes (id, b) VALUES (2, '[(1e300,0),(-1,1e-300)]')",
    "UPDATE names SET v = 20 WHERE name = 'BOB'",
    "UPDATE names SET name = 'ANN' WHERE name = 'ann'",  # the same key for Postgres, another text
    "DELETE FROM names WHERE name = 'CY'",
    "INSERT INTO names VALUES ('cy', 30)",
    "UPDATE paid SET price = -1234567.89, f = 1e-300",
    "INSERT INTO paid VALUES (2, 0.01, '1999-12-31 23:59:59+00', '-00:00:00.000001', 0.30000000000000004, '0044-03-15', '\\x')",
)
# What a database may have set for everybody that comes, and Postgres then writes values by.
_SETTINGS = {
    "DateStyle": "'SQL, DMY'", "IntervalStyle": "'sql_standard'", "TimeZone": "'Asia/Kolkata'", "extra_float_digits": "-15",
    "bytea_output": "'escape'", "lc_monetary": "'C.UTF-8'", "default_transaction_read_only": "off",
}  # fmt: skip


def test_labels_domains_shapes_and_settings(source: Source, pipeline: Pipeline) -> None:
    for statement in (*_TABLES, *_BEFORE):
        source.sql(statement)
    for name, value in _SETTINGS.items():
        source.sql(f"ALTER DATABASE {source.database} SET {name} = {value}")
    pipeline.sync()
    for statement in _AFTER:
        source.sql(statement)
    with source.connect() as conn:
        conn.autocommit = False
        conn.execute("SELECT pg_current_xact_id()")  # a transaction that writes nothing
        conn.commit()
        conn.execute("SAVEPOINT s; INSERT INTO names VALUES ('undone', 0); ROLLBACK TO s")
        conn.commit()
        with conn.cursor() as cursor:
            cursor.copy_expert("COPY names FROM STDIN", StringIO("dora\t4\nEve\t\\N\n"))
        conn.commit()
    pipeline.sync()
    for name in _SETTINGS:
        source.sql(f"ALTER DATABASE {source.database} RESET {name}")
    source.close()
    pipeline.assert_current("public.shapes", "public.names", "public.paid")
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = publish.tables[TableName("public", "moods")]
    moods = pl.read_delta(pointer.path, version=pointer.version).sort("id")
    assert moods.select("id", "m", "ms", "s", "b").rows() == [
        (1, "glad", ["sad", None, "ok"], [1, None, 3], None),
        (2, None, None, None, None),
        (3, "glad", ["glad", "sad"], [7], [8, 9]),
    ]
    assert [dict(text or {}) for text in moods["_pgwal_text"]] == [{"b": "[3:4]={5,6}"}, {}, {}]


@pytest.fixture
def rich_source(make_server: Callable[..., Postgres]) -> Iterator[Source]:
    """A database on a server with ICU and XML, which the bundled ones are built without."""
    for installation in servers():
        server = make_server(installation)
        with fresh_source(server) as source:
            xml = source.value("SELECT count(*) FROM pg_proc WHERE proname = 'xml_is_well_formed'")
            icu = source.value("SELECT count(*) FROM pg_collation WHERE collprovider = 'i'")
            if xml and icu and _takes_xml(source):
                yield source
                return
    pytest.skip("no server at hand is built with ICU and libxml; one from the system's packages is")


def _takes_xml(source: Source) -> bool:
    return source.value("SELECT count(*) FROM pg_config WHERE name = 'CONFIGURE' AND setting LIKE '%--with-libxml%'") == 1


def test_collations_that_call_different_texts_equal_and_xml(rich_source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    source = rich_source
    source.sql("CREATE COLLATION folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    source.sql("CREATE TABLE folded (k text COLLATE folded PRIMARY KEY, v int, x xml)")
    source.sql("CREATE TABLE pairs (a int, k text COLLATE folded, v int, PRIMARY KEY (a, k))")
    source.sql("INSERT INTO folded VALUES ('Ann', 1, '<a b=\"1\">x &amp; y</a>'), ('bob', 2, NULL), ('Cy', 3, 'text <i/>')")
    source.sql("INSERT INTO pairs VALUES (1, 'One', 1), (2, 'one', 2)")
    pipeline = make_pipeline(source_dsn=source.dsn)
    pipeline.source, pipeline.spark = source, lambda: spark
    pipeline.sync()
    source.sql("UPDATE folded SET v = 10 WHERE k = 'ANN'")
    source.sql("UPDATE folded SET k = 'BOB', x = '<?xml version=\"1.0\"?><r/>' WHERE k = 'bob'")
    source.sql("DELETE FROM folded WHERE k = 'CY'; INSERT INTO folded VALUES ('cY', 30, '<new/>')")
    source.sql("UPDATE pairs SET k = 'ONE' WHERE a = 1; UPDATE pairs SET a = 3 WHERE k = 'ONE' AND a = 2")
    pipeline.sync()
    pipeline.assert_current("public.folded", "public.pairs")

"""What `preview` says of a migration is what a drain does after it; the source is only read."""

from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline.pipeline.preview import Preview, lost_columns, preview
from pgwal_pipeline.pipeline.scratch import Refused
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source

MADE = """
CREATE TYPE mood AS ENUM ('glad', 'sad');
CREATE DOMAIN price AS numeric(10,2) CHECK (VALUE >= 0);
CREATE TYPE pair AS (a int, b mood);
CREATE FUNCTION twice(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 * 2';
CREATE TABLE plain (id bigserial PRIMARY KEY, m mood DEFAULT 'glad', p price, q pair[], t int GENERATED ALWAYS AS (twice(3)) STORED);
CREATE TABLE dflt (id int PRIMARY KEY, v int);
CREATE TABLE rnd (id int PRIMARY KEY, v int);
CREATE TABLE ren (id int PRIMARY KEY, v int);
CREATE TABLE typ (id int PRIMARY KEY, v varchar(10));
CREATE TABLE wide (id int PRIMARY KEY, v varchar(10));
CREATE TABLE drp (id int PRIMARY KEY, v int);
CREATE TABLE trunc (id int PRIMARY KEY, v int);
CREATE TABLE twicetr (id int PRIMARY KEY, v int);
CREATE TABLE keyed (id int PRIMARY KEY, v int NOT NULL UNIQUE);
CREATE TABLE ident (id int PRIMARY KEY, v int NOT NULL UNIQUE);
CREATE TABLE named (id int PRIMARY KEY, v int);
CREATE TABLE anew (id int PRIMARY KEY, v int);
CREATE TABLE gone (id int PRIMARY KEY, v int);
CREATE TABLE bag (v int); ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TABLE vac (id int PRIMARY KEY);
CREATE TABLE part (at date, id int, v text COLLATE "C", PRIMARY KEY (at, id)) PARTITION BY RANGE (at);
CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM ('2025-01-01') TO ('2026-01-01') PARTITION BY LIST (id);
CREATE TABLE part_2_1 PARTITION OF part_2 FOR VALUES IN (1);
CREATE TABLE parted (at date, id int, PRIMARY KEY (at, id)) PARTITION BY RANGE (at);
CREATE TABLE parted_1 PARTITION OF parted DEFAULT;
CREATE TABLE base (id int PRIMARY KEY); CREATE TABLE heir (more int, PRIMARY KEY (id)) INHERITS (base);
CREATE TABLE linked (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, other bigint REFERENCES plain, EXCLUDE (other WITH =));
CREATE INDEX ON plain ((p + 1)) WHERE id > 3;
CREATE VIEW seen AS SELECT id, v FROM ren; CREATE MATERIALIZED VIEW stored AS SELECT id FROM plain;
INSERT INTO plain (p) VALUES (1); INSERT INTO part VALUES ('2024-02-02', 1), ('2025-02-02', 1); INSERT INTO trunc VALUES (1, 1);
INSERT INTO dflt VALUES (1, 1); INSERT INTO rnd VALUES (1, 1); INSERT INTO typ VALUES (1, 'x'); INSERT INTO twicetr VALUES (1, 1)
"""
MIGRATION = """
ALTER TABLE plain ADD COLUMN note text; ALTER TYPE mood ADD VALUE 'odd'; CREATE INDEX CONCURRENTLY ON plain (p);
ALTER TABLE dflt ADD COLUMN w int DEFAULT 5;
ALTER TABLE rnd ADD COLUMN w float8 DEFAULT random();
ALTER VIEW seen RENAME COLUMN v TO x; ALTER TABLE ren RENAME COLUMN v TO w;
ALTER TABLE typ ALTER v TYPE text;
ALTER TABLE wide ALTER v TYPE varchar(20);
ALTER TABLE drp DROP COLUMN v;
TRUNCATE trunc;
BEGIN; TRUNCATE twicetr; ALTER TABLE twicetr ALTER v TYPE bigint; COMMIT;
ALTER TABLE keyed DROP CONSTRAINT keyed_pkey; ALTER TABLE keyed ADD PRIMARY KEY (v);
ALTER TABLE ident REPLICA IDENTITY FULL;
ALTER TABLE named RENAME TO called; ALTER TABLE called SET SCHEMA other;
DROP TABLE anew; CREATE TABLE anew (id int PRIMARY KEY, w int);
DROP TABLE gone;
CREATE TABLE fresh (id int PRIMARY KEY);
VACUUM FULL vac;
ALTER TABLE part DETACH PARTITION part_1;
CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');
ALTER TABLE base ADD COLUMN x int;
UPDATE dflt SET w = 6; ANALYZE; COMMENT ON TABLE bag IS 'x'; GRANT SELECT ON bag TO some_role; ALTER TABLE bag SET (fillfactor = 50);
"""
LOST = {("ren", "v"), ("drp", "v"), ("anew", "v"), ("gone", "id"), ("gone", "v")}


def _said(found: Preview) -> dict[str, str]:
    return {table.name: outcome.why or "" for table, outcome in found.tables.items() if outcome.read_again}


def test_it_says_what_a_drain_then_does(source: Source, make_pipeline: MakePipeline, tmp_path: Path) -> None:
    source.sql("DO $$ BEGIN CREATE ROLE some_role; EXCEPTION WHEN duplicate_object THEN NULL; END $$; CREATE SCHEMA other")
    source.sql(MADE)
    file = tmp_path / "m.sql"
    file.write_text(MIGRATION)
    pipeline = make_pipeline()
    before = preview(pipeline.settings, file)  # before the publication is there
    pipeline.drain()
    pipeline.snapshot()
    pipeline.drain()
    written = source.value("SELECT pg_current_wal_insert_lsn()")
    found = preview(pipeline.settings, file)
    assert source.value("SELECT count(*) FROM pg_class WHERE relname IN ('fresh', 'called')") == 0
    assert source.value("SELECT xmin::text FROM pg_class WHERE relname = 'drp'") is not None
    assert found.warnings == before.warnings == ()
    assert _said(found) == _said(before)
    assert written is not None
    assert {(table.name, column) for table, column in lost_columns(found)} == LOST
    assert found.tables[TableName("public", "part")].bytes > 0
    generations = {state.oid: state.generation for state in pipeline.ledger.tables().values()}
    oids: dict[int, str] = dict(source.sql("SELECT oid::int8, relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace"))
    with source.connect() as conn:
        for line in filter(None, (part.strip() for part in MIGRATION.replace("BEGIN; ", "").replace(" COMMIT;", "").split(";"))):
            if "twicetr" not in line:
                conn.execute(line.encode())
        conn.execute(b"BEGIN; TRUNCATE twicetr; ALTER TABLE twicetr ALTER v TYPE bigint; COMMIT")
    pipeline.drain()
    states = pipeline.ledger.tables().values()
    again = {oids[state.oid] for state in states if state.state == "pending" and state.oid in oids and generations.get(state.oid)}
    assert set(_said(found)) - {"anew"} == again
    assert again == {"dflt", "rnd", "ren", "typ", "twicetr", "keyed", "vac", "part"}


@pytest.mark.parametrize(
    ("policy", "sql", "again", "why"),
    [
        ("stop", "ALTER TABLE t ADD w int", False, "it would wait for `pgwal accept 'public.t'` (column w integer is new)"),
        (
            "stop",
            "ALTER TABLE t RENAME v TO w",
            True,
            "it would wait for `pgwal accept 'public.t'` (column v is gone, column w integer is new)",
        ),
        ("freeze", "ALTER TABLE t ADD w int DEFAULT 1", False, "its columns are frozen (column w integer is new)"),
        ("freeze", "ALTER TABLE t ALTER v TYPE bigint", True, "its column v has another type"),
        ("propagate", "ALTER TABLE t DROP CONSTRAINT t_pkey", True, "it would be left out: no usable replica identity"),
    ],
)
def test_options_of_tables_count(
    policy: str, sql: str, again: bool, why: str, source: Source, make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int)")
    pipeline = make_pipeline(table_options={"*.*": {"on_schema_change": policy}})
    (tmp_path / "m.sql").write_text(sql)
    outcome = preview(pipeline.settings, tmp_path / "m.sql").tables[TableName("public", "t")]
    assert outcome.read_again == again
    assert (outcome.why or "").startswith(why)


def test_a_listed_column(source: Source, make_pipeline: MakePipeline, tmp_path: Path) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int, secret text)")
    guarded: Pipeline = make_pipeline(table_options={"public.t": {"exclude": ["secret"]}})
    guarded.drain()
    file = tmp_path / "m.sql"
    file.write_text("ALTER TABLE t DROP secret")
    assert lost_columns(preview(guarded.settings, file)) == []
    file.write_text("ALTER TABLE t ADD w int")
    assert _said(preview(guarded.settings, file)) == {"t": "its list of published columns would change"}
    file.write_text("ALTER TABLE t DROP v")  # the source refuses it too
    with pytest.raises(Refused, match="because other objects depend on it"):
        preview(guarded.settings, file)
    answer: dict[str, Any] = Preview({}, ()).to_json([])
    assert answer == {"tables": {}, "columns_lost": [], "warnings": []}

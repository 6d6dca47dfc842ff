"""What is done between two looks at the catalog and undone again, or hidden by what the stream tells: the rows are read again for it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.oracle import assert_equal
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline, killed
from pgwal_pipeline_tests.scenarios.tables.altering import converge, run
from pgwal_pipeline_tests.support import Source


@dataclass(frozen=True)
class Case:
    """What is done to the table called {t} between two drains, and whether its rows have to be read again; `before` the first of them."""

    change: str
    again: bool
    before: str = "INSERT INTO {t} (id, a) VALUES (20, 2)"


ROOT = "CREATE TABLE {t} (id int, a int, v text, PRIMARY KEY (id, a)) PARTITION BY RANGE (a)"
LOW = "CREATE TABLE {t}_low PARTITION OF {t} FOR VALUES FROM (0) TO (100)"
NINE = "CREATE TABLE {t}_9 PARTITION OF {t} FOR VALUES FROM (900) TO (1000)"
OTHER = "CREATE TABLE {t}_9 (id int NOT NULL, a int NOT NULL, v text, PRIMARY KEY (id, a))"
FILLED = "INSERT INTO {t} (id, a) VALUES (9, 900), (10, 910)"
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_9 FOR VALUES FROM (900) TO (1000)"
AWAY_AND_BACK = (
    "ALTER TABLE {t} DETACH PARTITION {t}_low; DELETE FROM {t}_low WHERE id = 1; "
    "ALTER TABLE {t} ATTACH PARTITION {t}_low FOR VALUES FROM (0) TO (100)"
)
MIDDLE = "CREATE TABLE {t}_9 (id int NOT NULL, a int NOT NULL, v text, PRIMARY KEY (id, a)) PARTITION BY LIST (id)"
LEAF = "CREATE TABLE {t}_91 PARTITION OF {t}_9 FOR VALUES IN (9, 10)"

PARTITIONED = {
    "came": Case(f"{NINE}; {FILLED}", again=False),
    "came_and_dropped": Case(f"{NINE}; {FILLED}; DROP TABLE {{t}}_9", again=True),
    "came_and_detached": Case(f"{NINE}; {FILLED}; ALTER TABLE {{t}} DETACH PARTITION {{t}}_9; DROP TABLE {{t}}_9", again=True),
    "was_one_for_a_while": Case(f"{ATTACH}; {FILLED}; ALTER TABLE {{t}} DETACH PARTITION {{t}}_9", again=True, before=OTHER),
    "away_and_back": Case(AWAY_AND_BACK, again=True),
    "away_and_back_once_more": Case(AWAY_AND_BACK, again=True, before=AWAY_AND_BACK),
    "brought_below": Case(f"{MIDDLE}; {LEAF}; INSERT INTO {{t}}_9 VALUES (9, 900); {ATTACH}", again=True),
    "came_below": Case(
        f"CREATE TABLE {{t}}_92 PARTITION OF {{t}}_9 DEFAULT; {FILLED}; INSERT INTO {{t}} (id, a) VALUES (11, 911)",
        again=False,
        before=f"{MIDDLE}; {LEAF}; {ATTACH}",
    ),
    "emptied": Case("TRUNCATE {t}; INSERT INTO {t} (id, a) VALUES (1, 1)", again=False),
    "emptied_and_filled": Case("BEGIN; TRUNCATE {t}; INSERT INTO {t} (id, a) VALUES (1, 1); TRUNCATE {t}_low; COMMIT", again=True),
}

PLAIN = {
    "refilled": Case("BEGIN; TRUNCATE {t}; INSERT INTO {t} (id, a) VALUES (1, 1); COMMIT", again=False),
    "refilled_and_altered": Case(
        "BEGIN; TRUNCATE {t}; INSERT INTO {t} (id, a) VALUES (1, 1); ALTER TABLE {t} ALTER a TYPE int USING a + 1; COMMIT", again=True
    ),
    "refilled_and_altered_twice": Case(
        "BEGIN; TRUNCATE {t}; INSERT INTO {t} (id, a) VALUES (1, 1); ALTER TABLE {t} ALTER a TYPE int USING a + 1; COMMIT; "
        "ALTER TABLE {t} ALTER a SET DEFAULT 5",
        again=True,
    ),
    "swapped_and_back": Case(
        "ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME b TO a; ALTER TABLE {t} RENAME x TO b; UPDATE {t} SET a = 100 WHERE id = 1; "
        "ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME b TO a; ALTER TABLE {t} RENAME x TO b",
        again=True,
    ),
    "swapped_and_one_dropped": Case(
        "ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME b TO a; ALTER TABLE {t} RENAME x TO b; UPDATE {t} SET a = 100 WHERE id = 1; "
        "ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME b TO a; ALTER TABLE {t} RENAME x TO b; ALTER TABLE {t} DROP b",
        again=True,
    ),
    "as_one_dropped_before": Case(
        "ALTER TABLE {t} RENAME a TO b; UPDATE {t} SET b = 100 WHERE id = 1; ALTER TABLE {t} RENAME b TO a",
        again=True,
        before="ALTER TABLE {t} DROP b",
    ),
    "as_one_added_later": Case(
        "ALTER TABLE {t} RENAME a TO c; UPDATE {t} SET c = 100 WHERE id = 1; ALTER TABLE {t} RENAME c TO a; ALTER TABLE {t} ADD c int",
        again=True,
    ),
    "added_and_dropped": Case(
        "UPDATE {t} SET a = 3 WHERE id = 1; ALTER TABLE {t} ADD c int; UPDATE {t} SET c = b WHERE id = 1; ALTER TABLE {t} DROP b; "
        "UPDATE {t} SET a = 4 WHERE id = 1; ALTER TABLE {t} ADD d int; UPDATE {t} SET d = 5 WHERE id = 1",
        again=False,
    ),
    "replaced": Case(
        "UPDATE {t} SET a = 3 WHERE id = 1; ALTER TABLE {t} ADD c int; ALTER TABLE {t} DROP b; UPDATE {t} SET c = 4 WHERE id = 1",
        again=False,
        before="ALTER TABLE {t} ADD d int",
    ),
}


def make(source: Source, table: str, case: str) -> None:
    columns = f"{ROOT}; {LOW}" if case in PARTITIONED else "CREATE TABLE {t} (id int PRIMARY KEY, a int, b int, v text)"
    run(source, f"{columns}; INSERT INTO {{t}} (id, a) SELECT i, i FROM generate_series(1, 5) i", table)


def read_again(pipeline: Pipeline) -> dict[str, str | None]:
    """The tables that are to be read (again), and why."""
    return {state.table.name: state.reason for state in pipeline.ledger.tables().values() if state.state == "pending"}


@pytest.mark.parametrize("cases", [PARTITIONED, PLAIN], ids=["partitioned", "plain"])
def test_what_is_undone_or_hidden(cases: Mapping[str, Case], source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    for case in cases:
        make(source, f"t_{case}", case)
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    for name, case in cases.items():
        run(source, case.before, f"t_{name}")
    for _ in range(2):
        # What is altered beforehand is read before the drain that counts.
        pipeline.drain()
        pipeline.snapshot()
    pipeline.drain()
    assert read_again(pipeline) == {}
    for name, case in cases.items():
        run(source, case.change, f"t_{name}")
    for _ in range(2):
        pipeline.drain()
        found = read_again(pipeline)
        assert {name: found.get(f"t_{name}") for name, case in cases.items() if (f"t_{name}" in found) != case.again} == {}
    if cases is PARTITIONED:
        # It has no change that came through the root in its own raw.
        assert "was a partition" in (read_again(pipeline)["t_was_one_for_a_while_9"] or "")
    pipeline.snapshot()
    pipeline.drain()
    assert read_again(pipeline) == {}


def test_a_table_that_was_in_another_schema_for_a_while(source: Source, make_pipeline: MakePipeline) -> None:
    """A publication of all tables of a schema has nothing of what was done to it there."""
    source.sql("CREATE SCHEMA s; CREATE SCHEMA elsewhere; CREATE TABLE s.t (id int PRIMARY KEY); INSERT INTO s.t VALUES (1), (2)")
    source.sql("CREATE TABLE s.other (id int PRIMARY KEY); CREATE PUBLICATION theirs FOR TABLES IN SCHEMA s")
    pipeline = make_pipeline(publication="theirs")
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    source.sql("ALTER TABLE s.other ADD c int; GRANT SELECT ON s.other TO public; ANALYZE s.other")
    source.sql("ALTER TABLE s.t SET SCHEMA elsewhere")
    source.sql("DELETE FROM elsewhere.t WHERE id = 1")
    source.sql("ALTER TABLE elsewhere.t SET SCHEMA s")
    pipeline.drain()
    assert set(read_again(pipeline)) == {"t"}


def test_rows_that_come_into_a_row_filter_without_all_of_their_values(source: Source, pipeline: Pipeline) -> None:
    """They are inserted for the stream, but a value stored out of line that did not change is not sent; partitions come and go beside."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, open bool, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    source.sql("INSERT INTO t SELECT i, i % 2 = 0, repeat('v', 3000) || i FROM generate_series(1, 6) i")
    for statement in (ROOT, LOW, "INSERT INTO {t} VALUES (1, 1, 'one')"):
        source.sql(statement.replace("{t}", "parts"))
    source.sql("CREATE PUBLICATION theirs FOR TABLE t WHERE (id > 0 AND id < 100), parts WITH (publish_via_partition_root)")
    pipeline.settings = pipeline.settings.model_copy(update={"publication": "theirs"})
    pipeline.sync()
    source.sql("UPDATE t SET id = id + 100 WHERE id = 3; UPDATE t SET open = NOT open WHERE id < 3")
    pipeline.sync()
    before = pipeline.ledger.publish()
    source.sql("DELETE FROM t WHERE id = 5; INSERT INTO t VALUES (5, true, repeat('w', 3000)); UPDATE t SET id = 105 WHERE id = 5")
    source.sql("UPDATE t SET id = 5, open = false WHERE id = 103")
    run(source, f"{NINE}; {FILLED}; DROP TABLE {{t}}_9; UPDATE {{t}} SET v = 'two'", "parts")
    report = pipeline.drain()
    assert set(read_again(pipeline)) == {"t", "parts"}, report.warnings
    pipeline.publish()
    after = pipeline.ledger.publish()
    assert before is not None
    assert after is not None
    assert set(before.tables) == {TableName("public", "t"), TableName("public", "parts")}
    assert set(after.tables) == set()
    converge(pipeline)
    pipeline.assert_current("public.parts")
    source.sql("CREATE TABLE expected AS SELECT * FROM t WHERE id < 100")
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = publish.tables[TableName("public", "t")]
    assert_equal(source, "public.expected", pointer.path, pointer.version)


def test_a_table_that_goes_while_it_is_read_asks_for_no_snapshot(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE TABLE other (id int PRIMARY KEY)")
    drains.bootstrap(pipeline.settings, progress=Silent())
    killed(pipeline, "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)", "snapshot.after_table")
    state = pipeline.ledger.tables()[TableName("public", "t")]
    pipeline.ledger.record_tables([replace(state, reading="begun", generation=None)])
    source.sql("DROP TABLE t")
    drains.bootstrap(pipeline.settings, progress=Silent())
    assert pipeline.ledger.tables()[TableName("public", "t")].state == "gone"
    pipeline.snapshot()
    assert snapshots.needed(pipeline.settings) == ()

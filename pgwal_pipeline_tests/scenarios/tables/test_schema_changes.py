"""Tables that are altered between two runs and within one, with rows before and after and without: `current` is what the source holds."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.scenarios.tables.altering import converge, generations, run, while_the_stream_is_read
from pgwal_pipeline_tests.support import Source

COLUMNS = "id int PRIMARY KEY, a int, b text, n numeric(8, 2)"
ROWS = "INSERT INTO {t} SELECT i, i * 10, 'b' || i, i / 4.0 FROM generate_series({first}, {last}) i"
MORE = "INSERT INTO {t} (id) VALUES (101), (102); UPDATE {t} SET id = id + 200 WHERE id = 3; DELETE FROM {t} WHERE id = 4"

# What is done to the table called {t}, and whether its rows have to be read again for it.
CHANGES: dict[str, tuple[str, bool]] = {
    "add": ("ALTER TABLE {t} ADD c int", False),
    "add_default": ("ALTER TABLE {t} ADD c text NOT NULL DEFAULT 'x'", True),
    "add_volatile": ("ALTER TABLE {t} ADD c float8 DEFAULT random()", True),
    "add_generated": ("ALTER TABLE {t} ADD c int GENERATED ALWAYS AS (a * 2) STORED", True),
    "drop": ("ALTER TABLE {t} DROP a", False),
    "drop_add_same": ("ALTER TABLE {t} DROP a; ALTER TABLE {t} ADD a int", True),
    "drop_add_type": ("ALTER TABLE {t} DROP a; ALTER TABLE {t} ADD a text DEFAULT 'new'", True),
    "rename": ("ALTER TABLE {t} RENAME a TO z", True),
    "rename_back": ("ALTER TABLE {t} RENAME a TO z; INSERT INTO {t} (id, z) VALUES (60, 6); ALTER TABLE {t} RENAME z TO a", True),
    "rename_case": ('ALTER TABLE {t} RENAME a TO "A"', True),
    "cases": (
        'ALTER TABLE {t} DROP a; ALTER TABLE {t} ADD "A" text; INSERT INTO {t} (id, "A") VALUES (60, \'A\'); '
        "ALTER TABLE {t} DROP \"A\"; ALTER TABLE {t} ADD a text; INSERT INTO {t} (id, a) VALUES (61, 'a')",
        True,
    ),
    "swap": (
        "ALTER TABLE {t} ADD a2 int; UPDATE {t} SET a2 = -id; "
        "ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME a2 TO a; ALTER TABLE {t} RENAME x TO a2",
        True,
    ),
    "widen": ("ALTER TABLE {t} ALTER a TYPE bigint", True),
    "narrow": ("ALTER TABLE {t} ALTER a TYPE smallint", True),
    "to_text": ("ALTER TABLE {t} ALTER a TYPE text", True),
    "scale": ("ALTER TABLE {t} ALTER n TYPE numeric(8, 1)", True),
    "precision": ("ALTER TABLE {t} ALTER n TYPE numeric(12, 2)", True),
    "using": ("ALTER TABLE {t} ALTER a TYPE int USING a + 1", True),
    "key_dropped": ("ALTER TABLE {t} REPLICA IDENTITY FULL; ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", True),
    "key_changed": (
        "ALTER TABLE {t} ALTER b SET DEFAULT 'd'; ALTER TABLE {t} DROP CONSTRAINT {t}_pkey; ALTER TABLE {t} ADD PRIMARY KEY (id, b)",
        True,
    ),
    "identity": ("ALTER TABLE {t} REPLICA IDENTITY FULL", False),
    "made_anew": (
        "DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, b bytea, a date); INSERT INTO {t} VALUES (3, '\\x01', '2020-01-01')",
        True,
    ),
    "vacuum_full": ("VACUUM FULL {t}", True),
    "truncate": ("TRUNCATE {t}; INSERT INTO {t} (id, a) VALUES (1, 1), (3, 3)", False),
    "several": (
        "ALTER TABLE {t} ADD c int DEFAULT 1; UPDATE {t} SET c = 2 WHERE id = 1; ALTER TABLE {t} RENAME c TO d; "
        "ALTER TABLE {t} DROP b; ALTER TABLE {t} ADD b jsonb",
        True,
    ),
}


# One of each kind.
FOLLOWED_ON = (
    "add",
    "drop",
    "drop_add_type",
    "rename",
    "narrow",
    "key_dropped",
    "key_changed",
    "identity",
    "made_anew",
    "truncate",
    "several",
)


# Those of them that no other test makes.
SOME = ("drop_add_type", "narrow", "key_dropped", "key_changed", "identity")


def fill(source: Source, table: str, first: int, last: int) -> None:
    source.sql(ROWS.format(t=table, first=first, last=last))


def altered_tables(source: Source, changes: Iterable[str], kinds: Mapping[str, tuple[bool, bool]]) -> dict[str, tuple[str, bool, bool]]:
    """A table for each change and each kind of rows about it (before it, after it)."""
    tables = {f"{change}_{kind}": (change, *when) for change in changes for kind, when in kinds.items()}
    for table in tables:
        source.sql(f"CREATE TABLE {table} ({COLUMNS})")
        fill(source, table, 1, 6)
    return tables


def alter(source: Source, tables: Mapping[str, tuple[str, bool, bool]]) -> None:
    for table, (change, rows_before, rows_after) in tables.items():
        if rows_before:
            run(source, "UPDATE {t} SET a = a + 1 WHERE id <= 2; INSERT INTO {t} VALUES (50, 5, 'fifty', 5)", table)
        run(source, CHANGES[change][0], table)
        if rows_after:
            run(source, MORE, table)


@pytest.mark.parametrize(
    "kinds",
    [
        {"both": (True, True), "neither": (False, False)},
        pytest.param({"before": (True, False), "after": (False, True)}, marks=pytest.mark.soak),
    ],
    ids=["both_neither", "before_after"],
)
def test_only_what_the_stream_does_not_tell_is_read_again(
    kinds: Mapping[str, tuple[bool, bool]], source: Source, make_pipeline: Callable[..., Pipeline]
) -> None:
    pipeline = make_pipeline()
    tables = altered_tables(source, CHANGES, kinds)
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    alter(source, tables)
    for _ in range(2):
        pipeline.drain()
        states = {state.table.name: state for state in pipeline.ledger.tables().values()}
        assert {name: states[name].reason for name in tables if (states[name].state == "pending") != CHANGES[tables[name][0]][1]} == {}
    pipeline.snapshot()
    pipeline.drain()
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}


@pytest.mark.long
@pytest.mark.parametrize("changes", [SOME, pytest.param(tuple(CHANGES), marks=pytest.mark.soak)], ids=["some", "all"])
def test_altered_between_runs(changes: tuple[str, ...], source: Source, pipeline: Pipeline) -> None:
    tables = altered_tables(source, changes, {"both": (True, True)})
    pipeline.sync()
    before = generations(pipeline)
    alter(source, tables)
    converge(pipeline)
    pipeline.assert_current(*(f"public.{table}" for table in tables))
    after = generations(pipeline)
    assert {table for table in tables if before[table] != after[table]} == {table for table in tables if CHANGES[tables[table][0]][1]}
    for change in (change for change in FOLLOWED_ON if change in changes):
        run(source, "UPDATE {t} SET id = id + 1000 WHERE id = 1; DELETE FROM {t} WHERE id = 3", f"{change}_both")
    converge(pipeline)
    pipeline.assert_current(*(f"public.{table}" for table in tables))
    assert generations(pipeline) == after


def test_altered_while_the_stream_is_read(source: Source, make_pipeline: MakePipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the start of a drain shows tables that are altered before the drain has chosen its end."""
    names = ("add", "add_default", "drop", "rename", "using", "several")
    changes = {f"t_{name}": CHANGES[name][0] for name in names}
    for table in changes:
        source.sql(f"CREATE TABLE {table} ({COLUMNS})")
        fill(source, table, 1, 6)
    pipeline = make_pipeline()
    pipeline.spark = lambda: spark
    pipeline.sync()

    def alter_them() -> None:
        for table, change in changes.items():
            run(source, f"UPDATE {{t}} SET a = 7 WHERE id = 5; {change}; {MORE}", table)

    while_the_stream_is_read(pipeline, monkeypatch, alter_them)
    pipeline.publish()
    publish = pipeline.ledger.publish()
    assert publish is not None
    # That a column is gone shows at the next look.
    pipeline.assert_current(*(str(table) for table in publish.tables if table.name != "t_drop"))
    assert TableName("public", "t_add_default") not in publish.tables
    converge(pipeline)
    pipeline.assert_current(*(f"public.{table}" for table in changes))


def test_events_of_what_the_table_was_before_bring_no_row_back(source: Source, pipeline: Pipeline) -> None:
    """Other transactions are open all the time, so that the events from before are folded together with the rows read afterwards."""
    source.sql("CREATE TABLE other (id int PRIMARY KEY); CREATE TABLE retyped (id int PRIMARY KEY, v int)")
    source.sql("CREATE TABLE anew (id int PRIMARY KEY, v int); INSERT INTO retyped SELECT i, i FROM generate_series(1, 5) i")
    source.sql("INSERT INTO anew SELECT i, i FROM generate_series(1, 5) i")
    pipeline.sync()
    first = source.connect(autocommit=False)
    first.execute("INSERT INTO other VALUES (1)")
    source.sql("DELETE FROM retyped WHERE id = 3; INSERT INTO retyped VALUES (51, 51)")
    source.sql("ALTER TABLE retyped ALTER id TYPE numeric(8, 2)")
    converge(pipeline)
    pipeline.assert_current("public.retyped")
    source.sql("INSERT INTO anew VALUES (60, 60); DROP TABLE anew; CREATE TABLE anew (id int PRIMARY KEY, v int)")
    source.sql("INSERT INTO anew VALUES (1, 100)")
    drains.bootstrap(pipeline.settings, progress=Silent())
    second = source.connect(autocommit=False)
    second.execute("INSERT INTO other VALUES (2)")
    first.commit()
    source.sql("INSERT INTO anew VALUES (2, 200)")
    converge(pipeline)
    second.commit()
    pipeline.assert_current("public.retyped", "public.anew")


def test_texts_of_columns_that_were_dropped(source: Source, pipeline: Pipeline) -> None:
    """A row that is the same but for the text of a column that is gone is the same row."""
    columns = {"bag": "v int, d date, e date", "keyed": "v int PRIMARY KEY, d date, e date"}
    for table, declared in columns.items():
        source.sql(f"CREATE TABLE {table} ({declared}); ALTER TABLE {table} REPLICA IDENTITY FULL")
        source.sql(f"INSERT INTO {table} VALUES (1, 'infinity', '-infinity'), (2, 'infinity', 'infinity'), (3, NULL, NULL)")
    pipeline.sync()
    for table in columns:
        source.sql(f"ALTER TABLE {table} DROP d")
        source.sql(f"DELETE FROM {table} WHERE v = 1; INSERT INTO {table} VALUES (4, 'infinity')")
    pipeline.sync()
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}
    compared = verify(pipeline.settings, pipeline.spark, progress=Silent())
    assert {str(table): (found.rows, found.equal) for table, found in compared.tables.items()} == {
        "public.bag": (3, True),
        "public.keyed": (3, True),
    }

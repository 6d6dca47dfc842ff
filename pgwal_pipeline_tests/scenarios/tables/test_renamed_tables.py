"""Tables that get another name: each is the same table as before, under its new name, where it stood in the lake, and not read again."""

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.lake.locations import Locations
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline import status as statuses
from pgwal_pipeline.pipeline import table_chunks
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.tables.altering import converge, run
from pgwal_pipeline_tests.support import Source

BEFORE = "INSERT INTO {t} VALUES (10, 'before'); UPDATE {t} SET v = 'changed' WHERE id = 1; DELETE FROM {t} WHERE id = 2"
AFTER = "INSERT INTO {t} VALUES (20, 'after'); UPDATE {t} SET id = id + 100 WHERE id = 3; DELETE FROM {t} WHERE id = 4"
MADE = (
    "CREATE TABLE {t} (id int PRIMARY KEY, v text, large text); ALTER TABLE {t} ALTER large SET STORAGE EXTERNAL;"
    " INSERT INTO {t} SELECT i, 'old' || i, repeat('large' || i, 1000) FROM generate_series(1, 6) i"
)

# What is done to a table of this name, and what its name is then.
MOVES: dict[str, tuple[str, str]] = {
    "public.taken": (
        "ALTER TABLE public.taken RENAME TO taken_old; CREATE TABLE public.taken (v bytea, id bigint PRIMARY KEY);"
        " INSERT INTO public.taken VALUES ('\\x01', 3), ('\\x02', 7)",
        "public.taken_old",
    ),
    "public.moved": ("ALTER TABLE public.moved SET SCHEMA elsewhere", "elsewhere.moved"),
    "public.often": (
        "ALTER TABLE public.often RENAME TO often_2; INSERT INTO public.often_2 VALUES (50, 'between');"
        " ALTER TABLE public.often_2 RENAME TO often_3; UPDATE public.often_3 SET v = 'between' WHERE id = 5",
        "public.often_3",
    ),
    "public.one": (
        "BEGIN; ALTER TABLE public.one RENAME TO tmp; ALTER TABLE public.other RENAME TO one; ALTER TABLE tmp RENAME TO other; COMMIT",
        "public.other",
    ),
    "public.back": (
        "ALTER TABLE public.back RENAME TO away; INSERT INTO public.away VALUES (60, 'away'); ALTER TABLE public.away RENAME TO back",
        "public.back",
    ),
    "public.lent": (
        "ALTER TABLE public.lent RENAME TO kept; CREATE TABLE public.lent (id int PRIMARY KEY, v text, large text);"
        " INSERT INTO public.lent VALUES (1, 'another table''s'), (70, 'another''s'); DROP TABLE public.lent;"
        " ALTER TABLE public.kept RENAME TO lent",
        "public.lent",
    ),
    "public.grown": (
        "ALTER TABLE public.grown RENAME TO taller; ALTER TABLE public.taller ADD more int; UPDATE public.taller SET more = 7 WHERE id = 5",
        "public.taller",
    ),
}


@pytest.mark.timeout(900)
def test_renamed_tables(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE SCHEMA elsewhere")
    for table in (*MOVES, "public.other", "public.dropped"):
        run(source, MADE, table)
    source.sql("UPDATE public.other SET v = 'other', id = -id")
    pipeline.sync()
    before = {str(table): state for table, state in pipeline.ledger.tables().items()}
    for table, (change, name) in MOVES.items():
        run(source, BEFORE, table)
        for statement in change.split("; ") if not change.startswith("BEGIN") else [change]:
            source.sql(statement)
        run(source, AFTER, name)
    # Its name goes to a table that is there already.
    source.sql("DROP TABLE public.dropped; ALTER TABLE public.taller RENAME TO dropped")
    names = {table: "public.dropped" if name == "public.taller" else name for table, (_, name) in MOVES.items()}
    names["public.other"] = "public.one"
    report = pipeline.drain()
    _assert_same_tables(pipeline, before, names)
    assert any("public.taken_old: it was renamed from public.taken" in warning for warning in report.warnings)
    assert [str(table) for table in snapshots.needed(pipeline.settings)] == ["public.taken"]
    converge(pipeline)
    pipeline.assert_current(*names.values())
    # They are followed under their new names, and the old ones are free: tables that take them stand elsewhere in the lake.
    for table in ("public.taken", "elsewhere.moved", "public.often_3", "public.one"):
        run(source, "UPDATE {t} SET id = id + 1000 WHERE id > 5; DELETE FROM {t} WHERE id < 4", table)
    run(source, "CREATE TABLE {t} (w int, k text PRIMARY KEY); INSERT INTO {t} VALUES (1, 'new')", "public.often")
    run(source, "UPDATE {t} SET v = 'last'; ALTER TABLE {t} RENAME TO last", "public.taken_old")
    names["public.taken"] = "public.last"
    converge(pipeline)
    _assert_same_tables(pipeline, before, names)
    pipeline.assert_current(*names.values(), "public.taken", "public.often")
    shown = statuses.status(pipeline.settings)["tables"]
    assert set(shown) == {*names.values(), "public.taken", "public.often"}
    for which in ("raw_path", "current_path"):
        assert len({table[which] for table in shown.values()}) == len(shown)
    for table in shown.values():
        position = ["_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op"]
        assert pl.scan_delta(table["raw_path"]).select(position).collect().is_duplicated().sum() == 0


def test_renamed_while_it_is_read_and_while_the_stream_is(
    source: Source, make_pipeline: Callable[..., Pipeline], spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in ("public.a", "public.b"):
        run(source, MADE, table)
    pipeline = make_pipeline()
    pipeline.spark = lambda: spark
    pipeline.sync()
    first = {state.oid: state for state in pipeline.ledger.tables().values()}
    attach = drains.attach

    def renamed_behind_its_back(*args: Any, **named: Any) -> Any:
        found = attach(*args, **named)
        source.sql("ALTER TABLE public.a RENAME TO far")
        run(source, AFTER, "public.far")
        return found

    run(source, BEFORE, "public.a")
    monkeypatch.setattr(drains, "attach", renamed_behind_its_back)
    pipeline.drain()
    monkeypatch.setattr(drains, "attach", attach)
    pipeline.publish()
    pipeline.assert_current("public.far", "public.b")
    # A table that is read again while a drain beside meets its new name is read from the start.
    begun = table_chunks.begun

    def renamed_as_it_begins(*args: Any) -> TableState:
        if source.value("SELECT to_regclass('public.b') IS NOT NULL"):
            source.sql("ALTER TABLE public.b RENAME TO c")
            pipeline.drain()
        return begun(*args)

    monkeypatch.setattr(table_chunks, "begun", renamed_as_it_begins)
    snapshots.snapshot(pipeline.settings, [TableName("public", "b")], progress=Silent())
    assert TableName("public", "b") not in pipeline.ledger.tables()
    converge(pipeline)
    pipeline.assert_current("public.far", "public.c")
    states = pipeline.ledger.tables()
    assert {state.oid: state.location for state in states.values()} == {oid: state.location for oid, state in first.items()}
    assert states[TableName("public", "far")].generation == first[states[TableName("public", "far")].oid].generation


def test_where_the_changes_of_tables_belong_that_the_ledger_does_not_know() -> None:
    def state(name: str, oid: int, place: str | None = None, **more: Any) -> TableState:
        return TableState(TableName("s", name), oid, more.pop("state", "ready"), kept_as=TableName("s", place or name), **more)

    states = [
        state("read", 1, generation="g"),
        state("renamed", 2, "was", generation="g"),
        state("joined", 3, state="pending", earlier=(30, 31)),
        state("left", 4, state="gone", generation="g"),
        state("moved", 5, "moved_5", state="pending"),
    ]
    places = Locations.of({state.table: state for state in states})

    def place(oid: int, name: str) -> str:
        return places.find(Relation(oid, TableName("s", name), "d", ()))[0].name

    # Known by their oids, whatever they are called.
    assert [place(1, "read"), place(2, "renamed"), place(2, "was"), place(5, "x")] == ["read", "was", "was", "moved_5"]
    # Those that had a name, and with it a place, before the table that has it now.
    assert [place(30, "joined"), place(31, "x")] == ["joined", "joined"]
    # What would be mixed up with another table's, but where that has gone.
    assert [place(9, name) for name in ("read", "was", "joined", "moved", "moved_5")] == [
        "read_9",
        "was_9",
        "joined_9",
        "moved_9",
        "moved_5_9",
    ]
    assert [place(9, "left"), place(9, "new")] == ["left", "new"]


def _assert_same_tables(pipeline: Pipeline, before: dict[str, TableState], names: dict[str, str]) -> None:
    """Each table stands under its present name and where it stood, with the rows that it was read with."""
    states = {str(table): state for table, state in pipeline.ledger.tables().items()}
    for earlier, name in names.items():
        was, now = before[earlier], states[name]
        assert (now.oid, now.location, now.state, now.generation) == (was.oid, was.location, "ready", was.generation), name
    assert not {"public.moved", "public.often_2", "public.grown", "public.taller", "public.away", "public.kept"} & states.keys()

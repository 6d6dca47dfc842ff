"""Tables that get another name: the new name is read as a new table, the old one is `gone` and its `current` stays as it was."""

from collections.abc import Callable
from typing import Any

import pytest

from pgwal_pipeline.lake.ledger import Publish
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.progress import Silent
from pgwal_pipeline_tests.oracle import lake_rows
from pgwal_pipeline_tests.pipeline.conftest import Pipeline
from pgwal_pipeline_tests.pipeline.test_schema_changes import converge, run
from pgwal_pipeline_tests.support import Source

BEFORE = "INSERT INTO {t} VALUES (10, 'before'); UPDATE {t} SET v = 'changed' WHERE id = 1; DELETE FROM {t} WHERE id = 2"
AFTER = "INSERT INTO {t} VALUES (20, 'after'); UPDATE {t} SET id = id + 100 WHERE id = 3; DELETE FROM {t} WHERE id = 4"
MADE = "CREATE TABLE {t} (id int PRIMARY KEY, v text); INSERT INTO {t} SELECT i, 'old' || i FROM generate_series(1, 6) i"

# What is done, and under which names there are rows afterwards, or none any more.
MOVES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "public.taken": (
        "ALTER TABLE public.taken RENAME TO taken_old; CREATE TABLE public.taken (v bytea, id bigint PRIMARY KEY);"
        " INSERT INTO public.taken VALUES ('\\x01', 3), ('\\x02', 7)",
        ("public.taken", "public.taken_old"),
        (),
    ),
    "public.moved": ("ALTER TABLE public.moved SET SCHEMA elsewhere", ("elsewhere.moved",), ("public.moved",)),
    "public.often": (
        "ALTER TABLE public.often RENAME TO often_2; INSERT INTO public.often_2 VALUES (50, 'between');"
        " ALTER TABLE public.often_2 RENAME TO often_3; UPDATE public.often_3 SET v = 'between' WHERE id = 5",
        ("public.often_3",),
        ("public.often",),
    ),
    "public.one": (
        "BEGIN; ALTER TABLE public.one RENAME TO tmp; ALTER TABLE public.other RENAME TO one; ALTER TABLE tmp RENAME TO other; COMMIT",
        ("public.one", "public.other"),
        (),
    ),
    "public.back": ("ALTER TABLE public.back RENAME TO away; INSERT INTO public.away VALUES (60, 'away');"
                    " ALTER TABLE public.away RENAME TO back", ("public.back",), ()),
}  # fmt: skip


@pytest.mark.timeout(900)
def test_renamed_tables(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE SCHEMA elsewhere")
    for table in (*MOVES, "public.other"):
        run(source, MADE, table)
    source.sql("UPDATE public.other SET v = 'other', id = -id")
    pipeline.sync()
    before = {str(table): pointer for table, pointer in _publish(pipeline).tables.items()}
    for table, (change, there, _) in MOVES.items():
        run(source, BEFORE, table)
        for statement in change.split("; ") if not change.startswith("BEGIN") else [change]:
            source.sql(statement)
        for name in there if table != "public.taken" else ["public.taken_old"]:
            run(source, AFTER, name)
    stood = {table: lake_rows(before[table].path, before[table].version) for table in MOVES}
    pipeline.drain()  # the drain that meets the change goes through, and whatever is published before the next read is not wrong
    pipeline.publish()
    converge(pipeline)
    there = [name for _, names, _ in MOVES.values() for name in names]
    gone = [name for _, _, names in MOVES.values() for name in names]
    pipeline.assert_current(*there)
    _assert_gone(pipeline, gone, lambda name: stood[name] == lake_rows(before[name].path))
    # They are followed under their new names, and the old ones are free.
    for name in ("public.taken", "elsewhere.moved", "public.often_3"):
        run(source, "UPDATE {t} SET id = id + 1000 WHERE id > 5; DELETE FROM {t} WHERE id < 4", name)
    run(source, "CREATE TABLE {t} (w int, k text PRIMARY KEY); INSERT INTO {t} VALUES (1, 'new')", "public.often")
    converge(pipeline)
    pipeline.assert_current(*there, "public.often")
    _assert_gone(pipeline, ["public.moved"], lambda name: stood[name] == lake_rows(before[name].path))


def test_renamed_while_the_stream_is_read(source: Source, make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written to it under the other name is in no raw of its own, so a table that gets its name back is read again."""
    run(source, MADE, "public.away")
    pipeline = make_pipeline()
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    attach = drains.attach

    def renamed_behind_its_back(*args: Any, **named: Any) -> Any:
        found = attach(*args, **named)
        run(source, "ALTER TABLE public.away RENAME TO far; INSERT INTO {t} VALUES (70, 'far')", "public.far")
        return found

    monkeypatch.setattr(drains, "attach", renamed_behind_its_back)
    pipeline.drain()
    monkeypatch.setattr(drains, "attach", attach)
    assert [(state.table.name, state.state) for state in pipeline.ledger.tables().values()] == [("away", "gone")]
    source.sql("ALTER TABLE public.far RENAME TO away")
    pipeline.drain()
    assert [(state.table.name, state.state) for state in pipeline.ledger.tables().values()] == [("away", "pending")]


def _publish(pipeline: Pipeline) -> Publish:
    publish = pipeline.ledger.publish()
    assert publish is not None
    return publish


def _assert_gone(pipeline: Pipeline, names: list[str], stands: Callable[[str], bool]) -> None:
    states = {str(table): state.state for table, state in pipeline.ledger.tables().items()}
    published = {str(table) for table in _publish(pipeline).tables}
    for name in names:
        assert states[name] == "gone", name
        assert name not in published
        assert stands(name), f"the current of {name} is not as it was"

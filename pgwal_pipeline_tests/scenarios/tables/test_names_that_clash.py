"""Tables that cannot be followed because of their columns' names: changes to them cost nobody anything."""

import pytest

from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

_CLASHING = {
    "c0": '"A" int PRIMARY KEY, a text',
    "c1": "id int PRIMARY KEY, _pgwal_text text",
    "c2": "id int PRIMARY KEY, _pgwal_commit_lsn text",
    "c3": "id int PRIMARY KEY, _pgwal_op text, _pgwal_window text",
    "c4": "id int PRIMARY KEY, __delta_internal_is_row_deleted text",
    "c5": "id int PRIMARY KEY, _tmp_metadata_row_index text",
    "c6": "id int PRIMARY KEY, _row_id_ text, _file_name_ text, _target_row_present_ text, _condition_ text",
}
# Names that other tools keep for themselves, but that a table may have.
_ALLOWED = {
    "_metadata": "id int PRIMARY KEY, _metadata text, _change_type text, _commit_version int, _commit_timestamp timestamp",
    "_delta_log": "id int PRIMARY KEY, _delta_log text, path text, seq int, partition text",
    "_pgwal": "id int PRIMARY KEY, __index_level_0__ int, t text, s text, n int",
    "select": 'id int PRIMARY KEY, "${x}" text, "`" text, "a.b" text, " " text',
}


def changed(source: Source, number: int) -> None:
    """A row more in each table, and every row written once more."""
    for table, columns in (_CLASHING | _ALLOWED).items():
        key = '"A"' if table == "c0" else "id"
        source.sql(f'INSERT INTO "{table}" ({key}) VALUES ({number})')
        source.sql(f'UPDATE "{table}" SET {key} = {key}')
        assert columns
    source.sql(f"INSERT INTO sound VALUES ({number})")


def test_changes_to_tables_with_names_that_clash(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE sound (id int PRIMARY KEY)")
    for table, columns in (_CLASHING | _ALLOWED).items():
        source.sql(f'CREATE TABLE "{table}" ({columns})')
    for number in range(1, 4):
        changed(source, number)
        report = pipeline.sync()
        assert set(report.errors) == {f"public.{table}" for table in _CLASHING}
        pipeline.assert_current("public.sound", "public._metadata", "public._delta_log", "public._pgwal")
    states = pipeline.ledger.tables()
    assert {states[TableName("public", table)].state for table in _CLASHING} == {"error"}
    assert states[TableName("public", "select")].state == "ready"
    # One column after another gets a name that can stand: the next run takes each table in.
    source.sql('ALTER TABLE c0 RENAME COLUMN "A" TO b')
    source.sql("ALTER TABLE c1 RENAME COLUMN _pgwal_text TO text")
    source.sql("ALTER TABLE c2 DROP COLUMN _pgwal_commit_lsn")
    source.sql("ALTER TABLE c4 RENAME COLUMN __delta_internal_is_row_deleted TO deleted")
    source.sql("INSERT INTO c1 VALUES (100, 'after')")
    report = pipeline.sync()
    assert set(report.errors) == {"public.c3", "public.c5", "public.c6"}
    pipeline.assert_current("public.c0", "public.c1", "public.c2", "public.c4", "public.sound")


@pytest.mark.parametrize(
    ("column", "when"),
    [
        ("_pgwal_op", "between runs"),
        ('"V"', "between two changes"),
        pytest.param("_pgwal_op", "between two changes", marks=pytest.mark.soak),
        pytest.param("_pgwal_text", "between runs", marks=pytest.mark.soak),
        pytest.param('"V"', "between runs", marks=pytest.mark.soak),
    ],
)
def test_a_name_that_clashes_comes_late(column: str, when: str, source: Source, pipeline: Pipeline) -> None:
    """The table has been published; the column is added, and changes follow, in one window with changes from before or not."""
    for table in ("a", "b", "c"):
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text); INSERT INTO {table} VALUES (1, 'x')")
    pipeline.sync()

    def changes(number: int) -> None:
        for table in ("a", "b", "c"):
            source.sql(f"INSERT INTO {table} (id) VALUES ({number})")

    if when == "between two changes":
        changes(2)
    source.sql(f"ALTER TABLE b ADD COLUMN {column} text")
    for number in (3, 4):
        changes(number)
        report = pipeline.sync()
        assert set(report.errors) == {"public.b"}
        pipeline.assert_current("public.a", "public.c")
    state = pipeline.ledger.tables()[TableName("public", "b")]
    assert (state.state, state.left_out) == ("error", True)
    source.sql(f"ALTER TABLE b RENAME COLUMN {column} TO w")
    changes(5)
    assert not pipeline.sync().errors
    pipeline.assert_current("public.a", "public.b", "public.c")

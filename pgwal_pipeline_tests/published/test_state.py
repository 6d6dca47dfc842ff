"""A published state, read by every reader: it is what the source held, whatever is published or deleted afterwards."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.messages.errors import LakeError, PgwalError
from pgwal_pipeline.published import native
from pgwal_pipeline.published.apply import apply_changes
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.published.state import PublishedState, open_state
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

_TABLE = 'public."Order Lines"'


def _large(state: PublishedState, name: str) -> list[dict[str, Any]]:
    """As DuckDB reads tables that are large."""
    with pytest.MonkeyPatch.context() as sizes:
        sizes.setattr(native, "_LARGE", 0)
        connection = state.duckdb()
    assert "read_parquet" in str(connection.sql("SELECT sql FROM duckdb_views() WHERE NOT internal").fetchall())
    return connection.sql(f"FROM {name}").to_arrow_table().to_pylist()


READERS: dict[str, Callable[[PublishedState, Any, str], list[dict[str, Any]]]] = {
    "spark": lambda state, spark, name: [row.asDict() for row in state.spark(name, spark).collect()],
    "polars": lambda state, spark, name: state.polars(name).collect().to_dicts(),
    "arrow": lambda state, spark, name: state.arrow(name).to_pylist(),
    "pandas": lambda state, spark, name: state.pandas(name).to_dict("records"),
    "duckdb_of_large_tables": lambda state, spark, name: _large(state, name),
    "duckdb": lambda state, spark, name: state.duckdb().sql(f"FROM {name}").to_arrow_table().to_pylist(),
}


@pytest.fixture
def published(pipeline: Pipeline) -> Pipeline:
    """Two tables, of which one has mapped columns, with deleted rows in both; two publishes."""
    source = pipeline.source
    source.sql("CREATE TABLE t (id int PRIMARY KEY, day date, price numeric(10,2), note text)")
    source.sql(f'CREATE TABLE {_TABLE} (id int PRIMARY KEY, "a b,c" text)')
    source.sql("INSERT INTO t SELECT i, '2026-01-01', i, 'n' || i FROM generate_series(1, 200) i")
    source.sql(f"INSERT INTO {_TABLE} SELECT i, 'x' || i FROM generate_series(1, 200) i")
    pipeline.sync()
    source.sql("DELETE FROM t WHERE id % 3 = 0; UPDATE t SET day = 'infinity', price = 'NaN' WHERE id = 1")
    source.sql(f"DELETE FROM {_TABLE} WHERE id % 3 = 0")
    pipeline.drain()
    pipeline.publish()
    return pipeline


def _later(pipeline: Pipeline) -> None:
    pipeline.source.sql(f"UPDATE t SET note = 'later'; DELETE FROM {_TABLE}; CREATE TABLE more (id int PRIMARY KEY)")
    pipeline.sync()


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_has_the_rows_of_then(reader: str, published: Pipeline, spark: Any) -> None:
    state = open_state(published.settings)
    _later(published)
    read = READERS[reader]
    rows = sorted(read(state, spark, "public.t"), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == [number for number in range(1, 201) if number % 3]
    assert rows[1]["note"] == "n2"
    assert str(rows[1]["price"]) == "2.00"
    assert str(rows[1]["day"]).startswith("2026-01-01")
    lines = sorted(read(state, spark, _TABLE), key=lambda row: row["id"])
    assert [(row["id"], row["a b,c"]) for row in lines] == [(number, f"x{number}") for number in range(1, 201) if number % 3]


def test_spark_connect_has_the_rows_of_then_and_what_changed(published: Pipeline, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    state = open_state(published.settings)
    published.source.sql("UPDATE t SET note = 'later' WHERE id = 2; DELETE FROM t WHERE id = 4; INSERT INTO t (id) VALUES (999)")
    published.drain()
    published.publish()
    spark_connect = request.getfixturevalue("spark_connect")  # not before the publish, which takes the other session
    assert state.spark("public.t", spark_connect, text=True).where("note = 'n2' AND _pgwal_text_day IS NULL").count() == 1
    newer, target = open_state(published.settings), str(tmp_path / "target")
    changes = newer.changes("public.t", since=state)
    assert {row["id"]: row["_pgwal_change"] for row in changes.spark(spark_connect).collect()} == {2: "update", 4: "delete", 999: "insert"}
    for found in (state.changes("public.t"), changes):
        apply_changes(spark_connect, target, found)
    assert sorted(TableDataset(target).to_table(["id"])["id"].to_pylist()) == sorted(newer.arrow("public.t", ["id"])["id"].to_pylist())


def test_what_a_column_cannot_hold_is_there_as_text(published: Pipeline, spark: Any) -> None:
    state = open_state(published.settings)
    for rows in (
        state.arrow("public.t", ["id", "day", "price"], text=True).to_pylist(),
        state.polars("public.t", text=True).collect().to_dicts(),
        [row.asDict() for row in state.spark("public.t", spark, text=True).collect()],
    ):
        first, second = sorted(rows, key=lambda row: row["id"])[:2]
        assert (first["day"], first["_pgwal_text_day"], first["_pgwal_text_price"]) == (None, "infinity", "NaN")
        assert (second["_pgwal_text_day"], second["_pgwal_text_price"]) == (None, None)
    assert state.polars(_TABLE, text=True).select("_pgwal_text_a b,c").collect().to_series().is_null().all()


def test_columns_and_rows_that_are_not_asked_for_are_not_read(published: Pipeline) -> None:
    state = open_state(published.settings)
    assert state.arrow("public.t", ["id"]).column_names == ["id"]
    plan = state.polars("public.t").filter(pl.col("id") == 5).select("note").explain()
    assert "SELECTION" in plan
    assert "PROJECT" in plan
    with pytest.raises(LakeError, match=r"no column 'nothing'; it has id, day"):
        state.arrow("public.t", ["nothing"])


def test_what_the_state_says_of_itself(published: Pipeline) -> None:
    state = open_state(published.settings)
    newest = published.ledger.publish()
    assert newest is not None
    assert (state.publish.lsn, state.published_at) == (newest.lsn, newest.published_at)
    assert list(state.tables) == [_TABLE, "public.t"]
    path, version = state.tables["public.t"]
    assert (path, version) == (
        newest.tables[next(name for name in newest.tables if name.name == "t")].path,
        state.tables["public.t"].version,
    )
    assert open_state(published.settings, state.lsn).publish == newest
    first = published.ledger.publishes()[0]
    assert open_state(published.settings, first.published_at.isoformat()).publish == first


def test_a_table_that_is_not_published_says_why_and_since_when(published: Pipeline, source: Source) -> None:
    state = open_state(published.settings)
    with pytest.raises(LakeError, match=r"nowhere is not in the publish at .*: the lake knows no such table. Published are .*public\.t"):
        state.arrow("public.nowhere")
    with pytest.raises(PgwalError, match="is not a table's name"):
        state.arrow("t")
    source.sql("DROP TABLE t; CREATE TABLE beside (id int PRIMARY KEY)")
    before = datetime.now(UTC).isoformat(timespec="seconds")
    published.sync()
    later = open_state(published.settings)
    with pytest.raises(
        LakeError, match=rf"public\.t is not in the publish at {later.lsn}, nor in any since {later.lsn} of 20.*gone"
    ) as told:
        later.polars("public.t")
    assert str(told.value).split(" of ")[1][:25] >= before[:25]
    with pytest.raises(LakeError, match="it was published later"):
        state.arrow("public.beside")

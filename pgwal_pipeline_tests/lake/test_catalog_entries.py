"""Entries in a catalog: of a classic session and by Spark Connect. The tests' Spark keeps its catalog in memory."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake import catalog_entries as entries
from pgwal_pipeline.lake.isolation import isolated
from pgwal_pipeline.lake.standing import content_version
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.catalog_name import CatalogName


@pytest.fixture(params=["spark", "spark_connect"])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    with isolated(request.getfixturevalue(request.param), {}) as own:
        yield own


@pytest.fixture
def name(session: Any) -> Iterator[CatalogName]:
    made = CatalogName("spark_catalog", f"s_{uuid.uuid4().hex[:8]}", "orders")
    entries.ensure_schema(session, made)
    entries.ensure_schema(session, made)
    yield made
    session.sql(f"DROP SCHEMA {made.schema_sql} CASCADE").collect()


def _table(session: Any, path: Path) -> str:
    columns = "1 AS id, 'x' AS `a b,``c`, timestamp_ntz'2026-01-01 00:00:00' AS at"
    session.sql(f"SELECT {columns}").write.format("delta").option("delta.columnMapping.mode", "name").save(str(path))
    return str(path)


def _comments(path: str) -> dict[str, str]:
    table = DeltaTable(path)
    said = {field.name: str(field.metadata.get("comment") or "") for field in table.schema().fields}
    return {name: text for name, text in [*said.items(), ("", table.metadata().description or "")] if text}


def test_an_entry_is_made_moved_and_removed_beside_its_table(session: Any, name: CatalogName, tmp_path: Path) -> None:
    path = _table(session, tmp_path / "o'r ders")
    entries.ensure_entry(session, name, path)
    entries.ensure_entry(session, name, path)
    assert [row["id"] for row in session.sql(f"SELECT * FROM {name.sql}").collect()] == [1]
    assert DeltaTable(path).version() == 0
    other = _table(session, tmp_path / "other")
    entries.remove_entry(session, name, other)  # the name is not that table
    assert session.sql(f"SELECT * FROM {name.sql}").count() == 1
    for _ in range(2):
        entries.remove_entry(session, name, path)
        assert session.sql(f"SHOW TABLES IN {name.schema_sql}").count() == 0
    entries.remove_entry(session, CatalogName(name.catalog, "nowhere", "orders"), path)
    assert session.read.format("delta").load(path).count() == 1


def test_what_has_the_name_already_is_never_touched(session: Any, name: CatalogName, tmp_path: Path) -> None:
    path, theirs = _table(session, tmp_path / "ours"), _table(session, tmp_path / "theirs")
    for table, made in (
        ("seen", f"CREATE VIEW {name.schema_sql}.seen AS SELECT 7 AS x"),
        ("owned", f"CREATE TABLE {name.schema_sql}.owned USING delta AS SELECT 7 AS x"),
        ("parquet", f"CREATE TABLE {name.schema_sql}.parquet USING parquet AS SELECT 7 AS x"),
        ("theirs", f"CREATE TABLE {name.schema_sql}.theirs USING delta LOCATION '{theirs}'"),
    ):
        session.sql(made).collect()
        taken = CatalogName(name.catalog, name.schema, table)
        before = session.sql(f"SELECT * FROM {taken.sql}").collect()
        with pytest.raises(LakeError, match=rf"{taken} is a (view|table at .*) already, and stays"):
            entries.ensure_entry(session, taken, path)
        entries.remove_entry(session, taken, path)
        assert session.sql(f"SELECT * FROM {taken.sql}").collect() == before


def test_an_entry_that_owns_its_files_is_not_dropped(session: Any, name: CatalogName) -> None:
    session.sql(f"CREATE TABLE {name.sql} USING delta AS SELECT 7 AS x").collect()
    described = session.sql(f"DESCRIBE TABLE EXTENDED {name.sql}").collect()
    place = next(row["data_type"] for row in described if row["col_name"] == "Location")
    with pytest.raises(LakeError, match="owns the files of its table"):
        entries.remove_entry(session, name, place.removeprefix("file:"))
    assert session.sql(f"SELECT x FROM {name.sql}").collect()[0]["x"] == 7


def test_comments_are_kept_in_step_in_the_tables_own_log(session: Any, tmp_path: Path) -> None:
    path = _table(session, tmp_path / "t")
    content = content_version(path, 0)
    hostile = "it's \\ a `name`, ${spark.app.name}\nnext \\u0041 line"
    wanted = {None: hostile, "id": "the key", "a b,`c": hostile, "nothing": "there is no such column"}
    entries.set_comments(session, path, wanted)
    assert _comments(path) == {"": hostile, "id": "the key", "a b,`c": hostile}
    version = DeltaTable(path).version()
    entries.set_comments(session, path, wanted)
    assert DeltaTable(path).version() == version
    entries.set_comments(session, path, {"id": "another"})
    assert _comments(path) == {"id": "another"}
    assert content_version(path, DeltaTable(path).version()) == content
    assert session.read.format("delta").load(path).count() == 1
    entries.set_comments(session, str(tmp_path / "nowhere"), wanted)


def test_a_catalog_in_memory_is_refused(spark: Any) -> None:
    with pytest.raises(LakeError, match=r"keeps spark_catalog in memory only; .*PGWAL_SPARK_CONF"), entries.opened(spark, "spark_catalog"):
        pass
    with entries.opened(spark, "another") as session, pytest.raises(LakeError, match=r"Schema another\.x: Spark failed"):
        entries.ensure_schema(session, CatalogName("another", "x", "y"))

"""Row filters: the source sends and shows only the rows that are wanted. They need a publication of ours and Postgres 15."""

from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.scenarios.options.people import TABLE, with_options
from pgwal_pipeline_tests.support import Source

SWISS = {"rows": "country = 'CH' -- and nobody else"}


def make_people(source: Source, identity: str = "FULL") -> None:
    source.sql("CREATE TABLE people (id int PRIMARY KEY, country text, v int)")
    source.sql(f"ALTER TABLE people REPLICA IDENTITY {identity}; INSERT INTO people VALUES (1, 'CH', 0), (2, 'DE', 0), (3, 'CH', 0)")


def ids(pipeline: Pipeline) -> list[int]:
    return sorted(pl.read_delta(pipeline.lake.current(TABLE))["id"].to_list())


def test_only_wanted_rows_arrive_and_those_that_leave_the_filter_leave_current(source: Source, pipeline: Pipeline) -> None:
    make_people(source)
    filtered = with_options(pipeline, SWISS)
    filtered.sync()
    assert ids(filtered) == [1, 3]
    source.sql("INSERT INTO people VALUES (4, 'CH', 0), (5, 'FR', 0); UPDATE people SET country = 'IT' WHERE id = 1")
    source.sql("UPDATE people SET country = 'CH' WHERE id = 2; UPDATE people SET v = 1")
    filtered.sync()
    assert ids(filtered) == [2, 3, 4]
    assert sorted(pl.read_delta(filtered.lake.raw(TABLE))["id"].unique().to_list()) == [1, 2, 3, 4]
    assert verify(filtered.settings, filtered.spark, progress=Silent()).equal
    generation = filtered.ledger.tables()[TABLE].generation
    filtered.sync()
    assert filtered.ledger.tables()[TABLE].generation == generation
    # Another filter, then none: the table is read again.
    other = with_options(pipeline, {"rows": "country <> 'CH'"})
    other.sync()
    assert ids(other) == [1, 5]
    pipeline.sync()
    pipeline.assert_current("public.people")


def test_a_filter_that_would_make_the_sources_own_writes_fail_skips_its_table(source: Source, make_pipeline: MakePipeline) -> None:
    make_people(source, "DEFAULT")
    source.sql("CREATE TABLE plain (id int PRIMARY KEY)")
    filtered = with_options(make_pipeline(), SWISS)
    filtered.drain()
    source.sql("UPDATE people SET v = 2; DELETE FROM people WHERE id = 2; INSERT INTO plain VALUES (1)")
    state = filtered.ledger.tables()[TABLE]
    assert state.state == "skipped"
    assert "ALTER TABLE public.people REPLICA IDENTITY FULL" in (state.reason or "")
    assert source.sql("SELECT tablename FROM pg_publication_tables WHERE pubname = %s", filtered.settings.publication) == [("plain",)]
    source.sql("ALTER TABLE people REPLICA IDENTITY FULL")
    filtered.drain()
    assert filtered.ledger.tables()[TABLE].state == "pending"
    # Taken away again while it is followed: the next run lets the source's writes pass.
    source.sql("ALTER TABLE people REPLICA IDENTITY DEFAULT")
    filtered.drain()
    source.sql("UPDATE people SET v = 3")
    assert filtered.ledger.tables()[TABLE].state == "skipped"


@pytest.mark.parametrize("rows", ["nosuch = 1", "country =", "v", "country = now()::text", "1 = 1) WHERE (1 = 1"])
def test_a_condition_that_the_source_does_not_take(source: Source, make_pipeline: MakePipeline, rows: str) -> None:
    make_people(source)
    filtered = with_options(make_pipeline(), {"rows": rows})
    with pytest.raises(SettingError, match=r"PGWAL_TABLE_OPTIONS has an option rows \(of public.people\)") as caught:
        filtered.drain()
    assert caught.value.exit_code == 2
    assert source.sql("SELECT 1 FROM pg_publication WHERE pubname = %s", filtered.settings.publication) == []


def test_a_publication_that_is_not_ours(source: Source, make_pipeline: MakePipeline) -> None:
    make_people(source)
    filtered = with_options(make_pipeline(), SWISS)
    source.sql(f"CREATE PUBLICATION {filtered.settings.publication} FOR TABLE people")
    with pytest.raises(SettingError, match=r"gives public.people the option rows, but publication .* is not ours"):
        filtered.drain()


def test_a_row_filter_and_excluded_columns_together(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE people (id int PRIMARY KEY, country text, ssn text); INSERT INTO people VALUES (1, 'CH', 'x'), (2, 'DE', 'y')")
    options: dict[str, Any] = {"rows": "id > 1", "exclude": ["ssn"]}
    filtered = with_options(make_pipeline(), options)
    filtered.drain()
    filtered.snapshot()
    source.sql("UPDATE people SET country = 'AT'; INSERT INTO people VALUES (3, 'FR', 'z')")
    filtered.drain()
    raw = pl.read_delta(filtered.lake.raw(TABLE)).select("_pgwal_op", "id", "country").sort("id")
    assert raw.rows() == [("U", 2, "AT"), ("I", 3, "FR")]
    snapshot = pl.read_delta(filtered.lake.snapshot(TABLE))
    assert snapshot["id"].to_list() == [2]
    assert {"ssn"}.isdisjoint(snapshot.columns)

"""Columns that must not arrive as they are: excluded, hashed and masked ones, in stream and snapshot, and when the options change."""

from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.scenarios.options.people import ALL, KEY, TABLE, hashed, make_people, with_options
from pgwal_pipeline_tests.scenarios.options.planted import assert_nowhere
from pgwal_pipeline_tests.support import Source


def current(pipeline: Pipeline) -> pl.DataFrame:
    return pl.read_delta(pipeline.lake.current(TABLE)).sort("id")


def test_stream_and_snapshot_alike(source: Source, pipeline: Pipeline) -> None:
    make_people(source)
    guarded = with_options(pipeline, ALL)
    guarded.sync()
    source.sql("INSERT INTO people SELECT id + 10, name, ssn, email, phone, born, note FROM people")
    source.sql("UPDATE people SET id = 20, phone = 'abcdefg' WHERE id = 12; UPDATE people SET ssn = 'SSN-planted-3' WHERE id = 1")
    guarded.sync()
    found = current(guarded)
    assert "ssn" not in found.columns
    assert found["email"].to_list() == [hashed("planted-1@mail"), None, hashed("planted-1@mail"), None]
    assert found["born"].to_list() == [hashed("1970-01-01"), hashed("-infinity")] * 2
    assert found["phone"].to_list() == ["************1234", "****", "************1234", "***defg"]
    assert found["_pgwal_text"].null_count() == 4
    raw = pl.read_delta(guarded.lake.raw(TABLE))
    assert "ssn" not in raw.columns
    assert raw.filter(pl.col("_pgwal_op") == "I")["email"].to_list() == [hashed("planted-1@mail"), None]
    assert status(guarded.settings)["tables"]["public.people"]["options"] == ALL
    report = verify(guarded.settings, guarded.spark, progress=Silent())
    assert report.equal
    assert report.tables[TABLE].rows == 4
    assert_nowhere(guarded, "planted-", "1970-01-01")


def test_the_source_does_not_even_send_an_excluded_column(source: Source, make_pipeline: MakePipeline) -> None:
    make_people(source)
    source.sql("CREATE TABLE plain (id int PRIMARY KEY, ssn text)")
    guarded = with_options(make_pipeline(), ALL)
    guarded.drain()
    sent = "SELECT tablename, attnames FROM pg_publication_tables WHERE pubname = %s ORDER BY 1"
    names = ["id", "name", "email", "phone", "born", "note"]
    assert source.sql(sent, guarded.settings.publication) == [("people", names), ("plain", ["id", "ssn"])]
    source.sql("ALTER TABLE people ADD COLUMN late text; UPDATE people SET late = 'x' WHERE id = 1")
    guarded.drain()
    assert source.sql(sent, guarded.settings.publication)[0] == ("people", [*names, "late"])
    state = guarded.ledger.tables()[TABLE]
    assert (state.state, state.reason) == (
        "pending",
        "it is read again: it left the publication and came back, or the publication was altered",
    )
    assert guarded.ledger.tables()[TableName("public", "plain")].reason is None
    # The owner drops a listed column: with CASCADE, as Postgres asks for, the table leaves the publication with it.
    source.sql("ALTER TABLE people DROP COLUMN note CASCADE; UPDATE people SET name = 'Cy' WHERE id = 2")
    guarded.drain()
    assert source.sql(sent, guarded.settings.publication)[0] == ("people", [*names[:-1], "late"])


def test_the_sources_own_writes_go_on_with_any_replica_identity(source: Source, pipeline: Pipeline) -> None:
    """A column list that does not cover the replica identity would make them fail: the column is sent then, and dropped here."""
    make_people(source)
    source.sql("ALTER TABLE people REPLICA IDENTITY FULL")
    guarded = with_options(pipeline, ALL)
    guarded.sync()
    source.sql("UPDATE people SET ssn = 'SSN-planted-4', name = 'Cy', email = 'planted-4@mail' WHERE id = 2")
    source.sql(
        "UPDATE people SET id = 3 WHERE id = 1; INSERT INTO people (id, ssn) VALUES (4, 'SSN-planted-5'); DELETE FROM people WHERE id = 4"
    )
    guarded.sync()
    raw = pl.read_delta(guarded.lake.raw(TABLE))
    assert sorted(raw["_pgwal_op"].to_list()) == sorted("UKUID")
    assert raw.filter(pl.col("_pgwal_op") == "K")["email"].to_list() == [hashed("planted-1@mail")]
    assert current(guarded)["email"].to_list() == [hashed("planted-4@mail"), hashed("planted-1@mail")]
    assert_nowhere(guarded, "planted-")


def test_a_table_without_a_key_is_a_bag_of_what_is_left(source: Source, pipeline: Pipeline) -> None:
    source.sql("CREATE TABLE people (name text, ssn text, email text); ALTER TABLE people REPLICA IDENTITY FULL")
    source.sql("INSERT INTO people VALUES ('a', 'planted-1', 'planted-x'), ('a', 'planted-2', 'planted-x'), ('b', 'planted-3', NULL)")
    guarded = with_options(pipeline, {"exclude": ["ssn"], "hash": ["email"]})
    guarded.sync()
    source.sql("DELETE FROM people WHERE ssn = 'planted-2'; INSERT INTO people VALUES ('b', 'planted-4', NULL)")
    guarded.sync()
    rows = pl.read_delta(guarded.lake.current(TABLE)).select("name", "email").sort("name").rows()
    assert rows == [("a", hashed("planted-x")), ("b", None), ("b", None)]
    assert verify(guarded.settings, guarded.spark, progress=Silent()).equal
    assert_nowhere(guarded, "planted-")


def test_a_hashed_key_tells_rows_apart_and_is_nowhere(source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    source.sql("CREATE TABLE people (email text PRIMARY KEY, n int)")
    source.sql("INSERT INTO people SELECT 'planted-' || i, i FROM generate_series(1, 40) i; ANALYZE people")
    made = make_pipeline(snapshot_chunk_rows=10)
    made.spark = lambda: spark
    guarded = with_options(made, {"hash": ["email"]})
    guarded.sync()
    source.sql("UPDATE people SET email = 'planted-new' WHERE n = 1; DELETE FROM people WHERE n = 2; UPDATE people SET n = 30 WHERE n = 3")
    guarded.sync()
    found = dict(pl.read_delta(guarded.lake.current(TABLE)).select("email", "n").rows())
    assert len(found) == 39
    assert (found[hashed("planted-new")], found[hashed("planted-3")]) == (1, 30)
    assert verify(guarded.settings, guarded.spark, progress=Silent()).equal
    assert_nowhere(guarded, "planted-")


def test_options_that_come_later_clean_every_layer_and_options_that_go_read_again(source: Source, pipeline: Pipeline) -> None:
    make_people(source)
    source.sql("CREATE TABLE plain (id int PRIMARY KEY, v text); INSERT INTO plain VALUES (1, 'a')")
    pipeline.sync()
    source.sql("UPDATE people SET note = 'm' WHERE id = 1; INSERT INTO plain VALUES (2, 'b')")
    pipeline.sync()
    before = pipeline.ledger.publish()
    assert before is not None
    assert len(pl.read_delta(pipeline.lake.raw(TABLE))) == 1
    guarded = with_options(pipeline, ALL)
    guarded.drain()
    state = guarded.ledger.tables()[TABLE]
    assert (state.state, state.unclean) == ("pending", ("snapshot", "current", "history"))
    assert "excluded now" in (state.reason or "")
    source.sql("UPDATE people SET name = 'Zoe' WHERE id = 2")
    guarded.sync()
    assert guarded.ledger.tables()[TABLE].unclean == ()
    found = current(guarded)
    assert (found["name"].to_list(), found["email"][0]) == (["Ann", "Zoe"], hashed("planted-1@mail"))
    assert "ssn" not in found.columns
    assert_nowhere(guarded, "planted-")
    plain = guarded.ledger.tables()[TableName("public", "plain")]
    assert plain.generation == pipeline.ledger.tables()[TableName("public", "plain")].generation
    guarded.assert_current("public.plain")
    source.sql("UPDATE people SET name = 'Zed' WHERE id = 2")
    guarded.sync()
    assert current(guarded)["name"].to_list() == ["Ann", "Zed"]
    # Taken away: everything arrives again, older rows too.
    pipeline.sync()
    assert verify(pipeline.settings, pipeline.spark, progress=Silent()).equal
    assert current(pipeline)["ssn"].null_count() == 0
    pipeline.assert_current("public.plain")
    source.sql("UPDATE people SET ssn = 'new' WHERE id = 1; UPDATE people SET born = '2001-02-03' WHERE id = 2")
    pipeline.sync()
    pipeline.assert_current("public.people", "public.plain")


def test_another_key_is_refused_until_the_tables_are_read_again(source: Source, pipeline: Pipeline) -> None:
    make_people(source)
    guarded = with_options(pipeline, {"hash": ["email"]})
    guarded.sync()
    source.sql("INSERT INTO people (id, email) VALUES (3, 'planted-1@mail')")
    other = with_options(pipeline, {"hash": ["email"]}, "a second secret")
    with pytest.raises(SettingError, match=r"PGWAL_HASH_KEY is not the key .*pgwal resnapshot 'public.people'") as caught:
        other.drain()
    assert caught.value.exit_code == 2
    guarded.sync()
    assert current(guarded)["email"].to_list() == [hashed("planted-1@mail"), None, hashed("planted-1@mail")]
    other.resnapshot("public.people")
    other.sync()
    assert current(other)["email"].to_list() == [
        hashed("planted-1@mail", "a second secret"),
        None,
        hashed("planted-1@mail", "a second secret"),
    ]
    with pytest.raises(SettingError):
        guarded.drain()
    assert_nowhere(other, KEY, "a second secret", "planted-1@mail", hashed("planted-1@mail"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exclude": ["id"]}, "table public.people cannot have its column 'id' excluded, as it is part of the key"),
        ({"mask": {"i*": "last4"}}, "table public.people cannot have its column 'id' masked, as it is part of the key"),
    ],
)
def test_a_key_column_cannot_be_left_out(source: Source, make_pipeline: MakePipeline, options: dict[str, Any], says: str) -> None:
    make_people(source)
    guarded = with_options(make_pipeline(), options)
    with pytest.raises(SettingError, match=says) as caught:
        guarded.drain()
    assert caught.value.exit_code == 2
    assert source.sql("SELECT 1 FROM pg_publication WHERE pubname = %s", guarded.settings.publication) == []


def test_a_column_that_becomes_part_of_the_key_costs_its_table_alone(source: Source, make_pipeline: MakePipeline) -> None:
    make_people(source)
    source.sql("CREATE TABLE plain (id int PRIMARY KEY)")
    guarded = with_options(make_pipeline(), {"exclude": ["ssn"]})
    guarded.drain()
    source.sql("ALTER TABLE people DROP CONSTRAINT people_pkey, ADD PRIMARY KEY (ssn); INSERT INTO plain VALUES (1)")
    guarded.drain()
    source.sql("UPDATE people SET name = 'x'")
    for _ in range(2):
        state = guarded.ledger.tables()[TABLE]
        assert (state.state, "part of the key" in (state.reason or "")) == ("skipped", True)
        guarded.drain()
    assert pl.read_delta(guarded.lake.raw(TableName("public", "plain")))["id"].to_list() == [1]
    source.sql("ALTER TABLE people DROP CONSTRAINT people_pkey, ADD PRIMARY KEY (id)")
    guarded.drain()
    assert guarded.ledger.tables()[TABLE].state == "pending"


def test_the_bounds_of_chunks_go_when_the_key_comes_to_be_hashed(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE people (email text PRIMARY KEY, n int)")
    source.sql("INSERT INTO people SELECT 'planted-' || i, i FROM generate_series(1, 40) i; ANALYZE people")
    plain = make_pipeline(snapshot_chunk_rows=10)
    plain.drain()
    plain.snapshot()
    state = plain.ledger.tables()[TABLE]
    assert len(plain.ledger.chunks(TABLE, state.generation or "")) > 2
    guarded = with_options(plain, {"hash": ["email"]})
    guarded.drain()
    guarded.snapshot()
    assert guarded.ledger.tables()[TABLE].unclean == ("current", "history")
    assert len(pl.read_delta(guarded.lake.snapshot(TABLE))) == 40
    assert_nowhere(guarded, "planted-")


def test_a_table_that_comes_back_is_cleaned_of_what_it_had(source: Source, make_pipeline: MakePipeline) -> None:
    """It left the publication before the options, so that nothing says what raw has of it."""
    make_people(source)
    plain = make_pipeline()
    plain.drain()
    source.sql("UPDATE people SET note = 'planted-note'")
    plain.drain()
    without = type(plain.settings).from_environment({}, **{**plain.settings.model_dump(exclude_unset=True), "tables": "other.*"})
    Pipeline(source, without, plain.spark).drain()
    assert plain.ledger.tables()[TABLE].state == "gone"
    guarded = with_options(plain, {"exclude": ["note", "ssn"], "hash": ["email", "phone"]})
    guarded.drain()
    assert guarded.ledger.tables()[TABLE].state == "pending"
    assert_nowhere(guarded, "planted-")


def test_a_name_that_no_column_has_is_a_warning_and_a_change_of_an_excluded_column_is_nothing(
    source: Source, make_pipeline: MakePipeline
) -> None:
    make_people(source)
    source.sql("ALTER TABLE people REPLICA IDENTITY FULL")
    guarded = with_options(make_pipeline(), {"exclude": ["ssn", "snn", "pin"], "hash": ["none*"]})
    assert "Table public.people has no column 'snn', 'pin', which PGWAL_TABLE_OPTIONS names." in guarded.drain().warnings
    guarded.snapshot()
    generation = guarded.ledger.tables()[TABLE].generation
    source.sql("ALTER TABLE people ALTER COLUMN ssn TYPE varchar; ALTER TABLE people ADD COLUMN pin int DEFAULT 5")
    source.sql("UPDATE people SET pin = 7, note = 'seen'")
    guarded.drain()
    state = guarded.ledger.tables()[TABLE]
    assert (state.generation, state.reason) == (generation, None)
    assert pl.read_delta(guarded.lake.raw(TABLE))["note"].to_list() == ["seen", "seen"]

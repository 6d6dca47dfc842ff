"""Planted values of protected columns are in no file that a pipeline leaves, however its work ends."""

import polars as pl
import pytest

from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.postgres.catalog import published_tables
from pgwal_pipeline.postgres.copy import ChunkBounds
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.pipelines import DRAIN, MakePipeline, Pipeline, killed
from pgwal_pipeline_tests.scenarios.options.people import ALL, KEY, TABLE, make_people, with_options
from pgwal_pipeline_tests.scenarios.options.planted import assert_nowhere, assert_nowhere_in
from pgwal_pipeline_tests.support import Source, read_chunk

SNAPSHOT = "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)"


def variables(pipeline: Pipeline) -> dict[str, str]:
    """What a child process needs to protect columns alike."""
    return {"PGWAL_TABLE_OPTIONS": pipeline.settings.table_options.to_json(), "PGWAL_HASH_KEY": KEY}


def change(source: Source) -> None:
    source.sql(
        "INSERT INTO people SELECT i, 'n', 'SSN-planted', 'planted@mail', '+41 planted 77', NULL, 'x' FROM generate_series(100, 900) i"
    )
    source.sql("UPDATE people SET id = id + 10000, email = 'planted-' || id WHERE id > 500; DELETE FROM people WHERE id < 300")


def points(first: str, *others: str) -> pytest.MarkDecorator:
    """Failpoints to be killed at; all but the first are for the soak."""
    return pytest.mark.parametrize("point", [first, *(pytest.param(point, marks=pytest.mark.soak) for point in others)])


@points("drain.after_files", "drain.after_prepared", "raw.between_tables", "drain.before_confirm")
def test_after_drains_that_were_killed(source: Source, make_pipeline: MakePipeline, point: str) -> None:
    make_people(source)
    guarded = with_options(make_pipeline(), ALL)
    guarded.drain()
    change(source)
    killed(guarded, DRAIN, point, **variables(guarded))
    assert_nowhere(guarded, "planted", KEY)
    guarded.drain()
    assert len(pl.read_delta(guarded.lake.raw(TABLE))) > 800
    assert_nowhere(guarded, "planted", KEY)


@points("snapshot.between_read_and_write", "snapshot.before_chunk_record")
def test_after_snapshots_that_were_killed(source: Source, make_pipeline: MakePipeline, point: str) -> None:
    make_people(source)
    change(source)
    guarded = with_options(make_pipeline(snapshot_chunk_rows=100), ALL)
    guarded.drain()
    killed(guarded, SNAPSHOT, point, **variables(guarded))
    assert_nowhere(guarded, "planted", KEY)
    guarded.snapshot()
    assert guarded.ledger.tables()[TABLE].state == "ready"
    assert_nowhere(guarded, "planted", KEY)


@pytest.mark.soak
def test_after_a_catch_up_that_was_killed(source: Source, make_pipeline: MakePipeline) -> None:
    """Its processes get options and key in their environment; what one has read is protected before it is committed."""
    make_people(source)
    guarded = with_options(make_pipeline(catchup_threshold="256kB", catchup_slots=2), ALL)
    guarded.drain()
    for _ in range(6):
        change(source)
        source.sql("DELETE FROM people WHERE id > 90")
    killed(guarded, DRAIN, "catch_up.all_read", PGWAL_CATCHUP_THRESHOLD="256kB", **variables(guarded))
    assert_nowhere(guarded, "planted", KEY)
    guarded.drain()
    assert_nowhere(guarded, "planted", KEY)
    assert len(pl.read_delta(guarded.lake.raw(TABLE))) > 5000


def test_a_catch_up_from_before_the_options_is_read_again(source: Source, make_pipeline: MakePipeline) -> None:
    """What it has read is not committed yet, and is not protected."""
    make_people(source)
    open_ = make_pipeline(catchup_threshold="256kB", catchup_slots=2)
    open_.drain()
    for _ in range(6):
        change(source)
        source.sql("DELETE FROM people WHERE id > 90")
    killed(open_, DRAIN, "catch_up.all_read", PGWAL_CATCHUP_THRESHOLD="256kB")
    with pytest.raises(AssertionError):
        assert_nowhere(open_, "planted")
    guarded = with_options(open_, ALL)
    guarded.drain()
    assert_nowhere(guarded, "planted", KEY)
    assert len(pl.read_delta(guarded.lake.raw(TABLE))) > 5000


def test_a_message_that_cannot_be_decoded_is_kept_without_its_values(source: Source, make_pipeline: MakePipeline) -> None:
    make_people(source)
    guarded = with_options(make_pipeline(), ALL)
    guarded.drain()
    change(source)
    done = guarded.child(DRAIN, environment={**variables(guarded), "PGWAL_FAILPOINTS": "table.decode/public.people=error"})
    assert guarded.ledger.tables()[TABLE].state == "error"
    assert_nowhere(guarded, "planted", KEY, said=done.stdout + done.stderr)


def test_what_the_source_says_of_a_value_is_not_repeated(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql(
        "CREATE FUNCTION shown(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        " $$BEGIN RAISE EXCEPTION 'bad value %', $1 USING DETAIL = $1; END$$"
    )
    make_people(source)
    guarded = with_options(make_pipeline(), ALL)
    guarded.drain()
    (found,) = published_tables(source.connect(), guarded.settings.publication)
    relation = guarded.settings.protection.relation(found.relation)
    with pytest.raises(TableError, match="P0001") as caught:
        read_chunk(source.dsn, relation, ChunkBounds(None, None), lambda *_: None, row_filter="public.shown(email)")
    assert "planted" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.long
def test_after_commands(source: Source, commands: Commands, request: pytest.FixtureRequest) -> None:
    """Lake, Dagster's storage with its logs, and what was said, also by commands that failed."""
    make_people(source)
    options = '{"public.people": {"exclude": ["ssn"], "hash": ["email", "born"], "mask": {"phone": "last4"}}}'
    commands.environment |= {
        "PGWAL_TABLE_OPTIONS": options,
        "PGWAL_HASH_KEY": KEY,
        "PGWAL_SPARK_REMOTE": request.getfixturevalue("connect_address"),
        "TMPDIR": str(commands.folder),
    }
    said = []
    for arguments in (["sync"], ["status"], ["verify", "--json"], ["drain"], ["resnapshot", "public.people"]):
        code, out, err = commands.run(*arguments)
        assert code == 0, err
        said += [out, err]
        change(source)
        source.sql("DELETE FROM people WHERE id > 90")
    for failing in ({"PGWAL_HASH_KEY": "another"}, {"PGWAL_HASH_KEY": ""}, {"PGWAL_TABLE_OPTIONS": options.replace("ssn", "id")}):
        code, out, err = commands.run("sync", **failing)
        assert (code, err.count("\n")) == (2, 1), err
        said += [out, err]
    code, out, err = commands.run("sync", PGWAL_FAILPOINTS="publish.in_merge=error")
    assert code != 0
    said += [out, err]
    assert_nowhere_in(commands.folder, "planted", KEY, said="".join(said))

"""`on_schema_change: stop`: a table waits at its last good state until the new schema is accepted; nothing is lost meanwhile."""

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest

from pgwal_pipeline.lake.maintenance import prune_raw
from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import schema_policy
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.status import publish_due, status
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline, killed
from pgwal_pipeline_tests.scenarios.options.policies import GOODS, SALES, make_tables, rows, with_policy
from pgwal_pipeline_tests.scenarios.tables.altering import while_the_stream_is_read
from pgwal_pipeline_tests.support import Source

PUBLISHED = [(1, "ink", 5, "a"), (2, "pen", 7, "b")]


def test_a_table_waits_until_its_schema_is_accepted(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    stopped = with_policy(pipeline, "stop")
    stopped.sync()
    source.sql("UPDATE goods SET stock = 6 WHERE id = 1")
    stopped.sync()
    source.sql("ALTER TABLE goods ADD color text; ALTER TABLE goods DROP note")
    source.sql("INSERT INTO goods VALUES (3, 'cap', 1, 'red'); UPDATE sales SET n = 2")
    report = stopped.sync()
    # The others go on, and the publish does not name it: its tables are at one LSN.
    assert rows(stopped, SALES) == [(1, 2)]
    publish = stopped.ledger.publish()
    assert publish is not None
    assert GOODS not in publish.tables
    assert rows(stopped) == [(1, "ink", 6, "a"), (2, "pen", 7, "b")]
    assert list(report.errors) == ["public.goods"]
    shown = status(stopped.settings)["tables"]["public.goods"]
    assert shown["state"] == "error"
    assert "column note is gone, column color text is new" in shown["reason"]
    assert "`pgwal accept 'public.goods'`" in shown["reason"]
    assert shown["options"] == {"on_schema_change": "stop"}
    # It goes on waiting, beside changes, and is no work for a publish.
    source.sql("UPDATE goods SET color = 'black' WHERE id = 1; DELETE FROM goods WHERE id = 2")
    stopped.sync()
    assert not publish_due(stopped.ledger)
    assert rows(stopped) == [(1, "ink", 6, "a"), (2, "pen", 7, "b")]
    # Raw has every change, and keeps it.
    raw = pl.read_delta(stopped.lake.raw(GOODS)).filter(pl.col("id") == 3)
    assert raw["color"].to_list() == ["red"]
    assert publish.lsn
    newest = stopped.ledger.publish()
    assert newest is not None
    waiting = {window.key for window in stopped.ledger.windows() if any(write.rows for write in window.tables if "goods" in write.path)}
    pruned = prune_raw(stopped.lake, stopped.ledger, datetime.now(UTC) + timedelta(days=1), newest.lsn)
    assert not waiting & set(pruned.keys)
    assert waiting
    generation = stopped.ledger.tables()[GOODS].generation
    found = schema_policy.accept(stopped.ledger, [GOODS])
    assert schema_policy.summary(found[GOODS][0]) == "column note is gone, column color text is new"
    stopped.sync()
    # By what raw has: it is not read again.
    assert stopped.ledger.tables()[GOODS].generation == generation
    stopped.assert_current("public.goods", "public.sales")
    assert verify(stopped.settings, stopped.spark, progress=Silent()).equal
    # The next change stops it again.
    source.sql("ALTER TABLE goods ADD size int")
    stopped.sync()
    assert stopped.ledger.tables()[GOODS].held is not None


def test_what_costs_a_reading_is_read_once_it_is_accepted(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    stopped = with_policy(pipeline, "stop")
    stopped.sync()
    source.sql(
        "ALTER TABLE goods RENAME name TO label; ALTER TABLE goods ALTER stock TYPE bigint; ALTER TABLE goods ADD size int DEFAULT 1"
    )
    stopped.sync()
    source.sql(
        "ALTER TABLE goods RENAME TO wares; UPDATE wares SET stock = 5000000000 WHERE id = 1; CREATE TABLE more (id int PRIMARY KEY)"
    )
    named = with_policy(stopped, "stop", "public.*")
    named.sync()
    wares = TableName("public", "wares")
    state = named.ledger.tables()[wares]
    assert snapshots.needed(named.settings) == ()
    assert state.held is not None
    assert "`pgwal accept 'public.wares'`" in state.held
    assert rows(named) == PUBLISHED
    assert schema_policy.accept(named.ledger, [wares])[wares][1]
    named.sync()
    named.assert_current("public.wares", "public.more")


@pytest.mark.soak
def test_a_change_that_is_taken_back_lets_the_table_go_on(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    stopped = with_policy(pipeline, "stop")
    stopped.sync()
    source.sql("ALTER TABLE goods ADD color text; INSERT INTO goods VALUES (3, 'cap', 1, 'c', 'red')")
    stopped.sync()
    assert len(rows(stopped)) == 2
    source.sql("ALTER TABLE goods DROP color")
    stopped.sync()
    assert stopped.ledger.tables()[GOODS].held is None
    stopped.assert_current("public.goods")


@pytest.mark.soak
def test_the_option_comes_late_and_goes(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    pipeline.sync()
    source.sql("ALTER TABLE goods ADD color text; INSERT INTO goods VALUES (3, 'cap', 1, 'c', 'red')")
    stopped = with_policy(pipeline, "stop")
    stopped.sync()
    assert rows(stopped) == PUBLISHED
    pipeline.sync()
    assert pipeline.ledger.tables()[GOODS].accepted is None
    pipeline.assert_current("public.goods")


@pytest.mark.parametrize("way", ["snapshot", pytest.param("key", marks=pytest.mark.soak)])
def test_other_ways_to_stop_and_to_go_on(way: str, source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    pipeline.settings = pipeline.settings.model_copy(update={"on_table_error": "resnapshot"})  # which is about errors alone
    stopped = with_policy(pipeline, "stop")
    stopped.sync()
    if way == "key":
        source.sql("ALTER TABLE goods DROP CONSTRAINT goods_pkey, ALTER name SET NOT NULL, ADD PRIMARY KEY (id, name)")
    else:
        source.sql("ALTER TABLE goods ADD color text")
    stopped.sync()
    held = stopped.ledger.tables()[GOODS].held
    assert held is not None
    assert ("the key was (id) and is (id, name)" in held) == (way == "key")
    source.sql("INSERT INTO goods VALUES (3, 'cap')")
    stopped.sync()
    assert rows(stopped) == PUBLISHED
    stopped.resnapshot("public.goods")
    stopped.assert_current("public.goods")
    stopped.sync()
    assert stopped.ledger.tables()[GOODS].held is None


def test_a_kill_at_any_point_of_what_follows(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    stopped = with_policy(pipeline, "stop")
    stopped.sync()
    options = {"PGWAL_TABLE_OPTIONS": '{"public.goods": {"on_schema_change": "stop"}}'}
    source.sql("ALTER TABLE goods ADD color text; INSERT INTO goods VALUES (3, 'cap', 1, 'c', 'red')")
    drain = "from pgwal_pipeline.pipeline.drain import drain\ndrain(settings, progress=progress)"
    for point in ("drain.after_files", "drain.before_complete"):
        killed(stopped, drain, point, **options)
        stopped.publish()
        assert rows(stopped) == PUBLISHED
    stopped.sync()
    assert rows(stopped) == PUBLISHED
    schema_policy.accept(stopped.ledger, [GOODS])
    source.sql("UPDATE sales SET n = 3")
    killed(stopped, drain, "drain.before_complete", **options)
    stopped.sync()
    stopped.assert_current("public.goods", "public.sales")
    ids = pl.read_delta(stopped.lake.raw(GOODS))["id"].to_list()
    assert ids == [3]


def test_only_a_table_that_is_followed_can_be_accepted(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    pipeline.drain()
    with pytest.raises(SourceRefused, match=r"Table public\.nosuch is not followed"):
        schema_policy.accept(pipeline.ledger, [GOODS, TableName("public", "nosuch")])
    assert schema_policy.accept(pipeline.ledger, [GOODS]) == {GOODS: ((), True)}


def test_altered_while_the_stream_is_read(source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look at the catalog is from before: raw has rows with the new columns, and `current` must not."""
    make_tables(source)
    source.sql("CREATE TABLE icy (id int PRIMARY KEY, v int); INSERT INTO icy VALUES (1, 1)")
    rules = {"public.goods": {"on_schema_change": "stop"}, "public.icy": {"on_schema_change": "freeze"}}
    values = {**pipeline.settings.model_dump(exclude_unset=True), "table_options": rules}
    mixed = Pipeline(source, type(pipeline.settings).from_environment({}, **values), pipeline.spark)
    mixed.sync()

    def alter_them() -> None:
        source.sql("UPDATE goods SET stock = 0; ALTER TABLE goods ADD color text; INSERT INTO goods VALUES (3, 'cap', 1, 'c', 'red')")
        source.sql(
            "ALTER TABLE icy ADD w int; INSERT INTO icy VALUES (2, 2, 2); ALTER TABLE icy RENAME v TO u; INSERT INTO icy VALUES (3, 3)"
        )
        source.sql("UPDATE sales SET n = 9")

    while_the_stream_is_read(mixed, monkeypatch, alter_them)
    mixed.publish()
    assert rows(mixed) == PUBLISHED
    assert rows(mixed, SALES) == [(1, 9)]
    mixed.sync()
    icy = TableName("public", "icy")
    assert rows(mixed, icy) == [(1, 1), (2, 2), (3, None)]
    assert rows(mixed) == PUBLISHED
    schema_policy.accept(mixed.ledger, [GOODS, icy])
    mixed.sync()
    mixed.assert_current("public.goods", "public.icy", "public.sales")

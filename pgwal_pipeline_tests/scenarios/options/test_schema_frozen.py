"""`on_schema_change: freeze`: a table keeps the columns that it had, and raw has everything."""

import polars as pl
import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import schema_policy
from pgwal_pipeline.pipeline.status import publish_due, status
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.options.policies import GOODS, columns, make_tables, rows, texts, with_policy
from pgwal_pipeline_tests.support import Source

FOUR = ["id", "name", "stock", "note"]


def test_new_columns_are_not_taken_and_those_that_go_are_null(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    frozen = with_policy(pipeline, "freeze")
    frozen.sync()
    generation = frozen.ledger.tables()[GOODS].generation
    source.sql("ALTER TABLE goods ADD color text DEFAULT 'red'; ALTER TABLE goods DROP note; ALTER TABLE goods RENAME name TO label")
    frozen.sync()
    source.sql("INSERT INTO goods VALUES (3, 'cap', 1, 'blue'); UPDATE goods SET stock = 8 WHERE id = 2")
    report = frozen.sync()
    assert report.errors == {}
    assert columns(frozen) == FOUR
    # A renamed column is one that went and another that came; as ever, a row that is not written again keeps what it had.
    assert rows(frozen) == [(1, "ink", 5, "a"), (2, None, 8, None), (3, None, 1, None)]
    # A default of older rows would cost a reading. What is not taken costs none.
    assert frozen.ledger.tables()[GOODS].generation == generation
    raw = pl.read_delta(frozen.lake.raw(GOODS)).filter(pl.col("id") == 3)
    assert (raw["label"].to_list(), raw["color"].to_list()) == (["cap"], ["blue"])
    shown = status(frozen.settings)["tables"]["public.goods"]
    assert shown["state"] == "ready"
    assert "column color text is new" in shown["reason"]
    assert verify(frozen.settings, frozen.spark, progress=Silent()).equal
    # Read again it keeps its columns, in their order; what the source has no more is null everywhere.
    frozen.resnapshot("public.goods")
    assert columns(frozen) == FOUR
    assert rows(frozen) == [(1, None, 5, None), (2, None, 8, None), (3, None, 1, None)]
    frozen.sync()
    assert columns(frozen) == FOUR
    # A column that takes the name of one that was kept is that column.
    source.sql("ALTER TABLE goods ADD note text DEFAULT 'new'")
    frozen.sync()
    assert [row[3] for row in rows(frozen)] == ["new"] * 3
    assert schema_policy.accept(frozen.ledger, [GOODS])[GOODS][1]
    frozen.sync()
    assert columns(frozen)[:3] == ["id", "label", "stock"]
    assert verify(frozen.settings, frozen.spark, progress=Silent()).equal


def test_a_type_is_kept_and_what_it_cannot_hold_is_text(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    frozen = with_policy(pipeline, "freeze")
    frozen.sync()
    source.sql("ALTER TABLE goods ALTER stock TYPE bigint; INSERT INTO goods VALUES (3, 'cap', 5000000000), (4, 'box', 9)")
    frozen.sync()
    source.sql("UPDATE goods SET stock = 6000000000 WHERE id = 1; UPDATE goods SET stock = 8 WHERE id = 3; DELETE FROM goods WHERE id = 2")
    frozen.sync()
    assert pl.read_delta(frozen.lake.current(GOODS)).schema["stock"] == pl.Int32
    assert rows(frozen) == [(1, "ink", None, "a"), (3, "cap", 8, None), (4, "box", 9, None)]
    assert texts(frozen) == {1: {"stock": "6000000000"}}
    assert verify(frozen.settings, frozen.spark, progress=Silent()).equal
    source.sql(
        "ALTER TABLE goods ALTER stock TYPE text; UPDATE goods SET stock = 'many' WHERE id = 4; UPDATE goods SET stock = '11' WHERE id = 1"
    )
    frozen.sync()
    assert rows(frozen) == [(1, "ink", 11, "a"), (3, "cap", 8, None), (4, "box", None, None)]
    assert texts(frozen) == {4: {"stock": "many"}}
    # What cannot be kept stops the table.
    source.sql("ALTER TABLE goods ALTER stock TYPE text[] USING ARRAY[stock]; UPDATE goods SET name = 'x'")
    report = frozen.sync()
    assert "column stock of type text[] cannot be kept as integer" in report.errors["public.goods"]
    assert rows(frozen)[0] == (1, "ink", 11, "a")
    schema_policy.accept(frozen.ledger, [GOODS])
    frozen.sync()
    frozen.assert_current("public.goods", "public.sales")


def test_a_frozen_table_that_keeps_its_history_and_its_deleted_rows(source: Source, pipeline: Pipeline) -> None:
    """The three options together: the history has what `current` has had, with the columns that it keeps."""
    make_tables(source)
    frozen = with_policy(pipeline, "freeze", deletes="keep", history=True)
    frozen.sync()
    history = pl.read_delta(frozen.lake.history(GOODS)).columns
    source.sql("ALTER TABLE goods ADD color text; ALTER TABLE goods ALTER stock TYPE bigint")
    source.sql("INSERT INTO goods VALUES (3, 'cap', 5000000000, 'c', 'red'); DELETE FROM goods WHERE id = 2")
    frozen.sync()
    assert not publish_due(frozen.ledger)
    source.sql("UPDATE goods SET stock = 8 WHERE id = 3; UPDATE goods SET stock = 6000000000 WHERE id = 1")
    frozen.sync()
    assert status(frozen.settings)["tables"]["public.goods"]["reason"].startswith("its columns are frozen")
    found = pl.read_delta(frozen.lake.history(GOODS))
    assert found.columns == history
    assert found.schema["stock"] == pl.Int32
    newest = found.filter(pl.col("_pgwal_valid_to_lsn").is_null()).sort("id")
    assert newest.select(FOUR).rows() == [(1, "ink", None, "a"), (3, "cap", 8, "c")]
    assert dict(newest["_pgwal_text"][0]) == {"stock": "6000000000"}
    # The table was read again for the type. Raw has every change, so each is a version that was seen.
    assert found.filter(pl.col("id") == 2)["_pgwal_end_op"].to_list() == ["D"]
    assert found.filter(pl.col("id") == 3).sort("_pgwal_valid_from_lsn")["stock"].to_list() == [None, 8]
    assert not found["_pgwal_unseen"].any()
    gone = pl.read_delta(frozen.lake.current(GOODS)).filter(pl.col("_pgwal_deleted_lsn").is_not_null())
    assert gone.select("id", "name").rows() == [(2, "pen")]
    assert verify(frozen.settings, frozen.spark, progress=Silent()).equal
    schema_policy.accept(frozen.ledger, [GOODS])
    frozen.sync()
    accepted = pl.read_delta(frozen.lake.history(GOODS)).filter(pl.col("_pgwal_valid_to_lsn").is_null()).sort("id")
    assert accepted.select("id", "stock", "color").rows() == [(1, 6000000000, None), (3, 8, "red")]


@pytest.mark.soak
def test_frozen_late_stopped_and_free_again(source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    pipeline.sync()
    source.sql("ALTER TABLE goods ADD color text; INSERT INTO goods VALUES (3, 'cap', 1, 'c', 'red'), (4, 'box', 1, 'd', 'blue')")
    frozen = with_policy(pipeline, "freeze")
    frozen.sync()
    assert columns(frozen) == FOUR
    assert len(rows(frozen)) == 4
    # From frozen to stopped: it waits with the columns that it has, and lacks those of the rows that it took meanwhile.
    stopped = with_policy(pipeline, "stop")
    stopped.sync()
    assert stopped.ledger.tables()[GOODS].held is not None
    schema_policy.accept(stopped.ledger, [GOODS])
    stopped.sync()
    stopped.assert_current("public.goods")
    frozen.sync()
    source.sql("ALTER TABLE goods ADD size int; UPDATE goods SET size = id")
    frozen.sync()
    assert "size" not in columns(frozen)
    pipeline.sync()
    pipeline.assert_current("public.goods")


@pytest.mark.soak
@pytest.mark.parametrize("identity", ["FULL", "DEFAULT"])
def test_altered_while_the_stream_is_read_and_several_times(identity: str, source: Source, pipeline: Pipeline) -> None:
    make_tables(source)
    if identity == "FULL":
        source.sql("ALTER TABLE goods DROP CONSTRAINT goods_pkey; ALTER TABLE goods REPLICA IDENTITY FULL")
    frozen = with_policy(pipeline, "freeze")
    frozen.sync()
    source.sql("UPDATE goods SET stock = 1; ALTER TABLE goods ADD a int; UPDATE goods SET a = 1; ALTER TABLE goods DROP a")
    source.sql(
        "INSERT INTO goods VALUES (3, 'cap', 3, 'c'); ALTER TABLE goods ADD b int DEFAULT 4; UPDATE goods SET stock = 2 WHERE id = 1"
    )
    source.sql("TRUNCATE sales; INSERT INTO goods VALUES (4, 'big', 3, repeat('x', 9000)); UPDATE goods SET stock = 4, b = 5 WHERE id = 4")
    frozen.sync()
    assert columns(frozen) == FOUR
    assert [row[:3] for row in rows(frozen)] == [(1, "ink", 2), (2, "pen", 1), (3, "cap", 3), (4, "big", 4)]
    assert len(rows(frozen)[3][3]) == 9000
    assert verify(frozen.settings, frozen.spark, progress=Silent()).equal
    source.sql("DELETE FROM goods WHERE id IN (1, 2)")
    frozen.sync()
    assert [row[0] for row in rows(frozen)] == [3, 4]

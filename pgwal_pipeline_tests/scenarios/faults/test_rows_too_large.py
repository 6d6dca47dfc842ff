"""Rows that are larger than one may be: they cost their table, and neither its neighbours nor the machine's memory."""

from typing import Any

import polars as pl
import pytest

from pgwal_pipeline import settings
from pgwal_pipeline.messages.errors import ChangeNotSent, SlotLost
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import verify
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source

_BIG = TableName("public", "big")


@pytest.fixture
def small(make_pipeline: MakePipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline whose rows may have 1 MB."""
    monkeypatch.setattr(settings, "ROW_BYTES", 1 << 20)
    made = make_pipeline(memory_budget="1MB")
    made.spark = lambda: spark
    return made


def made(source: Source) -> None:
    for table in ("big", "sound"):
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text, n int)")
        source.sql(f"INSERT INTO {table} VALUES (1, 'x', 1)")


def assert_confirmed(source: Source, pipeline: Pipeline) -> None:
    found = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    assert parse_lsn(source.value(found, pipeline.settings.slot)) == pipeline.ledger.frontier()


@pytest.mark.parametrize(
    "change", ["in the middle", *(pytest.param(change, marks=pytest.mark.soak) for change in ("insert", "update", "delete"))]
)
def test_a_change_that_is_too_large_costs_its_table_alone(change: str, source: Source, small: Pipeline) -> None:
    made(source)
    if change == "delete":
        source.sql("ALTER TABLE big REPLICA IDENTITY FULL")
    small.sync()
    with source.connect(autocommit=False) as conn:
        conn.execute("INSERT INTO sound VALUES (2, 'before', 2)")
        conn.execute("INSERT INTO big VALUES (2, 'y', 2)")
        if change == "update":
            conn.execute("UPDATE big SET v = repeat('0123456789', 300000) WHERE id = 1")
        else:
            conn.execute("INSERT INTO big SELECT i, repeat('0123456789', 300000), i FROM generate_series(10, 14) i")
        if change == "delete":
            conn.execute("DELETE FROM big WHERE id >= 10")
        if change == "in the middle":
            conn.execute("INSERT INTO big SELECT i, 'z', i FROM generate_series(20, 30) i")
        conn.execute("INSERT INTO sound VALUES (3, 'after', 3)")
        conn.commit()
    source.sql("INSERT INTO big VALUES (4, 'later', 4)")
    source.sql("INSERT INTO sound VALUES (4, 'later', 4)")
    small.drain()
    assert_confirmed(source, small)
    report = small.publish()
    assert set(report.errors) == {"public.big"}
    small.assert_current("public.sound")
    state = small.ledger.tables()[_BIG]
    assert (state.state, state.stage) == ("error", "decode")
    for said in ("2.9 MB", "1.0 MB", "PGWAL_MEMORY_BUDGET", "pgwal resnapshot 'public.big'"):
        assert said in (state.reason or "")
    # Its later changes cost nothing either.
    source.sql("UPDATE big SET n = n + 1")
    source.sql("UPDATE sound SET n = n + 1")
    small.drain()
    small.publish()
    assert_confirmed(source, small)
    small.assert_current("public.sound")
    # Once the rows are gone it comes back.
    source.sql("UPDATE big SET v = 'short'")
    assert small.resnapshot("public.big").errors == {}
    small.assert_current("public.big", "public.sound")


def test_a_row_that_is_too_large_to_be_read_costs_its_table_alone(source: Source, small: Pipeline, spark: Any) -> None:
    made(source)
    source.sql("INSERT INTO big SELECT 2, repeat('0123456789', 300000), 2")
    report = small.sync()
    assert set(report.errors) == {"public.big"}
    small.assert_current("public.sound")
    state = small.ledger.tables()[_BIG]
    assert (state.state, state.stage) == ("error", "read")
    assert "2.9 MB" in (state.reason or "")
    # Whoever asks for it while the row is there gets the same reason, and the others go on.
    small.resnapshot("public.big")
    assert "2.9 MB" in (small.ledger.tables()[_BIG].reason or "")
    source.sql("DELETE FROM big WHERE id = 2")
    assert small.resnapshot("public.big").errors == {}
    small.assert_current("public.big", "public.sound")
    # One that comes later, and is verified before it is drained.
    source.sql("INSERT INTO big SELECT 2, repeat('0123456789', 300000), 2")
    found = verify.verify(small.settings, lambda: spark, progress=Silent())
    assert found.tables[TableName("public", "sound")].equal


def test_a_row_may_be_larger_than_a_small_memory_budget(source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    pipeline = make_pipeline(memory_budget="1MB")
    pipeline.spark = lambda: spark
    made(source)
    source.sql("INSERT INTO big SELECT 2, repeat('0123456789', 300000), 2")
    pipeline.sync()
    source.sql("INSERT INTO big SELECT 3, repeat('0123456789', 500000), 3")
    assert pipeline.sync().errors == {}
    pipeline.assert_current("public.big", "public.sound")


def filtered(source: Source, pipeline: Pipeline) -> None:
    """A publication of the user's own, whose row filter fails on a row with n = 0."""
    source.sql(f"CREATE PUBLICATION {pipeline.settings.publication} FOR TABLE big WHERE (10 / n > 0), sound")
    source.sql("ALTER TABLE big REPLICA IDENTITY FULL")


def test_what_the_source_says_against_reading_one_table_is_that_tables_fault(source: Source, small: Pipeline) -> None:
    made(source)
    filtered(source, small)
    source.sql("INSERT INTO big VALUES (2, 'y', 0)")
    assert set(small.sync().errors) == {"public.big"}
    small.assert_current("public.sound")
    state = small.ledger.tables()[_BIG]
    assert (state.state, state.stage) == ("error", "read")
    assert "division by zero" in (state.reason or "")


@pytest.mark.parametrize("on_slot_loss", ["stop", pytest.param("resnapshot", marks=pytest.mark.soak)])
def test_a_change_that_the_source_cannot_send(on_slot_loss: str, source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    """As a row of more than 1 GB is: what came before is kept, the reason is told, and `resnapshot --all` is the way on."""
    pipeline = make_pipeline(on_slot_loss=on_slot_loss)
    pipeline.spark = lambda: spark
    made(source)
    filtered(source, pipeline)
    pipeline.sync()
    source.sql("INSERT INTO sound VALUES (2, 'before', 2)")
    with source.connect(autocommit=False) as conn:
        conn.execute("INSERT INTO sound VALUES (3, 'beside', 3)")
        conn.execute("INSERT INTO big VALUES (2, 'y', 0)")
        conn.commit()
    with pytest.raises(ChangeNotSent, match=r"division by zero.*resnapshot --all"):
        pipeline.drain()
    assert pl.read_delta(pipeline.lake.raw(TableName("public", "sound")))["id"].to_list() == [2]
    if on_slot_loss == "stop":
        with pytest.raises(SlotLost, match="failed at a change"):
            pipeline.drain()
        drains.renew(pipeline.settings, progress=Silent())
    assert set(pipeline.sync().errors) == {"public.big"}
    source.sql("UPDATE sound SET n = n + 1")
    assert set(pipeline.sync().errors) == {"public.big"}
    pipeline.assert_current("public.sound")
    source.sql(f"ALTER PUBLICATION {pipeline.settings.publication} SET TABLE big, sound")
    pipeline.resnapshot("public.big")
    assert pipeline.sync().errors == {}
    pipeline.assert_current("public.big", "public.sound")


@pytest.mark.soak
def test_a_reader_with_a_share_of_the_budget_takes_the_same_rows(source: Source, make_pipeline: MakePipeline) -> None:
    """Several read a backlog side by side: what one row may have goes by the whole budget, and does not depend on how many they are."""
    pipeline = make_pipeline(memory_budget="300MB", catchup_threshold="1MB", catchup_slots=2)
    made(source)
    pipeline.drain()
    pipeline.snapshot()
    for number in range(10, 16):
        source.sql("INSERT INTO big SELECT %s, repeat('0123456789', 7000000), 1", number)
        source.sql("INSERT INTO sound SELECT %s, repeat('0123456789', 8000000), 1", number)
    assert len(pipeline.drain().windows) > 1
    states = pipeline.ledger.tables()
    assert states[_BIG].state == "ready"
    assert sorted(pl.read_delta(pipeline.lake.raw(_BIG), columns=["id"])["id"]) == list(range(10, 16))
    assert (states[TableName("public", "sound")].state, states[TableName("public", "sound")].stage) == ("error", "decode")
    assert_confirmed(source, pipeline)


@pytest.mark.soak
def test_memory_stays_bounded_beside_rows_of_900_mb(source: Source, pipeline: Pipeline) -> None:
    made(source)
    pipeline.sync()
    measure = (
        "from pgwal_pipeline.pipeline.drain import drain\n"
        "from pgwal_pipeline.pipeline.snapshot import snapshot\n"
        "import resource, sys\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "{}\n"
        "print('peak', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    for number in range(10, 14):
        source.sql(f"INSERT INTO big SELECT {number}, repeat('0123456789', 90000000), 1")
    source.sql("INSERT INTO sound VALUES (2, 'x', 2)")
    for work in ("drain(settings, progress=progress)", "snapshot(settings, progress=progress)"):
        done = pipeline.child(measure.format(work), timeout=600)
        assert done.returncode == 0, done.stderr
        # A message has to be received whole: libpq has it in a buffer that doubles, and hands out a copy.
        assert int(done.stdout.split()[-1]) < 4 * 900
    pipeline.publish()
    pipeline.assert_current("public.sound")
    assert pipeline.ledger.tables()[_BIG].state == "error"
    source.sql("DELETE FROM big WHERE id >= 10")
    assert pipeline.resnapshot("public.big").errors == {}
    pipeline.assert_current("public.big", "public.sound")

"""A failover slot on a real standby: the server keeps it in step, and after a promotion the pipeline goes on from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.embedded.installations import default_installation
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline, lead_to
from pgwal_pipeline_tests.postgres.standby import caught_up, promoted, standby_of
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for

_SYNCED = "SELECT synced AND NOT temporary FROM pg_replication_slots WHERE slot_name = %s"
_CONFIRMED = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"


def keeps_slots(standby: Source, its_slot: str) -> None:
    """Have the standby do what the README asks of one that is to take the slot along."""
    for setting, value in {
        "primary_slot_name": its_slot,
        "hot_standby_feedback": "on",
        "sync_replication_slots": "on",
    }.items():
        standby.sql(f"ALTER SYSTEM SET {setting} = '{value}'")
    standby.sql("SELECT pg_reload_conf()")


def in_step(pipeline: Pipeline, standby: Source) -> None:
    """Wait until the standby has the slot for good, at the position that it has on the primary.

    It keeps a new one only once the slot on the primary has come past where the standby could begin to decode, as it does by drains.
    """
    slot = pipeline.settings.slot

    def same() -> bool:
        if standby.sql(_SYNCED, slot) != [(True,)]:
            pipeline.source.sql("SELECT pg_log_standby_snapshot()")
            pipeline.drain()
            return False
        return pipeline.source.sql(_CONFIRMED, slot) == standby.sql(_CONFIRMED, slot)

    try:
        wait_for(same, seconds=120, what="the slot to be synchronized")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{standby.server.log_file.read_text()[-2000:]}") from None


@pytest.mark.skipif(default_installation().version < 17, reason="failover slots came with Postgres 17")
@pytest.mark.parametrize("synced", [pytest.param("to the frontier", marks=pytest.mark.soak), "before the frontier"])
def test_a_standby_with_the_synchronized_slot_takes_over(
    synced: str, make_server: Callable[..., Postgres], make_pipeline: MakePipeline, tmp_path: Path, spark: Any
) -> None:
    """Nothing is lost or read twice, be the slot there where it was, or a little behind what the lake has."""
    with fresh_source(make_server(hot_standby_feedback="on")) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT i, 'snapshot' FROM generate_series(1, 10) i")
        source.sql("SELECT pg_create_physical_replication_slot('standby_1', true)")
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source, pipeline.spark = source, lambda: spark
        with standby_of(source, tmp_path / "standby") as standby:
            keeps_slots(standby, "standby_1")
            source.sql("ALTER SYSTEM SET synchronized_standby_slots = 'standby_1'")
            source.sql("SELECT pg_reload_conf()")
            pipeline.sync()
            source.sql("INSERT INTO t SELECT i, 'drained' FROM generate_series(11, 20) i; UPDATE t SET v = 'changed' WHERE id <= 5")
            pipeline.drain()
            in_step(pipeline, standby)
            if synced == "before the frontier":
                standby.sql("ALTER SYSTEM SET sync_replication_slots = off")
                standby.sql("SELECT pg_reload_conf()")
                alive = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'slotsync worker'"
                wait_for(lambda: standby.value(alive) == 0, what="the end of the synchronization")
                source.sql("INSERT INTO t SELECT i, 'drained later' FROM generate_series(21, 25) i; DELETE FROM t WHERE id = 1")
                pipeline.drain()
            source.sql("INSERT INTO t SELECT i, 'not drained' FROM generate_series(31, 40) i; DELETE FROM t WHERE id = 2")
            caught_up(source, standby)
            source.close()
            source.server.stop()
            promoted(standby)
            frontier = pipeline.ledger.frontier()
            assert frontier is not None
            behind = parse_lsn(standby.value(_CONFIRMED, pipeline.settings.slot)) < frontier
            assert behind == (synced == "before the frontier")
            standby.sql("INSERT INTO t SELECT i, 'promoted' FROM generate_series(41, 50) i; UPDATE t SET v = 'again' WHERE id = 35")
            after = lead_to(make_pipeline, pipeline, standby, spark)
            report = after.drain()
            assert report.warnings == ()
            assert snapshots.needed(after.settings) == (), "no table has to be read again"
            after.publish()
            after.assert_current("public.t")
            raw = pl.read_delta(after.lake.raw(next(iter(after.ledger.tables()))))
            inserted = sorted(raw.filter(pl.col("_pgwal_op") == "I")["id"])
            later = range(21, 26) if behind else range(0)
            assert inserted == [*range(11, 21), *later, *range(31, 51)]
            recorded = after.ledger.source()
            assert recorded is not None
            assert recorded.timeline == 2

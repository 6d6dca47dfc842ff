"""Slots, publications and sources that are not what they were: each is recognised before anything is read, and has one way on."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import LakeError, PgwalError, SlotLost
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline, lead_to
from pgwal_pipeline_tests.postgres.standby import caught_up, promoted, standby_of
from pgwal_pipeline_tests.support import Source, fresh_source

SLOT = "SELECT {} FROM pg_replication_slots WHERE slot_name = %s"


def ready(source: Source, pipeline: Pipeline) -> None:
    """A table that stands in `current`, and changes since that are not drained."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) i")
    pipeline.sync()
    source.sql("UPDATE t SET v = 1 WHERE id <= 10; DELETE FROM t WHERE id = 11")


def renewed(source: Source, pipeline: Pipeline) -> None:
    """The way on after a gap, to its end."""
    drains.renew(pipeline.settings, progress=Silent())
    finish(source, pipeline)


def finish(source: Source, pipeline: Pipeline) -> None:
    if snapshots.needed(pipeline.settings):
        pipeline.snapshot()
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.t")


def refused(pipeline: Pipeline, kind: type[PgwalError], words: str) -> None:
    """Draining is refused, and leaves the lake as it was."""
    frontier, publish = pipeline.ledger.frontier(), pipeline.ledger.publish()
    with pytest.raises(kind, match=words):
        pipeline.drain()
    assert (pipeline.ledger.frontier(), pipeline.ledger.publish()) == (frontier, publish)


# What somebody does to the slot while nobody looks.
TAMPERING = {
    "dropped": ["SELECT pg_drop_replication_slot('{slot}')"],
    "advanced": ["SELECT pg_replication_slot_advance('{slot}', pg_current_wal_flush_lsn())"],
    "made_anew": [
        "SELECT pg_drop_replication_slot('{slot}')",
        "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
    ],
}


@pytest.mark.parametrize(
    ("how", "policy"), [("dropped", "stop"), ("advanced", "resnapshot"), pytest.param("made_anew", "stop", marks=pytest.mark.soak)]
)
def test_a_slot_that_is_not_where_it_was(how: str, policy: str, source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    pipeline = make_pipeline(on_slot_loss=policy)
    pipeline.spark = lambda: spark
    ready(source, pipeline)
    source.wait_for_slot(pipeline.settings.slot)
    for statement in TAMPERING[how]:
        source.sql(statement.format(slot=pipeline.settings.slot))
    source.sql("UPDATE t SET v = 2 WHERE id = 12")
    if policy == "resnapshot":
        report = pipeline.drain()
        assert any("PGWAL_ON_SLOT_LOSS" in warning for warning in report.warnings)
        finish(source, pipeline)
        return
    refused(pipeline, SlotLost, "resnapshot --all")
    renewed(source, pipeline)


def test_a_slot_of_another_plugin_or_database_is_named(source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    pipeline = make_pipeline()
    pipeline.spark = lambda: spark
    ready(source, pipeline)
    source.drop_slot(pipeline.settings.slot)
    source.sql("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", pipeline.settings.slot)
    refused(pipeline, PgwalError, "test_decoding")


@pytest.mark.parametrize(
    ("why", "policy"), [("size", "stop"), ("size", "resnapshot"), pytest.param("idle", "stop", marks=pytest.mark.soak)]
)
def test_a_slot_that_the_server_gave_up(
    why: str, policy: str, make_server: Callable[..., Postgres], make_pipeline: MakePipeline, spark: Any
) -> None:
    """It is refused with what to do; where the user allowed it, it is made anew by itself and every table is read again."""
    limits = {"max_slot_wal_keep_size": "1MB", "wal_keep_size": "0", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    server = make_server(**(limits if why == "size" else {"idle_replication_slot_timeout": "1s"}))
    with fresh_source(server) as source:
        pipeline = make_pipeline(source_dsn=source.dsn, on_slot_loss=policy)
        pipeline.source, pipeline.spark = source, lambda: spark
        source.sql("CREATE TABLE u (id int PRIMARY KEY); INSERT INTO u SELECT generate_series(1, 10)")
        ready(source, pipeline)
        before = pipeline.ledger.tables()
        source.lose_slot(pipeline.settings.slot, "INSERT INTO t SELECT max(id) + 1 FROM t", "DELETE FROM u WHERE id = 3")
        if policy == "stop":
            refused(pipeline, SlotLost, "max_slot_wal_keep_size" if why == "size" else "idle_replication_slot_timeout")
            refused(pipeline, SlotLost, "Run `pgwal resnapshot --all`")
            drains.renew(pipeline.settings, progress=Silent())
        else:
            (warning,) = pipeline.drain().warnings
            assert "That is done now, as PGWAL_ON_SLOT_LOSS=resnapshot says." in warning
        assert source.value(SLOT.format("wal_status"), pipeline.settings.slot) == "reserved"
        assert set(snapshots.needed(pipeline.settings)) == set(before)
        source.sql("UPDATE t SET v = 3 WHERE id = 20")
        finish(source, pipeline)
        pipeline.assert_current("public.u")
        after = pipeline.ledger.tables()
        assert all(after[table].generation not in (None, before[table].generation) for table in before)


def test_publications_that_go_and_come(source: Source, make_pipeline: MakePipeline, spark: Any) -> None:
    """What was written meanwhile is in no stream: every table is read again, or the one that was out of it for a while."""
    pipeline = make_pipeline()
    pipeline.spark = lambda: spark
    ready(source, pipeline)
    name = pipeline.settings.publication
    pipeline.drain()
    source.sql(f"DROP PUBLICATION {name}")
    source.sql("UPDATE t SET v = 3 WHERE id = 20")
    refused(pipeline, SlotLost, f"Publication {name} was dropped")
    source.sql(f"CREATE PUBLICATION {name} FOR TABLE t")
    refused(pipeline, SlotLost, "made anew")
    renewed(source, pipeline)
    source.sql(f"DROP PUBLICATION {name}")
    renewed(source, pipeline)
    source.sql(f"ALTER PUBLICATION {name} DROP TABLE t")
    source.sql("UPDATE t SET v = 4 WHERE id = 21")
    source.sql(f"ALTER PUBLICATION {name} ADD TABLE t")
    pipeline.drain()
    assert [table.name for table in snapshots.needed(pipeline.settings)] == ["t"]
    finish(source, pipeline)


def test_one_lake_has_one_source_and_one_slot(source: Source, make_pipeline: MakePipeline, tmp_path: Path, spark: Any) -> None:
    pipeline = make_pipeline()
    pipeline.spark = lambda: spark
    ready(source, pipeline)
    other = make_pipeline(slot=pipeline.settings.slot, publication=pipeline.settings.publication, lake=str(tmp_path / "another"))
    with pytest.raises(LakeError, match="another lake may be fed by it"):
        other.drain()
    assert not other.ledger.windows()
    with pytest.raises(LakeError, match="PGWAL_SLOT"):
        make_pipeline(slot="t_another", publication=pipeline.settings.publication).drain()
    with fresh_source(source.server) as elsewhere:
        with pytest.raises(LakeError, match="was built from database"):
            make_pipeline(source_dsn=elsewhere.dsn, slot=pipeline.settings.slot, publication=pipeline.settings.publication).drain()
        assert elsewhere.value("SELECT count(*) FROM pg_publication") == 0
    # A copy of the lake goes on by itself; the first one then finds that its slot has moved.
    shutil.copytree(pipeline.settings.lake, tmp_path / "copy")
    copied = make_pipeline(slot=pipeline.settings.slot, publication=pipeline.settings.publication, lake=str(tmp_path / "copy"))
    copied.drain()
    refused(pipeline, SlotLost, "was advanced")


def test_a_lake_that_was_restored_from_a_backup_is_behind_its_slot(
    source: Source, make_pipeline: MakePipeline, tmp_path: Path, spark: Any
) -> None:
    pipeline = make_pipeline()
    pipeline.spark = lambda: spark
    ready(source, pipeline)
    shutil.copytree(pipeline.settings.lake, tmp_path / "backup")
    pipeline.drain()
    pipeline.publish()
    shutil.rmtree(pipeline.settings.lake)
    shutil.copytree(tmp_path / "backup", pipeline.settings.lake)
    refused(pipeline, SlotLost, "was advanced .* by someone else|resnapshot --all")
    renewed(source, pipeline)


def test_a_standby_that_takes_over(make_server: Callable[..., Postgres], make_pipeline: MakePipeline, tmp_path: Path, spark: Any) -> None:
    """With the slot and all that the lake has it goes on; promoted before it had all of that it is refused, and so is the old primary."""
    server = make_server()
    with fresh_source(server) as source:
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source, pipeline.spark = source, lambda: spark
        ready(source, pipeline)
        source.sql("SELECT pg_create_physical_replication_slot('late')")
        with standby_of(source, tmp_path / "late") as late, standby_of(source, tmp_path / "next") as heir:
            caught_up(source, late)
            late.sql("SELECT pg_wal_replay_pause()")
            source.sql("UPDATE t SET v = 7 WHERE id = 30")
            pipeline.drain()
            caught_up(source, heir)
            behind = lead_to(make_pipeline, pipeline, late, spark)
            with pytest.raises(LakeError, match="older copy of the source, or to a standby that is behind"):
                behind.drain()
            late.server.stop()
            # Its own WAL, from before it was promoted, lacks what the lake has.
            source.server.stop()
            promoted(heir)
            heir.sql("UPDATE t SET v = 8 WHERE id = 31")
            after = lead_to(make_pipeline, pipeline, heir, spark)
            refused(after, SlotLost, "is gone")
            renewed(heir, after)
            recorded = after.ledger.source()
            assert recorded is not None
            assert recorded.timeline == 2
            heir.sql("UPDATE t SET v = 9 WHERE id = 32")
            finish(heir, after)
            source.server.start()
            old = lead_to(make_pipeline, pipeline, source, spark)
            with pytest.raises(LakeError, match="older copy of the source"):
                old.drain()


def test_a_standby_promoted_before_it_had_everything(
    make_server: Callable[..., Postgres], make_pipeline: MakePipeline, tmp_path: Path, spark: Any
) -> None:
    server = make_server()
    with fresh_source(server) as source:
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source, pipeline.spark = source, lambda: spark
        ready(source, pipeline)
        with standby_of(source, tmp_path / "standby") as standby:
            caught_up(source, standby)
            standby.sql("SELECT pg_wal_replay_pause()")
            standby.server.stop()  # what comes now it never gets
            source.sql("UPDATE t SET v = 7 WHERE id = 30")
            pipeline.drain()
            pipeline.publish()
            source.server.stop()
            standby.close()
            standby.server.start()
            promoted(standby)
            for number in range(300):
                standby.sql("UPDATE t SET v = %s WHERE id = 40", number)
            standby.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", pipeline.settings.slot)
            after = lead_to(make_pipeline, pipeline, standby, spark)
            refused(after, SlotLost, "some of which the source never had")
            renewed(standby, after)

"""Gaps in what the slot brings, and ways back that were cut off: nothing stale is taken up, and nothing is stuck."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import FORMAT
from pgwal_pipeline.messages.errors import LakeError, SlotLost, SourceRefused
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import DRAIN, MakePipeline, ids_in_raw, killed, lead_to, read_once
from pgwal_pipeline_tests.postgres.standby import caught_up, promoted, standby_of
from pgwal_pipeline_tests.support import TEST_SETTINGS, Source, fresh_source

RENEW = "from pgwal_pipeline.pipeline.drain import renew\nrenew(settings, progress=progress)"


@pytest.mark.parametrize("point", ["renew.before_slot", "renew.after_slot", "renew.after_origin", "renew.after_tables"])
def test_a_slot_whose_renewal_was_cut_off_is_never_gone_on_from(point: str, source: Source, make_pipeline: MakePipeline) -> None:
    """Whenever the way back was interrupted: what was not in any stream is read again, whatever runs next."""
    pipeline = make_pipeline()
    read_once(source, pipeline)
    source.drop_slot(pipeline.settings.slot)
    killed(pipeline, RENEW, point)
    source.sql("INSERT INTO t VALUES (12, 0)")
    try:
        pipeline.drain()
    except SlotLost:
        drains.renew(pipeline.settings, progress=Silent())
        pipeline.drain()
    assert snapshots.needed(pipeline.settings) == (TableName("public", "t"),)
    pipeline.snapshot()
    pipeline.drain()
    assert snapshots.needed(pipeline.settings) == ()


def test_a_lost_slot_from_before_anything_was_read_is_made_anew(make_server: Callable[..., Postgres], make_pipeline: MakePipeline) -> None:
    server = make_server(max_slot_wal_keep_size="1MB", wal_keep_size="0", max_wal_size="32MB", min_wal_size="32MB")
    with fresh_source(server) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY)")
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source = source
        killed(pipeline, DRAIN, "bootstrap.after_slot")
        source.lose_slot(pipeline.settings.slot, "INSERT INTO t SELECT coalesce(max(id), 0) + 1 FROM t")
        with pytest.raises(SlotLost):
            pipeline.drain()
        drains.renew(pipeline.settings, progress=Silent())
        pipeline.drain()


def test_a_slot_of_somebody_else_is_not_renewed(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    read_once(source, pipeline)
    name = pipeline.settings.slot
    source.drop_slot(name)
    source.sql("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", name)
    with pytest.raises(SourceRefused, match="test_decoding"):
        drains.renew(pipeline.settings, progress=Silent())
    assert source.sql("SELECT plugin::text FROM pg_replication_slots WHERE slot_name = %s", name) == [("test_decoding",)]


def test_a_publication_that_had_another_name_for_a_while(source: Source, make_pipeline: MakePipeline) -> None:
    """Neither its name nor its oid tells of it, only the stream; the way on is the same as for one that was dropped."""
    pipeline = make_pipeline()
    read_once(source, pipeline)
    name = pipeline.settings.publication
    pipeline.drain()
    source.sql(f"ALTER PUBLICATION {name} RENAME TO hidden")
    source.sql("INSERT INTO t VALUES (12, 0)")
    source.sql(f"ALTER PUBLICATION hidden RENAME TO {name}")
    for _ in range(2):
        with pytest.raises(SlotLost, match="resnapshot --all"):
            pipeline.drain()
    drains.renew(pipeline.settings, progress=Silent())
    pipeline.drain()
    assert snapshots.needed(pipeline.settings) == (TableName("public", "t"),)


def slot_on(standby: Source, primary: Source, name: str) -> None:
    """A logical slot on a standby, which waits for the primary to tell which transactions run."""
    made = threading.Thread(target=lambda: standby.connect().execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name]))
    made.start()
    while made.is_alive():
        primary.sql("SELECT pg_log_standby_snapshot()")
        made.join(0.2)


@pytest.mark.parametrize("point", ["catch_up.all_read", "drain.after_prepared"])
def test_a_failover_with_the_slot_goes_on_without_what_never_was(
    point: str, make_server: Callable[..., Postgres], make_pipeline: MakePipeline, tmp_path: Path, spark: Any
) -> None:
    """What was read from the old primary past where the standby took over is not taken for the new one's; if it counted, that is a gap."""
    server = make_server(hot_standby_feedback="on")
    with fresh_source(server) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
        pipeline = make_pipeline(source_dsn=source.dsn, catchup_threshold=1 << 20, catchup_slots=1)
        pipeline.source = source
        pipeline.drain()
        with standby_of(source, tmp_path / "heir") as heir:
            caught_up(source, heir)
            slot_on(heir, source, pipeline.settings.slot)
            source.sql("INSERT INTO t SELECT i, 'both' FROM generate_series(1, 10) i")
            pipeline.drain()
            caught_up(source, heir)
            heir.server.stop()  # what comes now it never gets
            source.sql("INSERT INTO t SELECT i, repeat(md5(i::text), 50) FROM generate_series(101, 5000) i")
            killed(pipeline, DRAIN, point, PGWAL_CATCHUP_THRESHOLD="1MB", PGWAL_CATCHUP_SLOTS="1")
            source.server.stop()
            heir.close()
            heir.server.start()
            promoted(heir)
            heir.sql("INSERT INTO t SELECT i, 'after' FROM generate_series(11, 20) i")
            after = lead_to(make_pipeline, pipeline, heir, spark)
            if point == "drain.after_prepared":
                with pytest.raises(SlotLost, match="some of which the source never had"):
                    after.drain()
                drains.renew(after.settings, progress=Silent())
                heir.sql("INSERT INTO t VALUES (21, 'renewed')")
                after.drain()
                assert ids_in_raw(after) == [*range(1, 11), 21]
                assert snapshots.needed(after.settings) == (TableName("public", "t"),)
                return
            after.drain()
            assert ids_in_raw(after) == list(range(1, 21))
            heir.sql("INSERT INTO t SELECT i, repeat(md5(i::text), 50) FROM generate_series(21, 5000) i")
            after.drain()
            assert ids_in_raw(after) == list(range(1, 5001))


def test_a_lake_that_another_source_has_just_taken(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    pipeline.drain()
    recorded = pipeline.ledger.source()
    assert recorded is not None
    pipeline.ledger.record_source(replace(recorded, timeline=2))
    with pytest.raises(LakeError, match="taken by another pipeline"):
        pipeline.ledger.record_source(replace(recorded, system_identifier=recorded.system_identifier + 1))


def test_a_lake_of_an_older_version_goes_on_and_is_refused_by_that_version_then(source: Source, make_pipeline: MakePipeline) -> None:
    """Its ledger knows neither the publication's oid nor its own form: that is no other publication."""
    pipeline = make_pipeline()
    read_once(source, pipeline)
    recorded = pipeline.ledger.source()
    assert recorded is not None
    assert recorded.format == FORMAT
    older = replace(recorded, publication_oid=0, format=1)
    pipeline.ledger.record_source(older)
    source.sql("INSERT INTO t VALUES (12, 0)")
    pipeline.drain()
    assert pipeline.ledger.source() == recorded
    assert snapshots.needed(pipeline.settings) == ()
    pipeline.ledger.record_source(replace(recorded, format=FORMAT + 1))
    with pytest.raises(LakeError, match="A newer version of pgwal_pipeline has worked on the lake"):
        pipeline.drain()


@pytest.mark.parametrize("how", ["recreated", "another_cluster", "slot_elsewhere"])
def test_what_is_not_the_lakes_source_is_named(
    how: str, source: Source, make_pipeline: MakePipeline, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A database made anew under its name, another cluster, and a slot of that name on another database."""
    pipeline = make_pipeline()
    read_once(source, pipeline)
    frontier = pipeline.ledger.frontier()
    names = {"slot": pipeline.settings.slot, "publication": pipeline.settings.publication}
    if how == "slot_elsewhere":
        source.drop_slot(pipeline.settings.slot)
        with fresh_source(source.server) as other:
            other.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", pipeline.settings.slot)
            with pytest.raises(SourceRefused, match=f"belongs to database {other.database}"):
                pipeline.drain()
            with pytest.raises(SourceRefused, match=f"belongs to database {other.database}"):
                drains.renew(pipeline.settings, progress=Silent())
    elif how == "recreated":
        source.drop_slot(pipeline.settings.slot)
        source.close()
        with plain_session(source.server.dsn()) as admin:
            admin.execute(f"DROP DATABASE {source.database} WITH (FORCE)".encode())
            admin.execute(f"CREATE DATABASE {source.database}".encode())
        for act in (pipeline.drain, lambda: drains.renew(pipeline.settings, progress=Silent())):
            with pytest.raises(LakeError, match="was built from database"):
                act()
    else:
        # Not of `make_server`: all servers of that one are copies of one cluster.
        elsewhere = Postgres(tmp_path / "elsewhere", settings=TEST_SETTINGS)
        elsewhere.start()
        request.addfinalizer(elsewhere.destroy)
        with fresh_source(elsewhere) as other:
            moved = make_pipeline(source_dsn=other.dsn, **names)
            for act in (moved.drain, lambda: drains.renew(moved.settings, progress=Silent())):
                with pytest.raises(LakeError, match="of cluster"):
                    act()
            assert other.value("SELECT count(*) FROM pg_replication_slots") == 0
    assert pipeline.ledger.frontier() == frontier


@pytest.mark.parametrize("how", ["dropped", "made_anew"])
def test_where_the_user_allowed_it_a_lost_slot_is_made_anew_by_itself(how: str, source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline(on_slot_loss="resnapshot")
    read_once(source, pipeline)
    source.drop_slot(pipeline.settings.slot)
    if how == "made_anew":
        source.sql("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", pipeline.settings.slot)
    report = pipeline.drain()
    assert any("PGWAL_ON_SLOT_LOSS" in warning for warning in report.warnings)
    assert snapshots.needed(pipeline.settings) == (TableName("public", "t"),)
    source.sql("INSERT INTO t VALUES (12, 0)")
    pipeline.drain()
    assert ids_in_raw(pipeline) == [12]


def test_two_pipelines_that_take_an_empty_lake_at_once(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    one, two = make_pipeline(), make_pipeline()
    assert one.settings.lake == two.settings.lake
    assert one.settings.slot != two.settings.slot
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda pipeline: pipeline.child(DRAIN), (one, two)))
    assert sorted(child.returncode for child in done) == [0, 1], [child.stderr for child in done]
    loser = next(child for child in done if child.returncode)
    assert "LakeError" in loser.stderr
    winner = one if done[0].returncode == 0 else two
    source.sql("INSERT INTO t VALUES (1)")
    winner.drain()
    assert ids_in_raw(winner) == [1]


@pytest.mark.parametrize("looked_at", ["source", "frontier"])
def test_a_lake_that_another_pipeline_takes_while_it_is_looked_at(
    looked_at: str, source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    one, two = make_pipeline(), make_pipeline()
    look = getattr(Ledger, looked_at)

    def taken_just_before(ledger: Ledger) -> Any:
        monkeypatch.undo()
        two.drain()
        return look(ledger)

    monkeypatch.setattr(Ledger, looked_at, taken_just_before)
    with pytest.raises(LakeError, match=f"is fed by slot {two.settings.slot}"):
        one.drain()

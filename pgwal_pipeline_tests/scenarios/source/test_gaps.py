"""Gaps in what the slot brings, and drains that died with work half done: nothing stale is taken up, and nothing is stuck."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.ledger import Source as LedgerSource
from pgwal_pipeline.lake.raw import commit_window
from pgwal_pipeline.messages.errors import LakeError, SlotLost, SourceRefused, SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline import window as windows
from pgwal_pipeline.pipeline.drop import drop
from pgwal_pipeline.pipeline.status import publish_due
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.pipelines import DRAIN, MakePipeline, Pipeline, ids_in_raw, killed, lead_to
from pgwal_pipeline_tests.postgres.standby import caught_up, promoted, standby_of
from pgwal_pipeline_tests.support import TEST_SETTINGS, Source, fresh_source, wait_for

RENEW = "from pgwal_pipeline.pipeline.drain import renew\nrenew(settings, progress=progress)"
SLOTS = "SELECT slot_name::text, plugin::text FROM pg_replication_slots WHERE slot_name = %s"


def read_once(source: Source, pipeline: Pipeline) -> None:
    """A table that has been read whole, and changes since that are not drained."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 10) i")
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    assert snapshots.needed(pipeline.settings) == ()
    source.sql("INSERT INTO t VALUES (11, 0)")


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

        def lost() -> bool:
            source.sql("INSERT INTO t SELECT coalesce(max(id), 0) + 1 FROM t")
            source.sql("SELECT pg_switch_wal()")
            source.sql("CHECKPOINT")
            return source.value("SELECT wal_status FROM pg_replication_slots WHERE slot_name = %s", pipeline.settings.slot) == "lost"

        wait_for(lost, what="the slot to be lost")
        with pytest.raises(SlotLost):
            pipeline.drain()
        drains.renew(pipeline.settings, progress=Silent())
        pipeline.drain()


def test_a_slot_of_somebody_else_is_neither_renewed_nor_dropped(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    read_once(source, pipeline)
    name = pipeline.settings.slot
    source.drop_slot(name)
    source.sql("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", name)
    with pytest.raises(SourceRefused, match="test_decoding"):
        drains.renew(pipeline.settings, progress=Silent())
    with pytest.raises(SourceRefused, match="test_decoding"):
        drop(pipeline.settings)
    assert source.sql(SLOTS, name) == [(name, "test_decoding")]
    source.drop_slot(name)
    source.sql("SELECT pg_create_physical_replication_slot(%s)", name)
    with pytest.raises(SourceRefused, match="physical"):
        drop(pipeline.settings)
    assert source.sql(SLOTS, name) == [(name, None)]
    source.drop_slot(name)
    assert drop(pipeline.settings) == [f"publication {pipeline.settings.publication}"]


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


def test_what_a_drain_left_prepared_and_a_table_made_anew_since(source: Source, make_pipeline: MakePipeline) -> None:
    """Its column has another type now; both are in raw, under the names that they have there."""
    pipeline = make_pipeline()
    read_once(source, pipeline)
    pipeline.drain()
    source.sql("ALTER TABLE t ADD c int; INSERT INTO t VALUES (12, 0, 7)")
    killed(pipeline, DRAIN, "drain.after_prepared")
    source.sql("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, c text)")
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO t VALUES (13, 'seven')")
    pipeline.drain()
    assert ids_in_raw(pipeline) == [11, 12, 13]


def test_a_prepared_file_that_is_gone_is_read_again(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    source.sql("CREATE TABLE other (id int PRIMARY KEY)")
    read_once(source, pipeline)
    source.sql("INSERT INTO other VALUES (1)")
    pipeline.drain()
    source.sql("INSERT INTO t VALUES (12, 0); INSERT INTO other VALUES (2)")
    killed(pipeline, DRAIN, "drain.after_prepared")
    (window,) = pipeline.ledger.prepared()
    done, gone = sorted(window.tables, key=lambda write: write.table)
    commit_window(pipeline.lake, window.key, [done])
    Path(gone.path, gone.files[0].path).unlink()
    source.sql("INSERT INTO t VALUES (13, 0)")
    report = pipeline.drain()
    assert any("is missing from" in warning for warning in report.warnings)
    assert ids_in_raw(pipeline) == [11, 12, 13]
    assert sorted(pl.read_delta(pipeline.lake.raw(TableName("public", "other")))["id"].to_list()) == [1, 2]
    assert pipeline.ledger.prepared() == ()


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


def test_a_table_that_goes_while_it_is_read_asks_for_no_snapshot(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE TABLE other (id int PRIMARY KEY)")
    drains.bootstrap(pipeline.settings, progress=Silent())
    killed(pipeline, "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)", "snapshot.after_table")
    state = pipeline.ledger.tables()[TableName("public", "t")]
    pipeline.ledger.record_tables([type(state)(**{**_fields(state), "reading": "begun", "generation": None})])
    source.sql("DROP TABLE t")
    drains.bootstrap(pipeline.settings, progress=Silent())
    assert pipeline.ledger.tables()[TableName("public", "t")].state == "gone"
    pipeline.snapshot()
    assert snapshots.needed(pipeline.settings) == ()


def _fields(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in state.__dataclass_fields__}


def test_nothing_is_due_before_a_table_has_been_read_whole(source: Source, make_pipeline: MakePipeline) -> None:
    """A publish that would bring nothing is not asked for, or it would be at every look."""
    pipeline = make_pipeline()
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    pipeline.drain()
    source.sql("INSERT INTO t VALUES (1)")
    pipeline.drain()
    assert not publish_due(pipeline.ledger)
    pipeline.snapshot()
    pipeline.drain()
    assert publish_due(pipeline.ledger)


def test_patience_is_measured_from_the_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    patience = drains._Patience()
    broke = SourceUnavailable("gone")
    forward = windows.StreamBroke(broke, kept=object())  # pyright: ignore[reportArgumentType]
    for _ in range(5):  # a connection that lives for ten minutes at a time
        assert patience.pause(forward) is not None
        clock[0] += 600
    assert patience.pause(broke) is None, "ten minutes without getting any further"
    clock[0] = 0
    patience = drains._Patience()
    assert patience.pause(broke) is not None
    clock[0] += 59
    assert patience.pause(broke) is not None
    clock[0] += 2
    assert patience.pause(broke) is None


def test_a_lake_that_another_source_has_just_taken(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    pipeline.drain()
    recorded = pipeline.ledger.source()
    assert recorded is not None
    pipeline.ledger.record_source(LedgerSource(**{**_fields(recorded), "timeline": 2}))
    with pytest.raises(LakeError, match="taken by another pipeline"):
        pipeline.ledger.record_source(LedgerSource(**{**_fields(recorded), "system_identifier": recorded.system_identifier + 1}))


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


def test_dagsters_folder_is_no_part_of_what_is_true(source: Source, tmp_path: Path) -> None:
    """With DAGSTER_HOME wiped the next command goes on where the last one ended."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    commands = Commands(tmp_path, source.dsn)
    commands.json("drain")
    source.sql("INSERT INTO t VALUES (1)")
    assert commands.json("drain")["changes"] == 1
    source.sql("INSERT INTO t VALUES (2)")
    shutil.rmtree(tmp_path / "dagster")
    assert commands.json("drain")["changes"] == 1
    assert sorted(pl.read_delta(str(tmp_path / "lake/raw/public/t"))["id"].to_list()) == [1, 2]

"""Standbys that hold the slot back (synchronized_standby_slots) and are away: named, waited for a while, and nothing is read twice."""

from collections.abc import Callable

import pytest

from pgwal_pipeline import failpoints
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.postgres import standbys
from pgwal_pipeline_tests.pipelines import Pipeline, ids_in_raw
from pgwal_pipeline_tests.scenarios.connections.workload import assert_raw_is_whole, drained, fill, prepared
from pgwal_pipeline_tests.support import Source, fresh_source


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "_CHECK_EVERY", 0.5)
    monkeypatch.setattr(standbys, "_HELD", 2.0)


def test_a_source_that_waits_for_a_standby_that_is_away(
    make_server: Callable[..., Postgres], make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """The walsender answers all the time, and sends nothing: that is said, and given up in the end; later it goes on."""
    monkeypatch.setattr(drains, "_PATIENCE", 1.0)
    server = make_server(synchronized_standby_slots="standby_1")
    with fresh_source(server) as source:
        source.sql("CREATE TABLE t (id int PRIMARY KEY)")
        source.sql("SELECT pg_create_physical_replication_slot('standby_1', true)")
        pipeline = make_pipeline(source_dsn=source.dsn)
        pipeline.source = source
        drains.bootstrap(pipeline.settings, progress=Silent())
        assert source.value("SELECT failover FROM pg_replication_slots WHERE slot_name = %s", pipeline.settings.slot)
        source.sql("INSERT INTO t VALUES (1)")
        with pytest.raises(SourceUnavailable, match=r"synchronized_standby_slots \(standby_1\)"):
            pipeline.drain()
        source.sql("ALTER SYSTEM SET synchronized_standby_slots = ''")
        source.sql("SELECT pg_reload_conf()")
        server.settings.pop("synchronized_standby_slots")
        server.restart()
        source.close()
        pipeline.drain()
        assert ids_in_raw(pipeline) == [1]


def wait_for_standby(source: Source, name: str) -> None:
    """Have the server wait for the standby of slot `name` from now on; for none where that is empty."""
    source.sql(f"ALTER SYSTEM SET synchronized_standby_slots = '{name}'")
    source.sql("SELECT pg_reload_conf()")


def test_a_catch_up_whose_slot_is_not_moved_for_a_standby_that_is_away(
    make_server: Callable[..., Postgres], make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    """What has been read counts; the slot is confirmed by the next attempt, or the next drain, and nothing is read again."""
    with fresh_source(make_server()) as source:
        prepared(source)
        pipeline = make_pipeline(source_dsn=source.dsn, memory_budget="1MB", catchup_threshold=1 << 20, catchup_slots=1)
        pipeline.source = source
        drained(pipeline)
        passed: list[str] = []

        def hit(name: str) -> None:
            if name == "catch_up.all_read":
                passed.clear()
                wait_for_standby(source, "standby_1")
            passed.append(name)

        monkeypatch.setattr(failpoints, "hit", hit)
        fill(source, 60)
        report = drained(pipeline)
        assert len(report.windows) == 2
        (warning, ending) = report.warnings
        assert "slot" in warning
        assert "synchronized_standby_slots (standby_1) have not confirmed the WAL up to there; waiting for 2 s." in warning
        assert "bring them back, or take them out of synchronized_standby_slots" in ending
        assert passed.count("catch_up.all_read") == 1
        assert "drain.read" not in passed
        wait_for_standby(source, "")

        fill(source, 60, seed=1)
        monkeypatch.setattr(drains, "_PATIENCE", -1.0)
        with pytest.raises(SourceUnavailable, match=r"synchronized_standby_slots \(standby_1\).*bring them back"):
            pipeline.drain()
        counted = pipeline.ledger.windows()
        assert len(counted) == 5
        wait_for_standby(source, "")
        passed.clear()
        later = drained(pipeline)
        assert "catch_up.all_read" not in passed
        assert later.changes == 0
        assert assert_raw_is_whole(source, pipeline.settings.lake) == sum(window.changes for window in counted)

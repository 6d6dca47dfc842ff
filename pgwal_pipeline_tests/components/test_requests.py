import time
from dataclasses import replace

import dagster as dg

from pgwal_pipeline.components.requests import SourceReading, add_reading, busy, pausing, what_is_due, window_to_drain
from pgwal_pipeline.pipeline.reports import LagReading
from pgwal_pipeline.settings import Settings

SETTINGS = Settings(lag_threshold=1000, max_staleness=60)
QUIET = LagReading(slot_exists=True, lag_bytes=0, confirmed_flush_lsn=500, flush_lsn=500, insert_lsn=500, snapshot="10:10:")


def due(reading: LagReading, unread: float | None) -> str | None:
    return what_is_due(reading, unread, SETTINGS).job


def test_no_slot_asks_for_the_run_that_makes_it() -> None:
    assert due(replace(QUIET, slot_exists=False, confirmed_flush_lsn=None), None) == "sync"


def test_nothing_unread_asks_for_nothing_whatever_the_wal_does() -> None:
    assert due(QUIET, None) is None
    assert due(replace(QUIET, flush_lsn=100_000, lag_bytes=99_500), None) is None


def test_a_slot_that_holds_back_much_wal_follows_even_so() -> None:
    assert due(replace(QUIET, lag_bytes=17 << 20), None) == "sync"


def test_the_lag_passes_its_threshold() -> None:
    assert due(replace(QUIET, lag_bytes=999), 1.0) is None
    assert due(replace(QUIET, lag_bytes=1000), 1.0) == "sync"


def test_a_commit_has_waited_long_enough() -> None:
    assert due(replace(QUIET, lag_bytes=8), 59.9) is None
    assert due(replace(QUIET, lag_bytes=8), 60.0) == "sync"


def test_a_publish_that_is_due_by_itself() -> None:
    assert due(replace(QUIET, publish_due=True), None) == "publish"
    assert due(replace(QUIET, publish_due=True, drain_due=True), None) == "sync"
    assert due(replace(QUIET, publish_due=True, lag_bytes=8), 5.0) == "publish"
    assert due(replace(QUIET, publish_due=True, lag_bytes=1000), 5.0) == "sync"


def test_nothing_is_unread_where_the_slot_is_confirmed_to_the_end() -> None:
    readings, unread = add_reading((), QUIET, 1000.0)
    assert unread is None
    assert readings == (SourceReading("10:10:", 500, 1000.0),)


def test_unread_counts_from_the_first_reading_until_something_was_read() -> None:
    behind = replace(QUIET, insert_lsn=600, flush_lsn=600)
    readings, unread = add_reading((), behind, 1000.0)
    assert unread == 0.0
    readings, unread = add_reading(readings, behind, 1010.0)
    assert unread == 10.0
    readings, unread = add_reading(readings, replace(behind, confirmed_flush_lsn=600, insert_lsn=700, flush_lsn=700), 1020.0)
    assert unread is None
    assert readings == (SourceReading("10:10:", 600, 1020.0),)


def test_unread_counts_from_the_last_reading_at_which_all_was_read() -> None:
    readings = (SourceReading("10:10:", 500, 1000.0),)
    written = replace(QUIET, snapshot="11:11:", insert_lsn=600, flush_lsn=600, lag_bytes=100)
    readings, unread = add_reading(readings, written, 1010.0)
    assert unread == 10.0
    more = replace(written, snapshot="12:12:", insert_lsn=700, flush_lsn=700, lag_bytes=200)
    readings, unread = add_reading(readings, more, 1020.0)
    assert unread == 20.0
    # Drained up to the reading in the middle: what came after it is unread since then.
    readings, unread = add_reading(readings, replace(more, confirmed_flush_lsn=600, lag_bytes=100), 1030.0)
    assert unread == 20.0
    readings, unread = add_reading(readings, replace(more, confirmed_flush_lsn=700, lag_bytes=0), 1040.0)
    assert unread is None
    assert readings == (SourceReading("12:12:", 700, 1040.0),)


def test_checkpoints_move_the_wal_but_nothing_is_unread() -> None:
    readings = (SourceReading("10:10:", 500, 1000.0),)
    _, unread = add_reading(readings, replace(QUIET, insert_lsn=9_000, flush_lsn=9_000, lag_bytes=8_500), 2000.0)
    assert unread is None


def test_a_transaction_that_was_running_ends() -> None:
    readings, _ = add_reading((), replace(QUIET, snapshot="10:12:10"), 1000.0)
    _, unread = add_reading(readings, replace(QUIET, snapshot="12:12:", insert_lsn=501, flush_lsn=501), 1010.0)
    assert unread == 10.0


def test_a_busy_server_does_not_fill_the_cursor() -> None:
    readings: tuple[SourceReading, ...] = ()
    unread = None
    for number in range(100):
        reading = replace(QUIET, snapshot=f"{number}:{number}:", insert_lsn=1000 + number)
        readings, unread = add_reading(readings, reading, 1000.0 + number)
    assert len(readings) <= 9
    assert unread == 99.0


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    readings, _ = add_reading((), QUIET, 100_000.0)
    written = replace(QUIET, snapshot="12:12:", insert_lsn=9_000, flush_lsn=9_000, lag_bytes=8_500)
    readings, unread = add_reading(readings, written, 1000.0)
    assert unread == 0.0
    readings, unread = add_reading(readings, written, 1030.0)
    assert unread == 30.0


def test_the_window_asked_for() -> None:
    behind = replace(QUIET, flush_lsn=0x2000, confirmed_flush_lsn=0x1000)
    assert window_to_drain(QUIET) is None
    assert window_to_drain(behind) == "0000000000002000"
    assert window_to_drain(behind, "0000000000001800") == "0000000000001800"
    assert window_to_drain(behind, "0000000000001000") == "0000000000002000"
    assert window_to_drain(replace(behind, slot_exists=False, confirmed_flush_lsn=None), "0000000000001800") == "0000000000002000"


def run(instance: dg.DagsterInstance, *, fails: bool, name: str = "sync") -> None:
    @dg.op
    def step() -> None:
        if fails:
            raise dg.Failure("no")

    graph = dg.GraphDefinition(name=name, node_defs=[step])
    graph.to_job(tags={"pgwal/slot": "s"}).execute_in_process(instance=instance, raise_on_error=False)


def test_failures_in_a_row_ask_for_longer_pauses(instance: dg.DagsterInstance) -> None:
    def left(after: float) -> str | None:
        return pausing(instance, "pgwal/slot", "s", {"sync"}, time.time() + after)

    run(instance, fails=False)
    assert left(0) is None
    run(instance, fails=True)
    assert "The last run failed" in (left(5) or "")
    assert left(11) is None
    run(instance, fails=True)
    assert "The last 2 runs failed" in (left(15) or "")
    assert left(21) is None
    assert left(-3600) is None, "by a clock that was set back since"
    run(instance, fails=True, name="maintenance")
    assert left(21) is None
    run(instance, fails=False)
    assert left(0) is None


def test_busy_names_the_run(instance: dg.DagsterInstance) -> None:
    @dg.job
    def sync() -> None: ...

    assert busy(instance, "pgwal/slot", "s") is None
    queued = instance.create_run_for_job(sync, tags={"pgwal/slot": "s"}, status=dg.DagsterRunStatus.STARTING)
    assert busy(instance, "pgwal/slot", "s") == f"Run {queued.run_id.split('-')[0]} of sync is starting."
    assert busy(instance, "pgwal/slot", "other") is None

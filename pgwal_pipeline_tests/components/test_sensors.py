import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.components.jobs import Jobs, Steps, build_jobs
from pgwal_pipeline.components.processes import process_tags
from pgwal_pipeline.components.requests import SOURCE_READING
from pgwal_pipeline.components.resources import ReplicationSlot
from pgwal_pipeline.components.sensors import _Again, evaluate_hourly_sync, evaluate_lag, evaluate_new_tables, watch_lag
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.pipeline.reports import LagReading
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.projects import table

SLOT = dg.AssetKey(["slot", "pgwal"])
START = LagReading(
    slot_exists=True, lag_bytes=0, confirmed_flush_lsn=0x1000, flush_lsn=0x1000, insert_lsn=0x1000, snapshot="7:7:", wal_status="reserved"
)


@dataclass
class FakeSlot:
    """Stands for the ReplicationSlot resource: readings that the test chooses."""

    settings: Settings
    reading: LagReading = START
    away: bool = False
    unknown: bool = False
    waiting: tuple[TableName, ...] = ()
    older: Mapping[TableName, str] = field(default_factory=dict)
    changed: bool = True
    looked: list[str] = field(default_factory=list)

    def lag(self) -> LagReading:
        if self.away:
            raise SourceUnavailable("The source me@there:5432/db cannot be reached.")
        return self.reading

    def present(self, runs: Collection[str]) -> set[str]:
        return set(runs)

    def flushed(self) -> int:
        return self.lag().flush_lsn

    def has_changes(self, since: str) -> bool:
        self.looked.append(since)
        return self.changed

    def none_joined(self) -> bool:
        return self.unknown

    def needs_snapshot(self) -> tuple[TableName, ...]:
        return self.waiting

    def blocked(self, tables: Collection[TableName]) -> Mapping[TableName, str]:
        return {table: self.older[table] for table in tables if table in self.older}

    def writes(self, size: int = 8) -> None:
        """The source commits a transaction of `size` bytes of WAL."""
        was = self.reading
        xid = int(was.snapshot.split(":")[0]) + 1
        end = was.flush_lsn + size
        self.reading = replace(was, flush_lsn=end, insert_lsn=end, lag_bytes=was.lag_bytes + size, snapshot=f"{xid}:{xid}:")

    def is_drained(self, end: int) -> None:
        self.reading = replace(self.reading, confirmed_flush_lsn=end, lag_bytes=self.reading.flush_lsn - end)


@pytest.fixture
def source(tmp_path: Path) -> CdcSource:
    settings = Settings(lake=str(tmp_path), lag_threshold=1000, max_staleness=60)
    return CdcSource("", settings, AssetSpecs(AssetNames("pgwal"), Lake(settings.lake)), (table("public.orders"),))


@pytest.fixture
def slot(source: CdcSource) -> FakeSlot:
    return FakeSlot(source.settings)


SourceReading = Callable[[dg.SensorEvaluationContext, CdcSource, Jobs, ReplicationSlot], dg.SensorResult]


class Ticks:
    """A sensor ticking by a clock of the test's own, as the daemon would let it: with the cursor that it left."""

    def __init__(
        self, look: SourceReading, source: CdcSource, instance: dg.DagsterInstance, slot: FakeSlot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.look, self.source, self.instance, self.slot = look, source, instance, slot
        self.jobs = build_jobs(source, Steps.of(source))
        self.cursor: str | None = None
        self.now = 1_800_000_000.0
        monkeypatch.setattr(
            "pgwal_pipeline.components.sensors.time", SimpleNamespace(time=lambda: self.now, monotonic=time.monotonic, sleep=time.sleep)
        )

    def __call__(self, after: float = 10.0) -> dg.SensorResult:
        self.now += after
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        result = self.look(context, self.source, self.jobs, cast(ReplicationSlot, self.slot))
        self.cursor = result.cursor or self.cursor
        return result


@pytest.fixture
def ticks(source: CdcSource, slot: FakeSlot, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Ticks:
    return Ticks(evaluate_lag, source, instance, slot, monkeypatch)


def requests(result: dg.SensorResult) -> list[tuple[str | None, str | None, str | None]]:
    return [(request.job_name, request.partition_key, request.run_key) for request in result.run_requests or []]


def reason(result: dg.SensorResult) -> str:
    assert result.skip_reason is not None
    assert result.skip_reason.skip_message is not None
    return result.skip_reason.skip_message


def test_with_no_slot_the_run_that_makes_it_is_asked_for(ticks: Ticks, slot: FakeSlot) -> None:
    slot.reading = replace(START, slot_exists=False, confirmed_flush_lsn=None, wal_status=None)
    result = ticks()
    assert requests(result) == [("sync", "0000000000001000", "0000000000001000#1")]
    assert result.dynamic_partitions_requests == [
        dg.DynamicPartitionsDefinition(name="wal_windows").build_add_request(["0000000000001000"])
    ]


def test_a_quiet_server_gets_no_runs(ticks: Ticks, slot: FakeSlot) -> None:
    for _ in range(200):
        assert "Nothing is unread" in reason(ticks(30))
        # Checkpoints, and what the server logs of itself.
        slot.reading = replace(slot.reading, flush_lsn=slot.reading.flush_lsn + 100, insert_lsn=slot.reading.insert_lsn + 100)


def test_a_server_where_only_others_write_gets_no_runs(ticks: Ticks, slot: FakeSlot) -> None:
    ticks()
    slot.changed = False
    for _ in range(100):
        slot.writes(1)
        assert "Nothing is unread" in reason(ticks(90))
    assert slot.looked == ["7:7:"] * 100
    slot.changed = True
    slot.writes(1)
    assert [job for job, *_ in requests(ticks(5))] == ["sync"]


def test_a_long_backlog_is_read_without_a_look(ticks: Ticks, slot: FakeSlot) -> None:
    ticks()
    slot.changed = False
    slot.writes(999)
    assert "Nothing is unread" in reason(ticks(90))
    slot.writes(1)
    slot.reading = replace(slot.reading, lag_bytes=32 << 20)
    assert [job for job, *_ in requests(ticks(5))] == ["sync"]
    assert len(slot.looked) == 1


def test_a_publish_is_due_where_nothing_else_is(ticks: Ticks, slot: FakeSlot) -> None:
    ticks()
    slot.changed = False
    slot.writes(1)
    slot.reading = replace(slot.reading, publish_due=True)
    assert [job for job, *_ in requests(ticks(90))] == ["publish"]


def test_a_table_that_was_read_at_a_later_lsn_than_the_slot_gets_a_drain(ticks: Ticks, slot: FakeSlot) -> None:
    """No commit may follow the reading for hours, and without a drain past it the table is not published."""
    ticks()
    slot.changed = False
    slot.writes(1)
    slot.reading = replace(slot.reading, drain_due=True)
    assert [job for job, *_ in requests(ticks(5))] == ["sync"]


def test_a_tick_looks_again_when_a_run_ends(source: CdcSource, slot: FakeSlot, instance: dg.DagsterInstance) -> None:
    jobs = build_jobs(source, Steps.of(source))
    first = watch_lag(_Again(instance, None), source, jobs, cast(ReplicationSlot, slot), seconds=0)
    slot.writes(2000)
    run = instance.create_run_for_job(jobs.sync, tags=source.slot_tags | process_tags(), status=dg.DagsterRunStatus.STARTED)
    threading.Timer(1.0, lambda: instance.report_run_canceled(run)).start()
    began = time.monotonic()
    result = watch_lag(_Again(instance, first.cursor), source, jobs, cast(ReplicationSlot, slot), seconds=20)
    # The run was cancelled, after which there is a pause; without one it would be asked for now.
    assert "The last run failed" in reason(result)
    assert 0.9 < time.monotonic() - began < 10


def test_a_tick_waits_for_a_commit_to_be_due_and_else_ends_at_once(source: CdcSource, slot: FakeSlot, instance: dg.DagsterInstance) -> None:
    slot.settings = source.settings.model_copy(update={"max_staleness": 1.5})
    jobs = build_jobs(source, Steps.of(source))

    def tick(cursor: str | None, seconds: float) -> tuple[dg.SensorResult, float]:
        began = time.monotonic()
        result = watch_lag(_Again(instance, cursor), source, jobs, cast(ReplicationSlot, slot), seconds)
        return result, time.monotonic() - began

    quiet, took = tick(None, 20)
    assert took < 1
    slot.writes()
    early, took = tick(quiet.cursor, 0.5)
    assert took < 1
    assert not early.run_requests
    due, took = tick(quiet.cursor, 20)
    assert took < 10
    assert [job for job, *_ in requests(due)] == ["sync"]


def test_a_commit_is_read_before_it_is_stale(ticks: Ticks, slot: FakeSlot) -> None:
    ticks()
    slot.writes(8)
    assert "below the threshold" in reason(ticks(20))
    assert "below the threshold" in reason(ticks(20))
    assert requests(ticks(20)) == [("sync", "0000000000001008", "0000000000001008#1")]
    slot.is_drained(0x1008)
    assert "Nothing is unread" in reason(ticks(20))


def test_a_lag_past_the_threshold_is_read_at_once(ticks: Ticks, slot: FakeSlot) -> None:
    ticks()
    slot.writes(1000)
    assert requests(ticks(1)) == [("sync", "00000000000013E8", "00000000000013E8#1")]


def run(instance: dg.DagsterInstance, *, fails: bool) -> None:
    @dg.op
    def step() -> None:
        if fails:
            raise dg.Failure("no")

    job = dg.GraphDefinition(name="sync", node_defs=[step]).to_job(tags={"pgwal/slot": "pgwal"})
    job.execute_in_process(instance=instance, raise_on_error=False)


def test_after_a_failure_the_same_window_is_asked_for_again_later(
    ticks: Ticks, slot: FakeSlot, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks()
    slot.writes(1000)
    (first,) = requests(ticks())
    run(instance, fails=True)
    slot.writes(1000)
    assert "The last run failed; the next is requested in" in reason(ticks())
    monkeypatch.setattr("pgwal_pipeline.components.requests.time", SimpleNamespace(time=lambda: time.time() + 60))
    (second,) = requests(ticks())
    assert second == ("sync", first[1], f"{first[1]}#2")
    slot.is_drained(0x13E8)
    run(instance, fails=False)
    (third,) = requests(ticks())
    assert third == ("sync", "00000000000017D0", "00000000000017D0#3")


def test_nothing_is_asked_for_while_a_run_is_at_work(ticks: Ticks, slot: FakeSlot, instance: dg.DagsterInstance) -> None:
    @dg.job
    def verify() -> None: ...

    ticks()
    slot.writes(1000)
    working = instance.create_run_for_job(verify, tags={"pgwal/slot": "pgwal"}, status=dg.DagsterRunStatus.STARTED)
    assert f"Run {working.run_id.split('-')[0]} of verify is started." in reason(ticks())
    instance.report_run_canceled(working)
    assert requests(ticks())


def test_a_source_that_is_away_is_waited_for(ticks: Ticks, slot: FakeSlot) -> None:
    ticks()
    slot.writes(1000)
    slot.away = True
    with pytest.raises(SourceUnavailable, match="The source me@there:5432/db cannot be reached"):
        ticks()
    slot.away = False
    assert requests(ticks())


def test_a_publish_that_is_due_is_asked_for_by_itself(ticks: Ticks, slot: FakeSlot) -> None:
    slot.reading = replace(START, publish_due=True)
    assert requests(ticks()) == [("publish", None, "publish 0000000000001000#1")]
    assert requests(ticks()) == [("publish", None, "publish 0000000000001000#2")]


def test_the_first_tick_knows_what_the_last_drain_saw(ticks: Ticks, slot: FakeSlot, instance: dg.DagsterInstance) -> None:
    look = {"snapshot": "7:7:", "insert_lsn": 0x1000, "at": 1_700_000_000.0}
    instance.report_runless_asset_event(dg.AssetObservation(SLOT, metadata={SOURCE_READING: dg.MetadataValue.json(look)}))
    slot.reading = replace(START, flush_lsn=0x1100, insert_lsn=0x1100, lag_bytes=0x100)
    for _ in range(10):
        assert "Nothing is unread" in reason(ticks(30))


def test_health_is_reported_when_it_changes_and_now_and_then(ticks: Ticks, slot: FakeSlot) -> None:
    def health(result: dg.SensorResult) -> list[bool]:
        return [event.passed for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]

    def fresh(result: dg.SensorResult) -> bool:
        return any(isinstance(event, dg.AssetMaterialization) for event in result.asset_events)

    first = ticks()
    assert health(first) == [True]
    assert fresh(first)
    assert [health(ticks(30)) for _ in range(9)] == [[]] * 9
    assert health(ticks(30)) == [True]
    slot.reading = replace(slot.reading, wal_status="lost")
    assert health(ticks(10)) == [False]
    assert health(ticks(10)) == []


def test_the_slot_is_not_fresh_while_commits_wait_too_long(ticks: Ticks, slot: FakeSlot, instance: dg.DagsterInstance) -> None:
    @dg.job
    def sync() -> None: ...

    ticks()
    slot.writes(8)
    instance.create_run_for_job(sync, tags={"pgwal/slot": "pgwal"}, status=dg.DagsterRunStatus.STARTED)
    results = [ticks(60) for _ in range(20)]
    assert any(result.asset_events for result in results)
    assert not any(isinstance(event, dg.AssetMaterialization) for result in results for event in result.asset_events)


def test_the_slot_is_not_fresh_while_a_publish_waits_too_long(ticks: Ticks, slot: FakeSlot, instance: dg.DagsterInstance) -> None:
    @dg.job
    def sync() -> None: ...

    def fresh(results: list[dg.SensorResult]) -> list[float]:
        return [
            number
            for number, result in enumerate(results)
            if any(isinstance(event, dg.AssetMaterialization) for event in result.asset_events)
        ]

    ticks()
    slot.reading = replace(START, publish_due=True)
    instance.create_run_for_job(sync, tags={"pgwal/slot": "pgwal"}, status=dg.DagsterRunStatus.STARTED)
    late = 2 * 60 + 60  # seconds
    assert max(fresh([ticks(20) for _ in range(60)]), default=0) <= late // 20
    slot.reading = START
    assert fresh([ticks(20)]) == [0]


def test_a_cursor_of_another_version_does_no_harm(ticks: Ticks) -> None:
    for strange in ("[]", "{", json.dumps({"unknown": 1}), json.dumps({"readings": [{"a": 1}]})):
        ticks.cursor = strange
        assert "Nothing is unread" in reason(ticks())


def test_new_tables_are_asked_for_until_they_are_read(
    source: CdcSource, slot: FakeSlot, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = Ticks(evaluate_new_tables, source, instance, slot, monkeypatch)
    assert reason(ticks()) == "Every table of the publication has been read."
    slot.unknown = True
    assert reason(ticks()) == "No table is known yet; the first sync finds them."
    slot.unknown = False
    slot.waiting = (TableName("public", "orders"),)
    assert requests(ticks()) == [(None, None, "snapshot 0000000000001000#1")]
    assert requests(ticks()) == [(None, None, "snapshot 0000000000001000#2")]
    slot.older = {TableName("public", "orders"): "It waits for pid 7."}
    assert reason(ticks()) == "To be read: public.orders. It waits for pid 7."
    slot.older = {}
    for waiting in ((), slot.waiting):
        slot.waiting, slot.away = waiting, True
        with pytest.raises(SourceUnavailable, match="cannot be reached"):
            ticks()
        slot.away = False

    @dg.job
    def snapshot() -> None: ...

    instance.create_run_for_job(snapshot, tags={"pgwal/snapshot": "pgwal"}, status=dg.DagsterRunStatus.STARTED)
    assert reason(ticks()).startswith("To be read: public.orders. Run ")


def test_a_cursor_of_something_else_asks_for_new_tables_all_the_same(
    source: CdcSource, slot: FakeSlot, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = Ticks(evaluate_new_tables, source, instance, slot, monkeypatch)
    slot.waiting = (TableName("public", "orders"),)
    for strange in ("[]", "one", '{"attempt": 3}'):
        ticks.cursor = strange
        assert requests(ticks()) == [(None, None, "snapshot 0000000000001000#1")]
    assert ticks.cursor == "1"


def test_the_hourly_sync_asks_only_for_what_is_unread(source: CdcSource, slot: FakeSlot, instance: dg.DagsterInstance) -> None:
    def evaluate() -> object:
        return evaluate_hourly_sync(instance, source, cast(ReplicationSlot, slot))

    assert evaluate() == dg.SkipReason("Nothing is unread.")
    slot.writes(8)
    asked = evaluate()
    assert isinstance(asked, dg.RunRequest)
    assert asked.partition_key == "0000000000001008"
    assert instance.get_dynamic_partitions("wal_windows") == ["0000000000001008"]
    slot.away = True
    with pytest.raises(SourceUnavailable, match="cannot be reached"):
        evaluate()

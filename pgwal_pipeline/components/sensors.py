"""What requests runs: the lag sensor, the sensor for tables that joined, and the schedules."""

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import dagster as dg

from pgwal_pipeline.components.checks import health_evaluation, judge_health
from pgwal_pipeline.components.jobs import Jobs
from pgwal_pipeline.components.processes import end_dead_runs
from pgwal_pipeline.components.requests import (
    SourceReading,
    add_reading,
    busy,
    pausing,
    reading_of_last_drain,
    what_is_due,
    window_to_drain,
    worth_a_look,
)
from pgwal_pipeline.components.source import SLOT_TAG, SNAPSHOT_TAG, CdcSource
from pgwal_pipeline.pipeline.reports import LagReading
from pgwal_pipeline.values.lsn import window_key

if TYPE_CHECKING:
    from pgwal_pipeline.components.resources import ReplicationSlot

_NAMES_SHOWN = 10
_WATCHED = 4.5  # seconds that a tick looks again; the next one begins five seconds after it began
_POLLED = 0.5  # seconds between two looks whether a run has ended
_REPORT_SECONDS = 300.0  # between two reports of an unchanged verdict


@dataclass(frozen=True)
class LagCursor:
    """What the lag sensor keeps from tick to tick.

    `key` is the window it requested last; `attempt` counts its requests, so that no two share a run key. `readings`: see
    `requests.SourceReading`. `flush_lsn` and `at` (Unix seconds) are the last reading, from which the WAL rate is computed. `verdict` and
    `reported_at` are the health it reported last, and when. `due_since` is since when a publish has been due, None if none is.
    """

    key: str | None = None
    attempt: int = 0
    readings: tuple[SourceReading, ...] = ()
    flush_lsn: int | None = None
    at: float = 0.0
    verdict: str = ""
    reported_at: float = 0.0
    due_since: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> "LagCursor":
        """Parse what `dump` wrote; return a new cursor if `text` is None or written by another version."""
        try:
            values: dict[str, Any] = dict(json.loads(text or "{}"))
            values["readings"] = tuple(SourceReading(**reading) for reading in values.get("readings", ()))
            return cls(**values)
        except (ValueError, TypeError):
            return cls()

    def dump(self) -> str:
        """Return the cursor as JSON text."""
        return json.dumps(asdict(self))


def build_lag_sensor(source: CdcSource, jobs: Jobs) -> dg.SensorDefinition:
    """Build the sensor `wal_lag`; see `evaluate_lag`."""

    @dg.sensor(
        name=source.named("wal_lag"),
        description="Requests a sync when the slot lags by PGWAL_LAG_THRESHOLD, or a commit is unread for PGWAL_MAX_STALENESS.",
        jobs=[jobs.sync, jobs.publish],
        minimum_interval_seconds=max(1, min(20, round(source.settings.max_staleness / 3))),
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={source.slot_key},
    )
    def wal_lag(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return watch_lag(context, source, jobs, getattr(context.resources, source.slot_key), _WATCHED)

    return wal_lag


class Tick(Protocol):
    """What a tick has: Dagster's instance, and the cursor of the tick before it."""

    @property
    def instance(self) -> dg.DagsterInstance:
        """Dagster's instance."""
        ...

    @property
    def cursor(self) -> str | None:
        """The cursor, None at first."""
        ...


@dataclass(frozen=True)
class _Again:
    """A look within a tick that is not its first one."""

    instance: dg.DagsterInstance
    cursor: str | None


def watch_lag(tick: Tick, source: CdcSource, jobs: Jobs, slot: "ReplicationSlot", seconds: float) -> dg.SensorResult:
    """Do as `evaluate_lag` does, and look again within the tick, for `seconds`, when a run ends or a commit gets too old meanwhile.

    Dagster's ticks are five seconds apart, which is half of what a change takes to `current`. Where nothing is unread the tick ends at
    once, as it does during the pause after failures.
    """
    until = time.monotonic() + seconds
    events: list[Any] = []
    while True:
        result, wait = _look(tick, source, jobs, slot)
        events += result.asset_events
        if wait is None or time.monotonic() + wait > until:
            return result._replace(asset_events=events)
        if wait:
            time.sleep(wait)
        else:
            while time.monotonic() < until and busy(tick.instance, SLOT_TAG, source.tag) is not None:
                time.sleep(_POLLED)
        if time.monotonic() >= until:
            return result._replace(asset_events=events)
        tick = _Again(tick.instance, result.cursor)


def evaluate_lag(tick: Tick, source: CdcSource, jobs: Jobs, slot: "ReplicationSlot") -> dg.SensorResult:
    """Request a sync when the lag or its age reaches its limit, or a publish when only that is due; report the slot's health.

    Nothing is requested while a run works on the slot, or during the pause after failures; the skip reason says which. Errors that prevent
    a reading (the source is away, the DSN cannot be read) are raised: the tick fails, so that an alert can watch for it.
    """
    return _look(tick, source, jobs, slot)[0]


def _look(tick: Tick, source: CdcSource, jobs: Jobs, slot: "ReplicationSlot") -> tuple[dg.SensorResult, float | None]:
    """Return what `evaluate_lag` does, and in how many seconds a run may be due: 0 when a run that is at work ends, None if not soon."""
    cursor = LagCursor.parse(tick.cursor)
    settings = slot.settings
    reading = slot.lag()
    # At every tick, even if nothing is due: runs requested by others wait in the queue for dead ones.
    end_dead_runs(tick.instance, [(SLOT_TAG, source.tag), (SNAPSHOT_TAG, source.tag)], slot.present)
    now = time.time()
    readings, unread = add_reading(cursor.readings or _first_reading(tick.instance, source), reading, now)
    due = what_is_due(reading, unread, settings)
    at_work = busy(tick.instance, SLOT_TAG, source.tag) if due.job is not None else None
    if due.job == "sync" and at_work is None and (since := worth_a_look(readings, reading)) is not None and not slot.has_changes(since):
        unread = None
        due = what_is_due(reading, unread, settings)
    cursor = replace(cursor, due_since=min(cursor.due_since or now, now) if reading.publish_due else None)
    # Late: a commit has been unread or unpublished for so much longer than PGWAL_MAX_STALENESS that runs do not keep up with the source.
    waited = max(unread or 0.0, now - (cursor.due_since or now))
    late = not reading.slot_exists or waited > 2 * settings.max_staleness + 60.0
    events, cursor = _report_slot(source, reading, replace(cursor, readings=readings), now, late=late)

    def nothing(reason: str, wait: float | None) -> tuple[dg.SensorResult, float | None]:
        return dg.SensorResult(skip_reason=reason, cursor=cursor.dump(), asset_events=events), wait

    if due.job is None:
        return nothing(due.reason, None if unread is None else max(_POLLED, settings.max_staleness - unread))
    if at_work is not None:
        return nothing(f"{due.reason} {at_work}", 0.0)
    if (held := _pausing(tick.instance, source, jobs)) is not None:
        return nothing(f"{due.reason} {held}", None)
    cursor = replace(cursor, attempt=cursor.attempt + 1)
    if due.job == "publish":
        # The LSN keeps the run key unique even after the cursor, and with it the count, was reset.
        request = dg.RunRequest(job_name=jobs.publish.name, run_key=f"publish {window_key(reading.flush_lsn)}#{cursor.attempt}")
        return dg.SensorResult(run_requests=[request], cursor=cursor.dump(), asset_events=events), None
    key = window_to_drain(reading, cursor.key)
    if key is None:
        return nothing(f"{due.reason} None of it is flushed yet.", None)
    result = dg.SensorResult(
        run_requests=[dg.RunRequest(job_name=jobs.sync.name, partition_key=key, run_key=f"{key}#{cursor.attempt}")],
        dynamic_partitions_requests=[source.windows.build_add_request([key])],
        cursor=replace(cursor, key=key).dump(),
        asset_events=events,
    )
    return result, None


def _pausing(instance: dg.DagsterInstance, source: CdcSource, jobs: Jobs) -> str | None:
    return pausing(instance, SLOT_TAG, source.tag, {jobs.sync.name, jobs.drain.name, jobs.publish.name})


def _first_reading(instance: dg.DagsterInstance, source: CdcSource) -> tuple[SourceReading, ...]:
    reading = reading_of_last_drain(instance, source.names.slot)
    return () if reading is None else (reading,)


def _report_slot(source: CdcSource, reading: LagReading, cursor: LagCursor, now: float, *, late: bool) -> tuple[list[Any], LagCursor]:
    """Return the slot's health as events without a run: at once when its verdict changes, else every few minutes.

    While nothing is late the slot is also materialized, which keeps it fresh under its freshness policy.
    """
    rate = None
    if cursor.flush_lsn is not None and now > cursor.at and reading.flush_lsn >= cursor.flush_lsn:
        rate = (reading.flush_lsn - cursor.flush_lsn) / (now - cursor.at)
    verdict = judge_health(source.settings.slot, reading, rate)
    shown = f"{verdict.passed}/{verdict.severity.value}/{late}"
    cursor = replace(cursor, flush_lsn=reading.flush_lsn, at=now)
    if shown == cursor.verdict and 0 <= now - cursor.reported_at < _REPORT_SECONDS:
        return [], cursor
    events: list[Any] = [health_evaluation(source, verdict)]
    if not late:
        events.append(dg.AssetMaterialization(source.names.slot, metadata=verdict.metadata))
    return events, replace(cursor, verdict=shown, reported_at=now)


def build_new_table_sensor(source: CdcSource, jobs: Jobs) -> dg.SensorDefinition:
    """Build the sensor `new_tables`; see `evaluate_new_tables`."""

    @dg.sensor(
        name=source.named("new_tables"),
        description="Requests a snapshot of the tables that have joined the publication and are not read whole yet.",
        job=jobs.snapshot,
        minimum_interval_seconds=15,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={source.slot_key},
    )
    def new_tables(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return evaluate_new_tables(context, source, jobs, getattr(context.resources, source.slot_key))

    return new_tables


def evaluate_new_tables(context: dg.SensorEvaluationContext, source: CdcSource, jobs: Jobs, slot: "ReplicationSlot") -> dg.SensorResult:
    """Request a snapshot run while tables of the publication are not read whole yet: one run at a time, with pauses after failures.

    None is requested while all these tables wait for older transactions. Errors that prevent a reading are raised, and the tick fails.
    """
    attempt = _attempt(context.cursor)
    position = slot.flushed()
    waiting = slot.needs_snapshot()
    if not waiting:
        unknown = slot.none_joined()
        reason = "No table is known yet; the first sync finds them." if unknown else "Every table of the publication has been read."
        return dg.SensorResult(skip_reason=reason)
    blocked = slot.blocked(waiting)
    if len(blocked) == len(waiting):
        return dg.SensorResult(skip_reason=f"To be read: {', '.join(map(str, waiting[:_NAMES_SHOWN]))}. {next(iter(blocked.values()))}")
    end_dead_runs(context.instance, [(SNAPSHOT_TAG, source.tag)], slot.present)
    held = busy(context.instance, SNAPSHOT_TAG, source.tag) or pausing(context.instance, SNAPSHOT_TAG, source.tag, {jobs.snapshot.name})
    names = ", ".join(map(str, waiting[:_NAMES_SHOWN])) + (", …" if len(waiting) > _NAMES_SHOWN else "")
    if held is not None:
        return dg.SensorResult(skip_reason=f"To be read: {names}. {held}")
    request = dg.RunRequest(run_key=f"snapshot {window_key(position)}#{attempt + 1}")
    return dg.SensorResult(run_requests=[request], cursor=str(attempt + 1))


def _attempt(cursor: str | None) -> int:
    """Return how many snapshots were requested, from the cursor; 0 if there is none or another version wrote it."""
    try:
        return int(cursor or 0)
    except ValueError:
        return 0


def build_schedules(source: CdcSource, jobs: Jobs) -> list[dg.ScheduleDefinition]:
    """Build the schedules: a sync every hour, in case the lag sensor is off, and a comparison each night, which is off at first."""

    @dg.schedule(
        name=source.named("hourly_sync"),
        description="A fallback for the lag sensor: requests a sync if anything is unread.",
        job=jobs.sync,
        cron_schedule="7 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        required_resource_keys={source.slot_key},
    )
    def hourly_sync(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        return evaluate_hourly_sync(context.instance, source, getattr(context.resources, source.slot_key))

    nightly_verify = dg.ScheduleDefinition(
        name=source.named("nightly_verify"),
        description="Compares current with the source, for about PGWAL_VERIFY_BUDGET: each table whole within PGWAL_VERIFY_EVERY.",
        job=jobs.verify,
        cron_schedule="23 2 * * *",
        default_status=dg.DefaultScheduleStatus.STOPPED,
    )
    return [hourly_sync, nightly_verify]


def evaluate_hourly_sync(instance: dg.DagsterInstance, source: CdcSource, slot: "ReplicationSlot") -> dg.RunRequest | dg.SkipReason:
    """Request a sync if anything is unread. The window's partition is added here, since a schedule's tick cannot request one.

    Errors that prevent a reading, such as SourceUnavailable, are raised, and the tick fails.
    """
    reading = slot.lag()
    if reading.slot_exists and add_reading(_first_reading(instance, source), reading, time.time())[1] is None:
        return dg.SkipReason("Nothing is unread.")
    end_dead_runs(instance, [(SLOT_TAG, source.tag)], slot.present)
    held = busy(instance, SLOT_TAG, source.tag)
    key = window_to_drain(reading)
    if held is not None or key is None:
        return dg.SkipReason(held or "Nothing is flushed yet.")
    instance.add_dynamic_partitions(source.windows_name, [key])
    return dg.RunRequest(partition_key=key)

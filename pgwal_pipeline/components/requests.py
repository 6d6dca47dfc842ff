"""When a run is due: rules over the slot's readings and past runs, shared by sensors and schedules."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import dagster as dg

from pgwal_pipeline.pipeline.reports import LagReading
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import parse_window_key, window_key

SOURCE_READING = "pgwal/source_reading"
"""The metadata entry of the slot's observations in which a drain records its reading of the source from before it read the slot."""

ACTIVE = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)

# An idle server still writes a little WAL of its own. The slot need not follow for less than this.
IDLE_BYTES = 16 << 20

_FIRST_PAUSE = 10.0
_LONGEST_PAUSE = 900.0
_REMEMBERED = 9
_MOST_READINGS = 8
_OBSERVATIONS = 20


@dataclass(frozen=True)
class SourceReading:
    """What the source showed at the time `at` (Unix seconds): its `snapshot`, and the WAL's end `insert_lsn`, read after the snapshot.

    Once the slot is confirmed at `insert_lsn`, every transaction that had ended by `at` is read. From then on nothing is unread for as long
    as the source shows the same `snapshot`, even if checkpoints and the like add WAL.
    """

    snapshot: str
    insert_lsn: int
    at: float


def add_reading(readings: Sequence[SourceReading], reading: LagReading, now: float) -> tuple[tuple[SourceReading, ...], float | None]:
    """Add `reading` to `readings`; return those worth keeping, oldest first, and for how many seconds a commit may have been unread.

    The seconds are None if nothing is unread. They count from the newest entry that the slot has read, or from the oldest one if it has
    read none. An entry from the future was made before the clock was set back, and counts from `now` on.
    """
    readings = [replace(earlier, at=min(earlier.at, now)) for earlier in readings]
    confirmed = reading.confirmed_flush_lsn if reading.confirmed_flush_lsn is not None else -1
    if reading.insert_lsn <= confirmed:
        return (SourceReading(reading.snapshot, reading.insert_lsn, now),), None
    read = [earlier for earlier in readings if earlier.insert_lsn <= confirmed][-1:]
    if read and read[0].snapshot == reading.snapshot:
        return (replace(read[0], at=now),), None
    waiting = [earlier for earlier in readings if earlier.insert_lsn > confirmed]
    if all(earlier.snapshot != reading.snapshot for earlier in waiting):
        waiting = [*waiting[: _MOST_READINGS - 1], SourceReading(reading.snapshot, reading.insert_lsn, now)]
    since = [*read, *waiting][0].at
    return (*read, *waiting), max(0.0, now - since)


@dataclass(frozen=True)
class Due:
    """The job to run, `sync`, `publish` or None, and the reason as a sentence."""

    job: Literal["sync", "publish"] | None
    reason: str


def what_is_due(reading: LagReading, unread_seconds: float | None, settings: Settings) -> Due:
    """Decide which job is due, given that a commit may have been unread for `unread_seconds` (None: nothing is unread).

    A sync is due when the slot does not exist, when a commit may have been unread for PGWAL_MAX_STALENESS, when the lag has reached
    PGWAL_LAG_THRESHOLD and part of it is unread commits, or when a table that has been read whole waits for a drain. A publish alone is
    due when raw or a snapshot holds more than the last publish used.
    """
    if not reading.slot_exists:
        return Due("sync", f"Slot {settings.slot} does not exist yet.")
    lag = f"{reading.lag_bytes:,} bytes of lag"
    if unread_seconds is None and reading.lag_bytes >= max(settings.lag_threshold, IDLE_BYTES):
        return Due("sync", f"{lag} without a commit: the slot is moved on so that the source can remove WAL.")
    if unread_seconds is not None and reading.lag_bytes >= settings.lag_threshold:
        return Due("sync", f"{lag}, the threshold is {settings.lag_threshold:,}.")
    if unread_seconds is not None and unread_seconds >= settings.max_staleness:
        return Due("sync", f"A commit may have been unread for {unread_seconds:.0f} s.")
    if reading.drain_due:
        return Due("sync", "A table has been read whole at a later LSN than the slot.")
    if reading.publish_due:
        return Due("publish", "Raw or a snapshot holds more than the newest publish.")
    if unread_seconds is None:
        return Due(None, f"Nothing is unread ({lag}).")
    return Due(None, f"{lag}, below the threshold. No commit is unread for more than {unread_seconds:.0f} s.")


def worth_a_look(readings: Sequence[SourceReading], reading: LagReading) -> str | None:
    """Return the snapshot from before the backlog if the server can look through that for changes at little cost; else None.

    Transactions of other databases and of autovacuum look like commits that are unread.
    """
    confirmed = reading.confirmed_flush_lsn
    if confirmed is None or not readings or readings[0].insert_lsn > confirmed or reading.lag_bytes >= IDLE_BYTES:
        return None
    return readings[0].snapshot


def window_to_drain(reading: LagReading, last_key: str | None = None) -> str | None:
    """Return the key of the window to request, None if there is nothing to read.

    It is `last_key` again if that window is not drained yet, else the one that ends at the source's flush LSN.
    """
    confirmed = reading.confirmed_flush_lsn or 0
    if reading.slot_exists and last_key is not None and confirmed < parse_window_key(last_key) <= reading.flush_lsn:
        return last_key
    return window_key(reading.flush_lsn) if reading.flush_lsn > confirmed else None


def reading_of_last_drain(instance: dg.DagsterInstance, slot: dg.AssetKey) -> SourceReading | None:
    """Return the reading of the source from before the newest drain, None if none is recorded.

    It is the start for a sensor whose cursor is empty, and for the schedule, which has none.
    """
    for record in instance.fetch_observations(slot, limit=_OBSERVATIONS).records:
        observation = record.asset_observation
        entry = observation.metadata.get(SOURCE_READING) if observation is not None else None
        if isinstance(entry, dg.JsonMetadataValue) and isinstance(entry.data, dict):
            return SourceReading(**entry.data)
    return None


def busy(instance: dg.DagsterInstance, tag: str, value: str) -> str | None:
    """Return a sentence naming the active run with this tag; None if there is none. The caller has ended dead runs (`end_dead_runs`)."""
    active = instance.get_run_records(dg.RunsFilter(tags={tag: value}, statuses=list(ACTIVE)), limit=1)
    if not active:
        return None
    run = active[0].dagster_run
    return f"Run {run.run_id.split('-')[0]} of {run.job_name} is {run.status.value.lower()}."


def pausing(instance: dg.DagsterInstance, tag: str, value: str, jobs: Collection[str], now: float | None = None) -> str | None:
    """Return a sentence while a pause is due after consecutive failures of `jobs`; None otherwise.

    The pause doubles from 10 s to 15 min. A failure in the future was recorded before the clock was set back, and causes no pause.
    """
    records = instance.get_run_records(dg.RunsFilter(tags={tag: value}, statuses=list(ENDED)), limit=2 * _REMEMBERED)
    failures = 0
    ended = None
    for record in records:
        if record.dagster_run.job_name not in jobs:
            continue
        if record.dagster_run.status == dg.DagsterRunStatus.SUCCESS:
            break
        failures += 1
        ended = ended or record.end_time or record.update_timestamp.timestamp()
        if failures == _REMEMBERED:
            break
    if ended is None:
        return None
    pause = min(_FIRST_PAUSE * 2 ** (failures - 1), _LONGEST_PAUSE)
    left = ended + pause - (time.time() if now is None else now)
    if not 0 < left <= pause:
        return None
    runs = "run" if failures == 1 else f"{failures} runs"
    return f"The last {runs} failed; the next is requested in {left:.0f} s."

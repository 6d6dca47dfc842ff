"""When a run is due: rules over readings and past runs, the same for sensors and schedules."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import dagster as dg

from pgwal_pipeline.components.processes import end_dead_runs
from pgwal_pipeline.lsn import parse_window_key, window_key
from pgwal_pipeline.pipeline.reports import LagReading
from pgwal_pipeline.settings import Settings

LOOK = "pgwal/look"
"""The metadata entry, on the slot's observations, under which a drain leaves the look at the source that it took before it read."""

ACTIVE = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)

# A server that nobody writes to still moves its WAL on by itself, a little: below this much the slot need not follow.
IDLE_BYTES = 16 << 20

_FIRST_PAUSE = 10.0
_LONGEST_PAUSE = 900.0
_REMEMBERED = 9
_LOOKS = 8
_OBSERVATIONS = 20


@dataclass(frozen=True)
class Look:
    """One look at the source: the transactions that were running, and where the WAL ended then (`insert_lsn`, read afterwards).

    Once the slot is confirmed there, everything is read that had ended by then (`at`, Unix seconds); and nothing is unread for as long as
    the source shows the same `snapshot`, wherever checkpoints and the like have moved its WAL meanwhile.
    """

    snapshot: str
    insert_lsn: int
    at: float


def look_again(looks: Sequence[Look], reading: LagReading, now: float) -> tuple[tuple[Look, ...], float | None]:
    """The looks worth keeping after one more, in their order, and for how many seconds a commit may have been unread; None for none.

    Counted from the newest look that is read by now; without any, from the first one. One from the future is from before a clock was set
    back, and counts from now on.
    """
    looks = [replace(look, at=min(look.at, now)) for look in looks]
    confirmed = reading.confirmed_flush_lsn if reading.confirmed_flush_lsn is not None else -1
    if reading.insert_lsn <= confirmed:
        return (Look(reading.snapshot, reading.insert_lsn, now),), None
    read = [look for look in looks if look.insert_lsn <= confirmed][-1:]
    if read and read[0].snapshot == reading.snapshot:
        return (replace(read[0], at=now),), None
    waiting = [look for look in looks if look.insert_lsn > confirmed]
    if all(look.snapshot != reading.snapshot for look in waiting):
        waiting = [*waiting[: _LOOKS - 1], Look(reading.snapshot, reading.insert_lsn, now)]
    since = [*read, *waiting][0].at
    return (*read, *waiting), max(0.0, now - since)


@dataclass(frozen=True)
class Due:
    """What is to be run: `sync`, `publish` or nothing; and why, as a sentence."""

    job: Literal["sync", "publish"] | None
    reason: str


def what_is_due(reading: LagReading, unread_seconds: float | None, settings: Settings) -> Due:
    """What the slot's state asks for, with a commit unread for `unread_seconds` at most, None for none.

    A sync is due when there is no slot, when a commit may have been unread for PGWAL_MAX_STALENESS, or when the lag reached
    PGWAL_LAG_THRESHOLD with something unread in it. A publish alone is due when raw or a snapshot holds more than the last one took.
    """
    if not reading.slot_exists:
        return Due("sync", f"There is no slot {settings.slot} yet.")
    lag = f"{reading.lag_bytes:,} bytes of lag"
    if unread_seconds is None and reading.lag_bytes >= max(settings.lag_threshold, IDLE_BYTES):
        return Due("sync", f"{lag}, though no commit among them: the slot must follow.")
    if unread_seconds is not None and reading.lag_bytes >= settings.lag_threshold:
        return Due("sync", f"{lag}, the threshold is {settings.lag_threshold:,}.")
    if unread_seconds is not None and unread_seconds >= settings.max_staleness:
        return Due("sync", f"A commit may have been unread for {unread_seconds:.0f} s.")
    if reading.publish_due:
        return Due("publish", "Raw or a snapshot holds more than the newest publish.")
    if unread_seconds is None:
        return Due(None, f"Nothing is unread ({lag}).")
    return Due(None, f"{lag}, below the threshold, and unread for {unread_seconds:.0f} s at most.")


def window_to_drain(reading: LagReading, last_key: str | None = None) -> str | None:
    """The key of the window to ask for: the last one again if it is not drained yet, else up to what is flushed now; None for nothing."""
    confirmed = reading.confirmed_flush_lsn or 0
    if reading.slot_exists and last_key is not None and confirmed < parse_window_key(last_key) <= reading.flush_lsn:
        return last_key
    return window_key(reading.flush_lsn) if reading.flush_lsn > confirmed else None


def look_of_last_drain(instance: dg.DagsterInstance, slot: dg.AssetKey) -> Look | None:
    """The look that the newest drain took before it read, if it left one: for whoever has seen nothing yet."""
    for record in instance.fetch_observations(slot, limit=_OBSERVATIONS).records:
        observation = record.asset_observation
        entry = observation.metadata.get(LOOK) if observation is not None else None
        if isinstance(entry, dg.JsonMetadataValue) and isinstance(entry.data, dict):
            return Look(**entry.data)
    return None


def busy(instance: dg.DagsterInstance, tag: str, value: str) -> str | None:
    """A sentence naming the run that works under this tag; None when there is none. Runs whose process is gone are ended first."""
    end_dead_runs(instance, [(tag, value)])
    active = instance.get_run_records(dg.RunsFilter(tags={tag: value}, statuses=list(ACTIVE)), limit=1)
    if not active:
        return None
    run = active[0].dagster_run
    return f"Run {run.run_id.split('-')[0]} of {run.job_name} is {run.status.value.lower()}."


def pausing(instance: dg.DagsterInstance, tag: str, value: str, jobs: Collection[str], now: float | None = None) -> str | None:
    """A sentence while the failures of `jobs` in a row ask for a pause, which doubles from 10 s to 15 min; None otherwise.

    A failure in the future is from before a clock was set back, and asks for none.
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
    return f"The last {runs} failed; the next is asked for in {left:.0f} s."

"""Tells runs whose process is gone from those that go on, on whatever host, so that a run that was killed does not count as active.

Not every launcher watches its runs, and none watches a run that a `pgwal` command executes itself. If such a process is killed, Dagster
shows the run as started for ever, and everything that waits for it waits for ever. So each run shows itself in the source
(`postgres/presence.py`), and is taken for dead when it has not been seen there for a while.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable

import dagster as dg

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.postgres.presence import BACK_WITHIN

PROCESS_TAG = "pgwal/process"

Present = Callable[[list[str]], set[str]]
"""Returns those of the given runs that show themselves in the source."""

_IN_ONE_PROCESS = ("in_process", "execute_in_process_executor")

_missed: dict[str, float] = {}  # since when runs have not been seen, by `time.monotonic`
_one_at_a_time = threading.Lock()


def process_tags(executor: str = _IN_ONE_PROCESS[0]) -> dict[str, str]:
    """Return the run tag that says that the run shows itself in the source, with this process's host and id for people.

    No tags if `executor` gives each step a process of its own: between two steps such a run would be missed. Whoever started it watches it.
    """
    return {PROCESS_TAG: f"{platform.node()}/{os.getpid()}"} if executor in _IN_ONE_PROCESS else {}


def end_dead_runs(
    instance: dg.DagsterInstance, tags: Iterable[tuple[str, str]], present: Present, patience: float = BACK_WITHIN
) -> list[str]:
    """Report the runs with one of `tags` (name, value) as failed if their process is gone; return their ids.

    It is gone if the run was never seen in the source for `patience` seconds, by this process. While the source cannot be asked, no run is
    taken for dead. The runs' slots in Dagster's concurrency pools are freed.
    """
    unfinished = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]
    runs = {
        run.run_id: run
        for name, value in tags
        for run in instance.get_runs(dg.RunsFilter(tags={name: value}, statuses=unfinished))
        if PROCESS_TAG in run.tags
    }
    if not runs:
        return []
    try:
        seen = present(list(runs))
    except PgwalError:
        return []
    ended = [run for run in runs.values() if run.run_id not in seen and _missed_for(run.run_id) >= patience]
    for run in ended:
        instance.report_run_failed(
            run, f"The process that executed this run ({run.tags[PROCESS_TAG]}) is gone: the run has not been seen in the source."
        )
        if instance.event_log_storage.supports_global_concurrency_limits:
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    with _one_at_a_time:
        for run_id in [*seen, *(run.run_id for run in ended)]:
            _missed.pop(run_id, None)
    return [run.run_id for run in ended]


def _missed_for(run_id: str) -> float:
    now = time.monotonic()
    with _one_at_a_time:
        return now - _missed.setdefault(run_id, now)

"""Records which process executes a run, so that a run whose process was killed does not count as active.

No launcher watches a run that a `pgwal` command executes itself. If that process is killed, Dagster shows the run as started for ever, and
everything that waits for it waits for ever.
"""

import os
import platform
from collections.abc import Iterable

import dagster as dg
import psutil

PROCESS_TAG = "pgwal/process"


def process_tags() -> dict[str, str]:
    """Return the run tag that names this process: host, process id and start time."""
    return {PROCESS_TAG: f"{platform.node()}/{os.getpid()}/{_started(os.getpid())}"}


def is_dead(run: dg.DagsterRun) -> bool:
    """Return whether the process that executes `run` is known to be gone; False for a process on another host or without a tag."""
    host, _, process = run.tags.get(PROCESS_TAG, "").partition("/")
    pid, _, started = process.partition("/")
    if host != platform.node() or not pid.isdigit():
        return False
    return not started or _started(int(pid)) != started


def end_dead_runs(instance: dg.DagsterInstance, tags: Iterable[tuple[str, str]]) -> list[str]:
    """Report the runs with one of `tags` (name, value) as failed if their process is gone; return their ids.

    Their slots in Dagster's concurrency pools are freed.
    """
    ended = []
    for name, value in tags:
        filters = dg.RunsFilter(tags={name: value}, statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING])
        for run in instance.get_runs(filters):
            if is_dead(run):
                instance.report_run_failed(run, f"The process that executed this run ({run.tags[PROCESS_TAG]}) is gone.")
                if instance.event_log_storage.supports_global_concurrency_limits:
                    instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
                ended.append(run.run_id)
    return ended


def _started(pid: int) -> str:
    """Return when process `pid` started, in hundredths of a second since boot; empty if there is no such process.

    Counted from boot because setting the clock moves both times alike.
    """
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return ""
        booted = psutil.boot_time()
        return str(round((process.create_time() - booted) * 100))
    except psutil.NoSuchProcess:
        return ""

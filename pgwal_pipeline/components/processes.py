"""Which process executes a run, so that a run whose process was killed is not taken for one at work.

A run that this process executes itself has no launcher that would notice its death: without this its status would say "started" for ever,
and everything that waits for it would wait as long.
"""

import os
import platform
from collections.abc import Iterable

import dagster as dg
import psutil

PROCESS_TAG = "pgwal/process"


def process_tags() -> dict[str, str]:
    """The run tag that names this process: host, process id and the process's start."""
    return {PROCESS_TAG: f"{platform.node()}/{os.getpid()}/{_started(os.getpid())}"}


def is_dead(run: dg.DagsterRun) -> bool:
    """Whether the process that executes `run` is known to be gone; False where it ran on another host, or nobody noted it."""
    host, _, process = run.tags.get(PROCESS_TAG, "").partition("/")
    pid, _, started = process.partition("/")
    if host != platform.node() or not pid.isdigit():
        return False
    return not started or _started(int(pid)) != started


def end_dead_runs(instance: dg.DagsterInstance, tags: Iterable[tuple[str, str]]) -> list[str]:
    """Report as failed the runs with one of `tags` (name, value) whose process is gone, and give back their places in pools; their ids."""
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
    """When process `pid` started, in hundredths of a second since the machine did; empty when there is no such process.

    The clock may be set meanwhile: it moves both moments.
    """
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return ""
        booted = psutil.boot_time()
        return str(round((process.create_time() - booted) * 100))
    except psutil.NoSuchProcess:
        return ""

"""Runs whose process is gone are ended, and no other: what counts is the source, not the name of a host or a process id."""

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import dagster as dg
import pytest

from pgwal_pipeline.components.processes import PROCESS_TAG, end_dead_runs, process_tags
from pgwal_pipeline.components.resources import SourceSettings, slot_resource
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.postgres.presence import present
from pgwal_pipeline_tests.support import Source, wait_for

_SHOW = """
import sys, time
from pgwal_pipeline.postgres.presence import shown
with shown(sys.argv[1], sys.argv[2]):
    time.sleep(600)
"""
_SLOT = [("pgwal/slot", "s")]


@dg.job
def work() -> None: ...


def started(instance: dg.DagsterInstance, **tags: str) -> dg.DagsterRun:
    run = instance.create_run_for_job(work, tags={name.replace("__", "/"): value for name, value in tags.items()})
    instance.report_dagster_event(dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, work.name), run.run_id)
    return run


def status(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


@contextmanager
def process_of(run: dg.DagsterRun, source: Source) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", _SHOW, source.dsn, run.run_id]) as process:
        try:
            wait_for(lambda: present(source.dsn, [run.run_id]), what="the run to be seen")
            yield process
        finally:
            process.kill()


@pytest.fixture
def seen(source: Source) -> Callable[[Collection[str]], set[str]]:
    return lambda runs: present(source.dsn, runs)


def test_a_run_is_dead_when_its_process_is(instance: dg.DagsterInstance, source: Source, seen: Callable[..., set[str]]) -> None:
    """On whatever host: the tag is for people."""
    tags = {"pgwal__slot": "s", "pgwal__process": "another-host/1"}
    run, neighbour = started(instance, **tags), started(instance, **tags)
    with process_of(run, source) as process, process_of(neighbour, source):
        assert end_dead_runs(instance, _SLOT, seen, patience=0) == []
        process.kill()
        wait_for(lambda: not present(source.dsn, [run.run_id]), what="the run to be gone")
        other = started(instance, pgwal__slot="another", pgwal__process="another-host/1")
        assert end_dead_runs(instance, _SLOT, seen, patience=0) == [run.run_id]
    assert status(instance, run) == dg.DagsterRunStatus.FAILURE
    assert status(instance, neighbour) == dg.DagsterRunStatus.STARTED
    assert status(instance, other) == dg.DagsterRunStatus.STARTED
    (entry,) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    assert entry.dagster_event is not None
    assert "another-host/1" in (entry.dagster_event.message or "")


def test_a_run_has_time_to_be_seen_again(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("pgwal_pipeline.components.processes.time.monotonic", lambda: clock[0])
    run = started(instance, pgwal__slot="s", pgwal__process="host/1")
    there: set[str] = set()

    def look(seconds: float) -> list[str]:
        clock[0] += seconds
        return end_dead_runs(instance, _SLOT, lambda _: there, patience=5)

    assert look(0) == look(4) == []
    there.add(run.run_id)
    assert look(3) == []
    there.clear()
    assert look(3) == look(4) == [], "the time counts from when it was missed again"
    assert look(2) == [run.run_id]
    assert look(9) == []


def test_what_cannot_be_judged_is_taken_for_alive(instance: dg.DagsterInstance) -> None:
    def away(_: Collection[str]) -> set[str]:
        raise SourceUnavailable("The source is away.")

    run = started(instance, pgwal__slot="s", pgwal__process="host/1")
    assert end_dead_runs(instance, _SLOT, away, patience=0) == []
    unmarked = started(instance, pgwal__slot="s")
    assert end_dead_runs(instance, _SLOT, lambda _: set(), patience=0) == [run.run_id]
    assert status(instance, unmarked) == dg.DagsterRunStatus.STARTED


def test_a_run_with_a_process_for_each_step_is_not_judged() -> None:
    assert set(process_tags()) == set(process_tags("execute_in_process_executor")) == {PROCESS_TAG}
    assert process_tags("multiprocess") == process_tags("k8s_job_executor") == {}


def test_a_run_shows_itself_from_its_first_step_to_its_last(
    instance: dg.DagsterInstance, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its ReplicationSlot, also between the steps that need it; a sensor, which has one too, shows nothing."""
    monkeypatch.setenv("PGWAL_SOURCE_DSN", source.dsn)
    found = []

    @dg.op(required_resource_keys={"slot"}, out=dg.Out(dg.Nothing))
    def first(context: dg.OpExecutionContext) -> None:
        wait_for(lambda: context.resources.slot.present([context.run_id]), what="the run to be seen")

    @dg.op(ins={"before": dg.In(dg.Nothing)})
    def second(context: dg.OpExecutionContext) -> None:
        found.append((context.run_id, present(source.dsn, [context.run_id])))

    @dg.job(resource_defs={"slot": slot_resource(SourceSettings())}, executor_def=dg.in_process_executor)
    def both() -> None:
        second(first())

    assert both.execute_in_process(instance=instance).success
    ((run_id, there),) = found
    assert there == {run_id}
    wait_for(lambda: not present(source.dsn, [run_id]), what="the run to be gone")
    with dg.build_sensor_context(instance=instance, resources={"slot": slot_resource(SourceSettings())}) as context:
        assert context.resources.slot.present(["x"]) == set()
        assert source.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0

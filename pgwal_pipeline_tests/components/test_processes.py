import os
import subprocess
import sys

import dagster as dg

from pgwal_pipeline.components.processes import PROCESS_TAG, end_dead_runs, is_dead, process_tags

SHOW = "from pgwal_pipeline.components.processes import process_tags; print(process_tags()['pgwal/process'], flush=True); input()"


@dg.job
def work() -> None: ...


def started(instance: dg.DagsterInstance, **tags: str) -> dg.DagsterRun:
    run = instance.create_run_for_job(work, tags={name.replace("__", "/"): value for name, value in tags.items()})
    instance.report_dagster_event(dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, work.name), run.run_id)
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.STARTED
    return found


def test_a_run_is_dead_when_its_process_is(instance: dg.DagsterInstance) -> None:
    with subprocess.Popen([sys.executable, "-c", SHOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        run = started(instance, pgwal__slot="s", pgwal__process=process.stdout.readline().strip())
        assert not is_dead(run)
        assert end_dead_runs(instance, [("pgwal/slot", "s")]) == []
        process.kill()
        process.wait()
    assert is_dead(run)
    other = started(instance, pgwal__slot="another", pgwal__process=run.tags[PROCESS_TAG])
    assert end_dead_runs(instance, [("pgwal/slot", "s")]) == [run.run_id]
    ended = instance.get_run_by_id(run.run_id)
    assert ended is not None
    assert ended.status == dg.DagsterRunStatus.FAILURE
    left = instance.get_run_by_id(other.run_id)
    assert left is not None
    assert left.status == dg.DagsterRunStatus.STARTED


def test_what_cannot_be_judged_is_taken_for_alive(instance: dg.DagsterInstance) -> None:
    assert not is_dead(started(instance))
    assert not is_dead(started(instance, pgwal__process="another-host/1/1"))
    assert not is_dead(started(instance, pgwal__process=process_tags()[PROCESS_TAG]))


def test_a_process_id_that_was_given_out_again_is_not_the_process(instance: dg.DagsterInstance) -> None:
    host, _, rest = process_tags()[PROCESS_TAG].partition("/")
    assert rest.startswith(f"{os.getpid()}/")
    assert is_dead(started(instance, pgwal__process=f"{host}/{os.getpid()}/12345"))

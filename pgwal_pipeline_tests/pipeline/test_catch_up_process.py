"""Processes that read windows of a catch-up: one that dies leaves its window to the other, and none outlives the drain."""

import signal
from pathlib import Path

import pytest

from pgwal_pipeline_tests.pipeline.catching_up import DRAIN, alone, assert_same_raw, assert_settled, catching_up, fill, slots, windows
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.support import Source, wait_for

pytestmark = pytest.mark.usefixtures("four_cores")
IN_SOAK = pytest.mark.soak  # neighbours of the others


BY_WORKER = [
    "catch_up.copied",
    pytest.param("catch_up.moved", marks=IN_SOAK),
    pytest.param("catch_up.after_files", marks=IN_SOAK),
    "catch_up.recorded",
]


@pytest.mark.parametrize("point", BY_WORKER)
def test_a_window_whose_process_is_killed_is_read_by_the_other(
    point: str, source: Source, make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline, other = catching_up(make_pipeline, catchup_slots=1), alone(make_pipeline, tmp_path)
    fill(source)
    environment = {"PGWAL_CATCHUP_THRESHOLD": "512kB", "PGWAL_CATCHUP_SLOTS": "1", "PGWAL_FAILPOINTS": f"{point}=kill"}
    done = pipeline.child(DRAIN, environment=environment)
    assert done.returncode == 0, done.stderr
    other.drain(pipeline.ledger.frontier())
    assert len(windows(pipeline)) == 2
    assert_same_raw(pipeline, other, "public.t")
    assert_settled(pipeline)


def test_an_interrupted_catch_up_leaves_no_process_and_no_slot(source: Source, make_pipeline: MakePipeline, tmp_path: Path) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline, other = catching_up(make_pipeline), alone(make_pipeline, tmp_path)
    fill(source)
    slot = pipeline.settings.slot
    environment = {"PGWAL_CATCHUP_THRESHOLD": "512kB", "PGWAL_FAILPOINTS": "catch_up.after_files=sleep:60"}
    with pipeline.started(DRAIN, environment=environment) as drain:
        wait_for(lambda: len(slots(source, slot)) == 3, seconds=60, what="the copies")
        plan = wait_for(pipeline.ledger.plan, what="the plan")
        wait_for(lambda: len(pipeline.ledger.reads(plan)) == 1, seconds=60, what="the first window")
        drain.send_signal(signal.SIGINT)
        assert drain.wait(20) != 0
    assert len(pipeline.ledger.reads(plan)) == 1
    wait_for(lambda: slots(source, slot) == {slot}, what="the copies to be gone")
    pipeline.drain()
    other.drain(pipeline.ledger.frontier())
    assert_same_raw(pipeline, other, "public.t")
    assert_settled(pipeline)

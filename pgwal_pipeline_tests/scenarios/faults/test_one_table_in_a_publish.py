"""A table whose merge, replacement or comparison fails by its own fault costs nobody but itself, and mends itself."""

from typing import Any

import pytest

from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import publish as publishes
from pgwal_pipeline.pipeline import status, verify
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import RUNS_OWN, TABLES_OWN, at_tables, injected
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.faults.three_tables import CASES, TABLES, create, insert
from pgwal_pipeline_tests.support import Source

_STAGES = ("look", "merge", "replace")
_SHORT = {("merge", "PySparkException", "first"), ("look", "DeltaError", "last"), ("replace", "RuntimeError", "only")}
_MATRIX = [
    pytest.param(stage, kind, case, marks=() if (stage, kind, case) in _SHORT else pytest.mark.soak)
    for stage in _STAGES
    for kind in TABLES_OWN
    for case in CASES
]
_RUNS = [pytest.param(stage, kind, marks=() if stage == "merge" else pytest.mark.soak) for stage in _STAGES for kind in RUNS_OWN]


def three_tables(pipeline: Pipeline) -> None:
    create(pipeline.source)
    insert(pipeline.source, TABLES, 1)
    pipeline.sync()


def worked(pipeline: Pipeline, stage: str, changed: list[str]) -> None:
    """Something for the stage to do: changes, or a reading that a publish has not taken."""
    insert(pipeline.source, changed, 2)
    if stage == "replace":
        pipeline.snapshot(*changed)
    pipeline.drain()


def states(pipeline: Pipeline) -> dict[str, str]:
    return {str(name): state.state for name, state in pipeline.ledger.tables().items()}


@pytest.mark.parametrize(("stage", "kind", "case"), _MATRIX)
def test_a_tables_fault_costs_that_table_alone(stage: str, kind: str, case: str, source: Source, pipeline: Pipeline) -> None:
    three_tables(pipeline)
    faulty, changed = CASES[case]
    worked(pipeline, stage, changed)
    with injected(at_tables(stage, faulty, kind)):
        report = pipeline.publish()
    sound = [table for table in TABLES if table not in faulty]
    assert report.lsn == pipeline.ledger.frontier()
    assert sorted(report.errors) == faulty
    pipeline.assert_current(*sound)
    for table in faulty:
        state = pipeline.ledger.tables()[TableName.parse(table)]
        assert (state.state, state.stage, state.gap_lsn) == ("error", stage, None)
        assert "failpoint" in (state.reason or "")
        assert f"pgwal resnapshot '{table}'" in (state.reason or "")
    # The cause is gone: the next publish takes it in by itself.
    insert(source, TABLES, 3)
    pipeline.drain()
    assert pipeline.publish().errors == {}
    assert set(states(pipeline).values()) == {"ready"}
    pipeline.assert_current(*TABLES)
    assert all(state.reason is None and state.failures == 0 for state in pipeline.ledger.tables().values())


@pytest.mark.parametrize(("stage", "kind"), _RUNS)
def test_the_runs_fault_changes_no_tables_state(stage: str, kind: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishes, "_PAUSE", 0.01)
    three_tables(pipeline)
    worked(pipeline, stage, TABLES)
    with injected(at_tables(stage, ["public.b"], kind)), pytest.raises(MemoryError if kind == "MemoryError" else LakeError):
        pipeline.publish()
    assert set(states(pipeline).values()) == {"ready"}
    pipeline.publish()
    pipeline.assert_current(*TABLES)


def test_what_passes_is_tried_again_at_once(pipeline: Pipeline) -> None:
    three_tables(pipeline)
    worked(pipeline, "merge", TABLES)
    with injected("table.merge/public.b=raise:TransientLakeError@1"):
        assert pipeline.publish().errors == {}
    pipeline.assert_current(*TABLES)


def test_a_table_that_fails_again_and_again_gets_pauses_that_grow(source: Source, pipeline: Pipeline) -> None:
    three_tables(pipeline)
    worked(pipeline, "merge", TABLES)
    table = TableName("public", "b")
    waits = []
    with injected(at_tables("merge", ["public.b"], "RuntimeError")):
        for _ in range(3):
            pipeline.publish()
            state = pipeline.ledger.tables()[table]
            assert state.retry_at is not None
            waits.append((state.failures, status.publish_due(pipeline.ledger)))
    # The second attempt is made at once, the third only after a pause: no run is asked for until then.
    assert waits == [(1, True), (2, False), (2, False)]
    insert(source, TABLES, 5)
    pipeline.drain()
    assert list(pipeline.publish().errors) == ["public.b"]
    pipeline.assert_current("public.a", "public.c")
    pipeline.resnapshot("public.b")
    pipeline.assert_current(*TABLES)
    assert set(states(pipeline).values()) == {"ready"}


def test_a_comparison_that_fails_for_one_table(pipeline: Pipeline, spark: Any) -> None:
    three_tables(pipeline)
    with injected(at_tables("compare", ["public.b"], "ArrowInvalid")):
        report = verify.verify(pipeline.settings, lambda: spark, progress=Silent())
    assert [str(table) for table in report.tables] == ["public.a", "public.c"]
    assert report.equal
    ((table, reason),) = report.errors.items()
    assert str(table) == "public.b"
    assert "failpoint" in reason
    assert set(states(pipeline).values()) == {"ready"}


def test_a_table_altered_while_it_is_in_error_is_read_again(source: Source, pipeline: Pipeline) -> None:
    """What a look at the catalog finds counts for a table in error as for any other."""
    three_tables(pipeline)
    worked(pipeline, "merge", TABLES)
    with injected(at_tables("merge", ["public.b"], "RuntimeError")):
        pipeline.publish()
    source.sql("ALTER TABLE b ADD COLUMN w int DEFAULT 7")
    pipeline.drain()
    assert pipeline.ledger.tables()[TableName("public", "b")].state == "pending"
    pipeline.sync()
    pipeline.assert_current(*TABLES)

import dagster as dg
import pytest

from pgwal_pipeline.components.failures import RETRIES, at_work
from pgwal_pipeline.messages.errors import SlotBusy, SlotLost, SourceUnavailable
from pgwal_pipeline_tests.components.instances import dagster_instance


@pytest.mark.parametrize(
    ("error", "attempts", "sentence"),
    [
        (SourceUnavailable("The source is away."), 1 + RETRIES, "The source is away."),
        (SlotBusy("Somebody holds the slot."), 1, "Somebody holds the slot."),
        (SlotLost("The slot is gone."), 1, "The slot is gone."),
        (ZeroDivisionError("by zero"), 1, "Unexpected ZeroDivisionError: by zero"),
    ],
)
def test_only_what_passes_is_tried_again(error: Exception, attempts: int, sentence: str) -> None:
    tried: list[str] = []

    @dg.op
    def step(context: dg.OpExecutionContext) -> None:
        with at_work(context, {"pgwal/slot": "s"}):
            tried.append(context.run_id)
            raise error

    with dagster_instance() as instance:
        job = dg.GraphDefinition(name="job", node_defs=[step]).to_job()
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        assert len(tried) == attempts
        failure = result.get_step_failure_events()[0].step_failure_data
        shown = failure.user_failure_data.description if failure.user_failure_data else str(failure.error)
        assert sentence in (shown or "") or sentence in str(failure.error)
        run = instance.get_run_by_id(result.run_id)
        assert run is not None
        assert run.tags["pgwal/slot"] == "s"
        assert "pgwal/process" in run.tags
        with pytest.raises(BaseException) as raised:
            job.execute_in_process(instance=instance)
        cause: BaseException | None = raised.value
        while cause is not None and cause is not error:
            cause = cause.__cause__ or cause.__context__
        assert cause is error


def test_a_run_that_is_terminated_does_not_begin_anew() -> None:
    tried: list[str] = []

    @dg.op
    def step(context: dg.OpExecutionContext) -> None:
        with at_work(context, {}):
            tried.append(context.run_id)
            context.instance.report_run_canceling(context.run)
            raise KeyboardInterrupt

    with dagster_instance() as instance:
        dg.GraphDefinition(name="job", node_defs=[step]).to_job().execute_in_process(instance=instance, raise_on_error=False)
        assert len(tried) == 1
        run = instance.get_run_by_id(tried[0])
        assert run is not None
        assert run.status == dg.DagsterRunStatus.CANCELED

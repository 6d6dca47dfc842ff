"""What a step does when the pipeline raises an error: retry if that may help, else fail with one clear sentence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dagster as dg

from pgwal_pipeline.components.processes import process_tags
from pgwal_pipeline.messages.errors import PgwalError, SlotBusy

RETRIES = 2
"""How often a step is retried: enough for a source that is away for a moment. For a longer outage the sensors request new runs."""

_PAUSE = 2.0  # seconds before the first retry; doubled each time


@contextmanager
def at_work(context: dg.AssetExecutionContext | dg.OpExecutionContext, tags: Mapping[str, str]) -> Iterator[None]:
    """Tag the step's run with this process and with `tags`, and turn what the block raises into a Failure of one sentence.

    The tags are set here because a run started from the asset graph has no job's tags, and without them the sensors would not see that it
    holds the slot. Only a transient error is retried, and SlotBusy is not: the drain has waited PGWAL_BUSY_TIMEOUT for the slot already.
    The Failure's cause is the original error.

    No step has a RetryPolicy: Dagster would apply it to an interruption too, and a terminated run would start again.
    """
    executor = context.job_def.executor_def.name
    context.instance.add_run_tags(context.run.run_id, {**process_tags(executor), **tags})
    try:
        yield
    except dg.Failure:
        raise
    except PgwalError as error:
        failure = _failure(error, str(error))
        failure.__cause__ = error
        if error.transient and not isinstance(error, SlotBusy):
            raise dg.RetryRequested(RETRIES, _PAUSE * 2**context.retry_number) from failure
        raise failure from error
    except Exception as error:
        raise _failure(error, f"Unexpected {type(error).__name__}: {error}") from error


def _failure(error: Exception, sentence: str) -> dg.Failure:
    return dg.Failure(description=sentence, metadata={"pgwal/error": type(error).__name__}, allow_retries=False)

"""What a step does when the pipeline cannot go on: tried again where that may help, else one clear sentence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dagster as dg

from pgwal_pipeline.components.processes import process_tags
from pgwal_pipeline.errors import PgwalError, SlotBusy

RETRIES = 2
"""How often a step is tried again by itself: a source that was away for a moment is back soon, and the sensors go on asking for hours."""

_PAUSE = 2.0  # seconds before the first time; doubled each time


@contextmanager
def at_work(context: dg.AssetExecutionContext | dg.OpExecutionContext, tags: Mapping[str, str]) -> Iterator[None]:
    """Do a step's work: tag its run with the process that does it and with `tags`, and turn what it raises into a Failure of one sentence.

    A run from the asset graph has none of its job's tags, without which nobody would see that it holds the slot. Only a passing error is
    retried; a busy slot was waited for already (PGWAL_BUSY_TIMEOUT), so that is not. What was raised is the Failure's cause.

    No step has a RetryPolicy: Dagster would apply it to an interruption too, and a run that is terminated would begin anew.
    """
    context.instance.add_run_tags(context.run.run_id, {**process_tags(), **tags})
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

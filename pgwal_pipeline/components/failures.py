"""What a step does when the pipeline cannot go on: tried again where that may help, else one clear sentence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dagster as dg

from pgwal_pipeline.components.processes import process_tags
from pgwal_pipeline.errors import PgwalError, SlotBusy

RETRIES = dg.RetryPolicy(max_retries=2, delay=2, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS)
"""For every step: a source that was away for a moment is tried again soon; the sensors do so for hours."""


@contextmanager
def at_work(context: dg.AssetExecutionContext | dg.OpExecutionContext, tags: Mapping[str, str]) -> Iterator[None]:
    """Do a step's work: tag its run with the process that does it and with `tags`, and turn what it raises into a Failure of one sentence.

    A run from the asset graph has none of its job's tags, without which nobody would see that it holds the slot. Only a passing error is
    retried; a busy slot was waited for already (PGWAL_BUSY_TIMEOUT), so that is not. What was raised is the Failure's cause.
    """
    context.instance.add_run_tags(context.run.run_id, {**process_tags(), **tags})
    try:
        yield
    except dg.Failure:
        raise
    except PgwalError as error:
        raise _failure(error, str(error), again=error.transient and not isinstance(error, SlotBusy)) from error
    except Exception as error:
        raise _failure(error, f"Unexpected {type(error).__name__}: {error}", again=False) from error


def _failure(error: Exception, sentence: str, *, again: bool) -> dg.Failure:
    return dg.Failure(description=sentence, metadata={"pgwal/error": type(error).__name__}, allow_retries=again)

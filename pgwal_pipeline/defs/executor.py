"""The executor of runs that are no job's: what is materialized from the asset graph runs in one process too, and starts one Spark."""

import dagster as dg


@dg.definitions
def executor() -> dg.Definitions:
    """The location's default executor."""
    return dg.Definitions(executor=dg.in_process_executor)

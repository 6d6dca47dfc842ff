"""The executor of runs without a job: what is materialized from the asset graph also runs in one process and starts one Spark."""

import dagster as dg


@dg.definitions
def executor() -> dg.Definitions:
    """Return the code location's default executor."""
    return dg.Definitions(executor=dg.in_process_executor)

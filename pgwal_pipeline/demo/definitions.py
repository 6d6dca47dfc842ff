"""The demo's code location: what `pgwal_pipeline.definitions` has, and the shop's marts. A location of yours has no marts."""

import dagster as dg

from pgwal_pipeline import definitions
from pgwal_pipeline.demo.marts import build_marts


@dg.definitions
def defs() -> dg.Definitions:
    """Load the pipeline's definitions and add the marts."""
    return dg.Definitions.merge(definitions.defs(), build_marts())

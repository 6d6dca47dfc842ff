"""The code location: nothing but wiring. What is defined stands in `defs/`, what it is made of in `components/`."""

import atexit
import gc
import warnings
from pathlib import Path

import dagster as dg

# Of beta parameters that Dagster passes from one of its own functions to another.
warnings.filterwarnings("ignore", category=dg.BetaWarning, module=r"dagster\.")


# A process of Dagster's is many, and each would look through all that it has loaded for garbage before it ends.
atexit.register(gc.freeze)


@dg.definitions
def defs() -> dg.Definitions:
    """Everything in `defs/`."""
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)

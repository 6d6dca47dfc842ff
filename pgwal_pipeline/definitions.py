"""The code location. It only loads `defs/`, which uses the component in `components/`."""

import atexit
import gc
import warnings
from pathlib import Path

import dagster as dg

# Dagster's own functions pass beta parameters to each other.
warnings.filterwarnings("ignore", category=dg.BetaWarning, module=r"dagster\.")


# Dagster starts many processes, and each would scan everything it has loaded for garbage before it ends.
atexit.register(gc.freeze)


@dg.definitions
def defs() -> dg.Definitions:
    """Load everything in `defs/`."""
    collected = gc.isenabled()
    gc.disable()  # of thousands of tables everything stays, and searching for garbage takes a third of the time
    try:
        return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    finally:
        if collected:
            gc.enable()

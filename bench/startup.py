"""How long `pgwal --help` takes."""

import subprocess
import sys
import time
from pathlib import Path

from bench.report import Measure, Result


def help_text(rounds: int) -> Result:
    """Measure the wall time of `pgwal --help`."""
    command = [str(Path(sys.executable).with_name("pgwal")), "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return Result("help", "the command's first word", (Measure("pgwal --help", "s", tuple(seconds)),))

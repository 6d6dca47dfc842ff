"""The results of a benchmark, printed on a terminal and saved as JSON."""

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path("artifacts/bench.json")


@dataclass(frozen=True)
class Measure:
    """One measurement: the `values` of all rounds in `unit`, and their median."""

    what: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class Result:
    """A benchmark's result: `measures`, and the `ratio` of two of them, which `ratio_of` explains."""

    name: str
    says: str
    measures: tuple[Measure, ...]
    ratio: float | None = None
    ratio_of: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def show(console: Console, result: Result) -> None:
    """Print a table of the measures and the ratio under it."""
    table = Table(title=f"{result.name}: {result.says}", title_justify="left", title_style="bold")
    for heading in ("measured", "median", "rounds"):
        table.add_column(heading)
    for measure in result.measures:
        table.add_row(measure.what, f"{measure.median:,.2f} {measure.unit}", "  ".join(f"{value:,.2f}" for value in measure.values))
    console.print(table)
    if result.ratio is not None:
        console.print(f"[bold]{result.ratio:.2f}[/bold] = {result.ratio_of}")
    for name, value in result.facts.items():
        console.print(f"{name}: {value}")
    console.print()


def save(result: Result) -> None:
    """Write the result and the machine's data to `RESULTS`; results of other benchmarks stay there."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    medians = {measure.what: measure.median for measure in result.measures}
    known[result.name] = {**asdict(result), "medians": medians, "machine": machine()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Return what the figures depend on: time, cores, memory, system and versions."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{
            package: version(package)
            for package in ("pgwal-pipeline", "pyarrow", "deltalake", "pyspark", "delta-spark")
            if _installed(package)
        },
    }


def _installed(package: str) -> bool:
    try:
        version(package)
    except ImportError:
        return False
    return True

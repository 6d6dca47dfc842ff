"""Faults put into the work for one table, and what they must leave behind."""

from collections.abc import Iterator
from contextlib import contextmanager

from pgwal_pipeline import failpoints

TABLES_OWN = ("LakeError", "RuntimeError", "PySparkException", "DeltaError", "ArrowInvalid")
"""Kinds of errors that are the fault of the table that the work is for."""

RUNS_OWN = ("MemoryError", "TransientLakeError")
"""Kinds of errors that would meet every table."""


@contextmanager
def injected(points: str) -> Iterator[None]:
    """Set the failpoints of this process, as PGWAL_FAILPOINTS has them, for a while."""
    before = failpoints._points, failpoints._passed
    failpoints._points, failpoints._passed = failpoints._parse(points), {}
    try:
        yield
    finally:
        failpoints._points, failpoints._passed = before


def at_tables(stage: str, tables: list[str], kind: str) -> str:
    """Failpoints that raise `kind` in a stage of the work for these tables."""
    return ";".join(f"table.{stage}/{table}=raise:{kind}" for table in tables)

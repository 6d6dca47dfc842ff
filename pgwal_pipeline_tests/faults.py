"""Faults put into the work for one table, and what they must leave behind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

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


READ = "snapshot.between_read_and_write"


WRITTEN = "snapshot.before_chunk_record"


def at_each_pass(monkeypatch: pytest.MonkeyPatch, point: str, act: Callable[[int], None]) -> None:
    """Call `act` with 0, 1, … whenever a snapshot passes the failpoint."""
    passed = 0

    def hit(name: str) -> None:
        nonlocal passed
        if name == point:
            passed += 1
            act(passed - 1)

    monkeypatch.setattr(failpoints, "hit", hit)


def at_the_first(monkeypatch: pytest.MonkeyPatch, point: str, act: Callable[[], object]) -> None:
    """Call `act` when a snapshot first passes the failpoint."""
    passed: list[str] = []

    def hit(name: str) -> None:
        if name == point and not passed:
            passed.append(name)
            act()

    monkeypatch.setattr(failpoints, "hit", hit)

"""Random work on tables: the changes between two publishes, applied to the older state, give the newer one.

`PGWAL_TEST_SEED` and `PGWAL_TEST_ROUNDS` choose what is run; a failure prints both. `make soak` goes on for `PGWAL_SOAK_MINUTES` (60).
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline.published.apply import apply_changes
from pgwal_pipeline.published.changes import Changes
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.published.state import PublishedState, open_state
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.random.rounds import Rounds
from pgwal_pipeline_tests.support import Source, fresh_source

_QUICK_SEED, _QUICK_ROUNDS = 5, 1
_OWN = ("_pgwal_change", "_pgwal_first_lsn", "_pgwal_last_lsn")


def _row(row: dict[str, Any], names: list[str]) -> str:
    """A row as a text: equal for equal values, NaN included."""
    return repr([(name, sorted(row[name]) if name == "_pgwal_text" and row[name] else row[name]) for name in names])


def _rows(table: Any, names: list[str]) -> Counter[str]:
    return Counter(_row(row, names) for row in table.to_pylist())


class Follower:
    """Keeps a table of its own for each published one, and brings it to each state by the changes since the one before."""

    def __init__(self, pipeline: Pipeline, spark: Any, folder: Path) -> None:
        self.pipeline, self.spark, self.folder = pipeline, spark, folder
        self.before: PublishedState | None = None
        self.told: Counter[str] = Counter()

    def follow(self) -> None:
        state = open_state(self.pipeline.settings)
        for name, (path, version) in state.tables.items():
            target = str(self.folder / str(abs(hash(path))))
            known = self.before is not None and any(at.path == path for at in self.before.tables.values())
            changes = state.changes(name, since=self.before if known else None)
            self.told["complete" if changes.complete else "net"] += 1
            newer = TableDataset(path, version)
            self._by_key(changes, newer)
            if changes.complete or Path(target).exists():
                changes = self._of_target(changes, name)
                apply_changes(self.spark, target, changes)
                before = TableDataset(target)
                apply_changes(self.spark, target, changes)  # a run that is repeated
                names = newer.schema.names
                assert set(before.schema.names) >= set(names), name
                assert _rows(before.to_table(), names) == _rows(newer.to_table(), names), f"{name}: {changes}"
        self.before = state

    def _of_target(self, changes: Changes, name: str) -> Changes:
        return changes

    def _by_key(self, changes: Changes, newer: TableDataset) -> None:
        """By hand: the older rows without those whose key changed, and the newest values of these."""
        if changes.complete or self.before is None:
            return
        older = next(TableDataset(*at) for at in self.before.tables.values() if at.path == newer.path)
        key, names = list(changes.key), newer.schema.names
        rows = {self._key(row, key): {**dict.fromkeys(names), **row} for row in older.to_table().to_pylist()}
        for row in changes.arrow().to_pylist():
            place = self._key(row, key)
            self.told[row["_pgwal_change"]] += 1
            assert row["_pgwal_first_lsn"] <= row["_pgwal_last_lsn"] < changes.until_lsn
            assert (place in rows) == (row["_pgwal_change"] != "insert"), f"{changes.table} {row}"
            if row["_pgwal_change"] == "delete":
                del rows[place]
            else:
                rows[place] = row
        assert Counter(_row(row, names) for row in rows.values()) == _rows(newer.to_table(), names), str(changes)

    @staticmethod
    def _key(row: dict[str, Any], key: list[str]) -> str:
        text = dict(row["_pgwal_text"] or ())
        # A float's zero has a sign, which does not tell keys apart.
        return repr([(row[name] + 0.0 if isinstance(row[name], float) else row[name], text.get(name)) for name in key])


def _run(make_pipeline: Callable[..., Pipeline], spark: Any, source: Source, folder: Path, seed: int, enough: Callable[[int], bool]) -> Any:
    pipeline = make_pipeline(memory_budget="1MB", snapshot_chunk_rows=7, blocked_timeout=3)
    pipeline.source, pipeline.spark = source, lambda: spark
    rounds, number = Rounds(source, pipeline, seed), 0
    follower = Follower(pipeline, spark, folder)
    while not enough(number):
        number += 1
        try:
            rounds.round()
            follower.follow()
            for _ in range(30):
                rounds.work.step(ddl=0.0)
            rounds.work.settle(leave_open=False)
            pipeline.drain()
            pipeline.publish()
            follower.follow()
        except Exception as error:
            repeat = f"PGWAL_TEST_SEED={seed} PGWAL_TEST_ROUNDS={number} pytest {Path(__file__).name} -k in_short"
            raise AssertionError(f"seed {seed}, round {number}: {error}\nTo repeat: {repeat}") from error
    return follower.told


@pytest.mark.long
@pytest.mark.timeout(900)
def test_changes_in_short(source: Source, make_pipeline: Callable[..., Pipeline], spark: Any, tmp_path: Path) -> None:
    seed = int(os.environ.get("PGWAL_TEST_SEED", _QUICK_SEED))
    wanted = int(os.environ.get("PGWAL_TEST_ROUNDS", _QUICK_ROUNDS))
    told = _run(make_pipeline, spark, source, tmp_path / "targets", seed, lambda number: number >= wanted)
    assert {"complete", "net", "insert", "update", "delete"} <= set(told)


@pytest.mark.soak
def test_changes_for_an_hour(postgres: Any, make_pipeline: Callable[..., Pipeline], spark: Any, tmp_path: Path) -> None:
    end, seed = time.monotonic() + 60 * float(os.environ.get("PGWAL_SOAK_MINUTES", "60")), int(os.environ.get("PGWAL_TEST_SEED", "3000"))
    while time.monotonic() < end:
        with fresh_source(postgres) as source:
            make: Callable[..., Pipeline] = lambda lake=str(tmp_path / f"lake{seed}"), **more: make_pipeline(  # noqa: E731
                source_dsn=source.dsn, lake=lake, **more
            )
            _run(make, spark, source, tmp_path / f"targets{seed}", seed, lambda number: number >= 10 or time.monotonic() > end)
        seed += 1

"""Random workloads and random changes of the tables under them: after each round every table is what the source holds, row for row.

`PGWAL_TEST_SEED` and `PGWAL_TEST_ROUNDS` choose what is run; a failure prints both. With an even seed deleted rows are kept.
`make soak` goes on for `PGWAL_SOAK_MINUTES` (240).
"""

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.random.rounds import Rounds
from pgwal_pipeline_tests.support import Source, fresh_source

_QUICK_SEED, _QUICK_ROUNDS = 11, 2


def _report(rounds: Rounds, seed: int, number: int, error: BaseException) -> str:
    named = next((table.name for table in rounds.work.tables() if table.name in str(error)), "COMMIT")
    return (
        f"seed {seed}, round {number}: {error}\nTo repeat: PGWAL_TEST_SEED={seed} PGWAL_TEST_ROUNDS={number} "
        f"pytest pgwal_pipeline_tests/scenarios/random/test_random.py -k in_short\n"
        f"What was done to it:\n{rounds.work.history(named)}"
    )


def _run(make_pipeline: Callable[..., Pipeline], spark: Any, source: Source, seed: int, enough: Callable[[int], bool]) -> Rounds:
    options = {"*.*": {"deletes": "keep"}} if seed % 2 == 0 else {}
    pipeline = make_pipeline(memory_budget="1MB", snapshot_chunk_rows=7, blocked_timeout=3, table_options=options)
    pipeline.source, pipeline.spark = source, lambda: spark
    rounds, number = Rounds(source, pipeline, seed), 0
    while not enough(number):
        number += 1
        try:
            rounds.round()
        except Exception as error:
            raise AssertionError(_report(rounds, seed, number, error)) from error
    return rounds


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_changes_in_short(source: Source, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    seed = int(os.environ.get("PGWAL_TEST_SEED", _QUICK_SEED))
    wanted = int(os.environ.get("PGWAL_TEST_ROUNDS", _QUICK_ROUNDS))
    rounds = _run(make_pipeline, spark, source, seed, lambda number: number >= wanted)
    assert rounds.compared


@pytest.mark.soak
def test_random_changes_for_hours(postgres: Any, make_pipeline: Callable[..., Pipeline], spark: Any, tmp_path: Path) -> None:
    """Seed after seed, ten rounds each, until the time is over; the figures are in artifacts/soak.json."""
    end = time.monotonic() + 60 * float(os.environ.get("PGWAL_SOAK_MINUTES", "240"))
    seed = int(os.environ.get("PGWAL_TEST_SEED", "1000"))
    figures = {"seeds": 0, "rounds": 0, "statements": 0, "compared": 0, "rows": 0, "reread": 0}
    while time.monotonic() < end:
        with fresh_source(postgres) as source:
            done = 0

            def enough(number: int) -> bool:
                nonlocal done
                done = number
                return number >= 10 or time.monotonic() > end

            make = functools.partial(make_pipeline, source_dsn=source.dsn, lake=str(tmp_path / f"lake{seed}"))
            rounds = _run(make, spark, source, seed, enough)
        seed += 1
        found = {"seeds": 1, "rounds": done, "statements": len(rounds.work.log), "compared": rounds.compared, "rows": rounds.rows}
        for name, value in (found | {"reread": rounds.reread}).items():
            figures[name] += value
        Path("artifacts").mkdir(exist_ok=True)
        Path("artifacts/soak.json").write_text(json.dumps(figures | {"next_seed": seed}))

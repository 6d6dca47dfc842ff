"""Random work on tables whose history is kept: at each commit the history has just what the source had.

`PGWAL_TEST_SEED` and `PGWAL_TEST_ROUNDS` choose what is run; a failure prints both. `make soak` goes on for `PGWAL_SOAK_MINUTES` (60), with
changes of the tables too.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.lake.records import TableState
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import TableOptions, parse_options
from pgwal_pipeline_tests.oracle import rows_of
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.random.past import Past
from pgwal_pipeline_tests.scenarios.random.rounds import Rounds
from pgwal_pipeline_tests.scenarios.random.workload import Workload
from pgwal_pipeline_tests.support import Source, fresh_source

_QUICK_SEED, _QUICK_ROUNDS = 7, 1
_STEPS = 60  # a round
_ONCE = ("t1", "parts")


class Watched(Workload):
    """A workload whose tables are taken down after each statement that may have committed something, but for those that nobody may read."""

    past: Past | None = None

    def _run(self, number: int, statement: str) -> bool:
        took = super()._run(number, statement)
        locked = any(writer.open and writer.exclusive for other, writer in enumerate(self.writers) if other != number)
        if self.past is not None and not locked and (statement == "COMMIT" or not self.writers[number].open):
            self.past.remember(*(table.quoted for table in self.tables() if table.usable))
        return took


def _run_rows(pipeline: Pipeline, source: Source, seed: int, enough: Callable[[int], bool], option: bool | str) -> int:
    """Rounds of changes of rows, each ended by a publish, in one or more windows."""
    rng = random.Random(seed)
    work = Watched(source, rng, pipeline.settings.publication)
    work.begin(tables=3, writers=3)
    pipeline.sync()
    past = work.past = Past(source)
    since, number, positions = pipeline.ledger.frontier() or 0, 0, 0
    while not enough(number):
        number += 1
        for _ in range(_STEPS):
            work.step(ddl=0.0)
            if rng.random() < 0.02:
                pipeline.drain()
        work.settle(leave_open=rng.random() < 0.5)
        pipeline.drain()
        pipeline.publish()
        for _ in range(4):  # a TRUNCATE may be taken for a rewrite
            if snapshots.needed(pipeline.settings):
                work.settle(leave_open=False)
                pipeline.snapshot()
                pipeline.drain()
                pipeline.publish()
        publish, states = pipeline.ledger.publish(), pipeline.ledger.tables()
        assert publish is not None
        reached = Past(source, [(at, held) for at, held in past.held if at < publish.lsn])
        for table in work.tables():
            if table.usable:
                name = TableName(table.schema, table.name)
                assert name in publish.histories, f"{name}: {states[name].state} {states[name].reason} {states[name].history}"
                path = pipeline.lake.history(states[name].location)
                positions += reached.compare(table.quoted, path, since)
                _assert_ordered(path, every_change=option == "every_change" and table.name not in _ONCE)
    return positions


def _options(option: bool | str) -> TableOptions:
    """The options of all tables; of some only the last change of a transaction is kept in any case."""
    return parse_options({"*.*": {"history": option}, **{f"public.{name}": {"history": True} for name in _ONCE}})


def _assert_ordered(path: str, *, every_change: bool) -> None:
    """Versions end after they begin; with `every_change` also where they begin."""
    ended = pl.read_delta(path).filter(pl.col("_pgwal_valid_to_lsn").is_not_null())
    least = (ended["_pgwal_valid_to_lsn"] - ended["_pgwal_valid_from_lsn"]).min()
    assert least is None or (isinstance(least, int) and least >= (0 if every_change else 1)), path
    assert ended.filter(pl.col("_pgwal_open")).height == 0
    assert ended["_pgwal_end_op"].null_count() == 0


def _repeat(seed: int, number: int, error: BaseException) -> AssertionError:
    repeat = f"PGWAL_TEST_SEED={seed} PGWAL_TEST_ROUNDS={number} pytest {Path(__file__).name} -k in_short"
    return AssertionError(f"seed {seed}, round {number}: {error}\nTo repeat: {repeat}")


def _with_history(pipeline: Pipeline, source: Source, spark: Any) -> Pipeline:
    pipeline.source, pipeline.spark = source, lambda: spark
    return pipeline


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_history_at_each_commit_in_short(source: Source, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    seed = int(os.environ.get("PGWAL_TEST_SEED", _QUICK_SEED))
    wanted = int(os.environ.get("PGWAL_TEST_ROUNDS", _QUICK_ROUNDS))
    option = os.environ.get("PGWAL_TEST_HISTORY", "") or "every_change"
    made = make_pipeline(table_options=_options(option), blocked_timeout=3)
    try:
        positions = _run_rows(_with_history(made, source, spark), source, seed, lambda number: number >= wanted, option)
    except Exception as error:
        raise _repeat(seed, wanted, error) from error
    assert positions > 50


class _Closed:
    """The versions that have ended, as they were when that was seen first."""

    def __init__(self) -> None:
        self.known: dict[str, Counter[Any]] = {}

    def check(self, path: str) -> None:
        ended = pl.read_delta(path).filter(pl.col("_pgwal_valid_to_lsn").is_not_null())
        place = ended.select(
            "_pgwal_valid_from_lsn", "_pgwal_valid_to_lsn", "_pgwal_valid_from", "_pgwal_valid_to", "_pgwal_op", "_pgwal_end_op"
        )
        now = rows_of(place)
        gone = self.known.get(path, Counter()) - now
        assert not gone, f"{path}: versions that had ended are gone or changed: {list(gone)[:3]}"
        self.known[path] = now


def _newest(pipeline: Pipeline, rounds: Rounds) -> int:
    """The open versions of each history are the rows of its table now; gives how many tables were compared."""
    publish, states = pipeline.ledger.publish(), pipeline.ledger.tables()
    assert publish is not None
    compared = 0
    for table in rounds.work.tables():
        state: TableState = states[TableName(table.schema, table.name)]
        if state.state != "ready" or not table.usable:
            continue
        assert state.table in publish.histories, f"{state.table}: {state.history}"
        current, history = pl.read_delta(publish.tables[state.table].path), pl.read_delta(publish.histories[state.table].path)
        columns = [column.name for column in table.columns if column.name in current.columns]
        expected, found = rows_of(current.select(columns)), rows_of(history.filter(pl.col("_pgwal_open")).select(columns))
        assert expected == found, f"{state.table}: missing {list(expected - found)[:3]}, extra {list(found - expected)[:3]}"
        compared += 1
    return compared


@pytest.mark.soak
@pytest.mark.parametrize("option", [True, "every_change"])
def test_histories_for_an_hour(
    postgres: Any, make_pipeline: Callable[..., Pipeline], spark: Any, tmp_path: Path, option: bool | str
) -> None:
    """Changes of rows, compared at each commit; then changes of the tables too, compared at each publish."""
    end = time.monotonic() + 30 * float(os.environ.get("PGWAL_SOAK_MINUTES", "60"))
    seed = int(os.environ.get("PGWAL_TEST_SEED", "5000"))
    options = _options(option)
    while time.monotonic() < end:
        with fresh_source(postgres) as source:
            made = make_pipeline(source_dsn=source.dsn, lake=str(tmp_path / f"rows{seed}"), table_options=options, blocked_timeout=3)
            try:
                assert _run_rows(_with_history(made, source, spark), source, seed, lambda number: number >= 6, option)
            except Exception as error:
                raise _repeat(seed, 6, error) from error
        with fresh_source(postgres) as source:
            made = make_pipeline(
                source_dsn=source.dsn, lake=str(tmp_path / f"tables{seed}"), table_options=options, memory_budget="1MB",
                snapshot_chunk_rows=7, blocked_timeout=3,
            )  # fmt: skip
            pipeline = _with_history(made, source, spark)
            rounds, closed = Rounds(source, pipeline, seed), _Closed()
            for number in range(1, 6):
                try:
                    rounds.round()
                    drains.drain(pipeline.settings, progress=Silent())
                    pipeline.publish()
                    assert _newest(pipeline, rounds)
                    for state in pipeline.ledger.tables().values():
                        if state.history is not None:
                            closed.check(pipeline.lake.history(state.location))
                except Exception as error:
                    raise _repeat(seed, number, error) from error
        seed += 1

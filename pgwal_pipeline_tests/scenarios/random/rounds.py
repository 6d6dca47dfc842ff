"""Rounds of random changes on one database, each ended by a comparison of every table with the source."""

import random
import threading

import polars as pl

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.records import TablePointer
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.oracle import assert_equal
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.random.workload import Table, Workload
from pgwal_pipeline_tests.support import Source

_CHANGES = 120  # statements a round


_SETTLED_WITHIN = 8  # rounds of reading, draining and publishing after which nothing may be left to read


class Rounds:
    """One database and one lake, and rounds of changes on them."""

    def __init__(self, source: Source, pipeline: Pipeline, seed: int) -> None:
        self.source = source
        self.pipeline = pipeline
        self.rng = random.Random(seed)
        self.work = Workload(source, self.rng, pipeline.settings.publication)
        self.work.begin(tables=4, writers=4)
        drains.bootstrap(pipeline.settings, progress=Silent())  # making the slot waits for every transaction
        self.compared = self.rows = self.reread = 0

    def round(self) -> None:
        for _ in range(_CHANGES):
            self.work.step()
        kind = self.rng.choice(("quiet", "open", "beside"))
        self.work.settle(leave_open=kind == "open")
        if kind == "beside":
            self._run_beside()
            self.work.settle(leave_open=False)
        self._converge()
        self.compare()
        self.work.settle(leave_open=False)

    def _run_beside(self) -> None:
        """Writers go on, and tables are altered, while the pipeline runs."""
        ended = threading.Event()

        def write() -> None:
            while not ended.wait(0.01):
                self.work.step()

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        try:
            self._once()
        finally:
            ended.set()
            thread.join()

    def _once(self) -> None:
        drains.bootstrap(self.pipeline.settings, progress=Silent())
        if needed := snapshots.needed(self.pipeline.settings):
            self.reread += len(needed)
            self.pipeline.snapshot()
        self.pipeline.drain()
        self.pipeline.publish()

    def _converge(self) -> None:
        for _ in range(_SETTLED_WITHIN):
            self._once()
            if not snapshots.needed(self.pipeline.settings):
                return
            # A table that joined waits for the transactions of then.
            self.work.settle(leave_open=False)
        states = self.pipeline.ledger.tables()
        left = {str(table): states[table].reason for table in snapshots.needed(self.pipeline.settings)}
        raise AssertionError(f"still to be read: {left}")

    def compare(self) -> None:
        publish, states = self.pipeline.ledger.publish(), self.pipeline.ledger.tables()
        assert publish is not None
        for table in self.work.tables():
            name = TableName(table.schema, table.name)
            state = states[name]
            assert state.state == _wanted(table), f"{name}: {state.state} {state.reason}"
            if state.state == "ready":
                pointer = publish.tables[name]
                self.rows += assert_equal(self.source, table.quoted, pointer.path, pointer.version, state.dropped)
                self.compared += 1
                _assert_one_row_a_key(pointer, state.key)
                _assert_once(self.pipeline.lake, state.location)
        there = {TableName(table.schema, table.name) for table in self.work.tables()}
        assert {name.name for name, state in states.items() if name not in there and state.state not in ("gone", "skipped")} == set()


def _wanted(table: Table) -> str:
    lower = [column.name.lower() for column in table.columns]
    if len(set(lower)) < len(lower):
        return "error"  # Delta has no columns that differ only in case
    return "ready" if table.usable else "skipped"


def _assert_one_row_a_key(at: TablePointer, key: tuple[str, ...]) -> None:
    """A key has one row, whether it is living or was deleted."""
    frame = pl.scan_delta(at.path, version=at.version).collect()
    assert not key or not frame.select(key).is_duplicated().any(), f"{at.path}: a key has several rows"


def _assert_once(lake: Lake, place: TableName) -> None:
    """No position stands in raw twice."""
    position = ["_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op"]
    raw = pl.scan_delta(lake.raw(place)).select(position).collect()
    assert raw.is_duplicated().sum() == 0, f"{place}: changes stand in raw twice"

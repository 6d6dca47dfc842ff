"""Tables altered under a pipeline: the statements, the runs that follow them, and where the tables stand then."""

from collections.abc import Callable
from typing import Any

import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source


def run(source: Source, statements: str, table: str) -> None:
    """Each statement is a transaction of its own."""
    for statement in statements.replace("{t}", table).split("; "):
        source.sql(statement)


def generations(pipeline: Pipeline) -> dict[str, str | None]:
    return {state.table.name: state.generation for state in pipeline.ledger.tables().values() if state.state == "ready"}


def converge(pipeline: Pipeline) -> None:
    """What `pgwal sync` does: read what needs it, drain, publish; once more where the drain found that a table was altered."""
    drains.bootstrap(pipeline.settings, progress=Silent())
    for _ in range(3):
        if snapshots.needed(pipeline.settings):
            pipeline.snapshot()
        pipeline.drain()
        pipeline.publish()
        if not snapshots.needed(pipeline.settings):
            return


def while_the_stream_is_read(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """A drain that has looked at the tables when `act` is done, and reads what it did."""
    attach = drains.attach

    def then_act(*args: Any, **named: Any) -> Any:
        found = attach(*args, **named)
        act()
        return found

    monkeypatch.setattr(drains, "attach", then_act)
    pipeline.drain()
    monkeypatch.undo()

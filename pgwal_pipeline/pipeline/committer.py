"""Counting the windows of one stream in their order, each while the next one is read."""

import contextvars
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

from pgwal_pipeline import failpoints
from pgwal_pipeline.errors import SourceUnavailable
from pgwal_pipeline.lake.ledger import Window
from pgwal_pipeline.pipeline.changes import Look
from pgwal_pipeline.pipeline.counting import Pass, count, review, window_of
from pgwal_pipeline.pipeline.tally import WindowRead
from pgwal_pipeline.pipeline.window import StreamBroke
from pgwal_pipeline.relation import TableName
from pgwal_pipeline.xid import Snapshot


class Committer:
    """Reviews and counts windows one after another on a thread of its own; a context manager that waits for the last of them.

    Where the block ends because a connection broke, be it the stream's or the one on which windows are reviewed, it raises StreamBroke with
    the windows that count by then.

    `before` are the looks at the tables from before any of them was read. `windows` are those that count, `reached` is the LSN where the
    last of them ends, 0 before the first: the slot may be confirmed to there.
    """

    def __init__(self, run: Pass, before: Mapping[TableName, Look]) -> None:
        self.windows: list[Window] = []
        self.reached = 0
        self._run = run
        self._before = before
        self._pool = ThreadPoolExecutor(1, "pgwal-commit")
        self._context = contextvars.copy_context()
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown()
        if isinstance(error, SourceUnavailable):
            raise StreamBroke(error, error.kept if isinstance(error, StreamBroke) else None, self.windows) from error

    def take(self, read: WindowRead) -> None:
        """Count a window behind which the stream goes on; waits until the one before it counts, and raises what that raised."""
        self.wait()
        failpoints.hit("drain.between_windows")
        self.submit(read, None)

    def submit(self, read: WindowRead, ended: Snapshot | None) -> Future[None]:
        """Have a window counted after those before it; `ended` is as `review` has it."""
        self._pending = self._pool.submit(self._context.run, self._commit, self._pending, read, ended)
        return self._pending

    def wait(self) -> None:
        """Wait until every window taken so far counts; raises what kept one from it."""
        if self._pending is not None:
            self._pending.result()

    def _commit(self, earlier: Future[None] | None, read: WindowRead, ended: Snapshot | None) -> None:
        if earlier is not None:
            earlier.result()
        started = time.perf_counter()
        run = self._run
        window = window_of(run.settings.slot, read)
        review(run, self._before, read.facts, ended)
        (counted,) = count(run.ledger, [window], run.warn)
        spent = time.perf_counter() - started
        self.windows.append(replace(counted, seconds=read.seconds | {"write": read.seconds["write"] + spent}))
        self.reached = read.end_lsn

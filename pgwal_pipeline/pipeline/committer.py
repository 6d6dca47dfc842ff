"""Commit the windows of one stream in order, each while the next one is read."""

import contextvars
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.ledger import Window
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.pipeline.alterations import CatalogEntry
from pgwal_pipeline.pipeline.tally import WindowRead
from pgwal_pipeline.pipeline.window import StreamBroke
from pgwal_pipeline.pipeline.window_commit import DrainContext, commit_windows, review, window_of
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.xid import Snapshot


class Committer:
    """Reviews and commits windows one after another on a thread of its own; a context manager that waits for the last of them.

    If a connection broke, the stream's or the one for reviews, the context manager raises StreamBroke with the windows that are complete.

    `before` are the catalog entries from before the first window. `windows` are those that are complete. `reached` is the end of the last
    of them, 0 before the first: the slot may be confirmed up to there.
    """

    def __init__(self, ctx: DrainContext, before: Mapping[TableName, CatalogEntry]) -> None:
        self.windows: list[Window] = []
        self.reached = 0
        self._ctx = ctx
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
        """Have a window committed that is not the last. Waits until the one before it is complete, and raises an error of that one."""
        self.wait()
        failpoints.hit("drain.between_windows")
        self.submit(read, None)

    def submit(self, read: WindowRead, ended: Snapshot | None) -> Future[None]:
        """Have a window committed after those before it; `ended` is as for `review`."""
        self._pending = self._pool.submit(self._context.run, self._commit, self._pending, read, ended)
        return self._pending

    def wait(self) -> None:
        """Wait until every window taken so far is complete; raises the error that prevented it."""
        if self._pending is not None:
            self._pending.result()

    def _commit(self, earlier: Future[None] | None, read: WindowRead, ended: Snapshot | None) -> None:
        if earlier is not None:
            earlier.result()
        started = time.perf_counter()
        ctx = self._ctx
        window = window_of(ctx.settings.slot, read)
        review(ctx, self._before, read.facts, ended)
        (complete,) = commit_windows(ctx.ledger, [window], ctx.warn)
        spent = time.perf_counter() - started
        self.windows.append(replace(complete, seconds=read.seconds | {"write": read.seconds["write"] + spent}))
        self.reached = read.end_lsn

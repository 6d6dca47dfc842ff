"""Progress of a piece of work, shown on a terminal, in a Dagster run's log, or not at all.

The pipeline may call `stage` at any rate and from any thread; each watcher decides how much of it to show.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, Self, TextIO

import rich.progress
from rich.console import Console

from pgwal_pipeline.messages.amounts import duration, size
from pgwal_pipeline.messages.printable import printable

_QUIET_SECONDS = 10.0  # between two lines about one stage, in a log or a terminal without bars


class Progress(Protocol):
    """Receives the progress of a long piece of work."""

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Report that `done` of `total` `unit`s of the stage `name` are done; `total` is None if it is not known."""

    def warn(self, text: str) -> None:
        """Report something a person should know, though the work goes on."""

    def say(self, text: str) -> None:
        """Report a step that was taken."""


class Silent:
    """A watcher that shows nothing."""

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Show nothing."""

    def warn(self, text: str) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""


class Noted:
    """Passes everything on to another watcher and keeps each warning once, in `warnings`."""

    def __init__(self, watcher: Progress) -> None:
        self._watcher = watcher
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings so far, in the order in which they came."""
        return tuple(self._warnings)

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Pass it on."""
        self._watcher.stage(name, done, total, unit)

    def warn(self, text: str) -> None:
        """Keep it and pass it on."""
        self._warnings[text] = None
        self._watcher.warn(text)

    def say(self, text: str) -> None:
        """Pass it on."""
        self._watcher.say(text)


class Several:
    """Passes everything on to several watchers."""

    def __init__(self, *watchers: Progress) -> None:
        self._watchers = watchers

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Pass it on to each."""
        for watcher in self._watchers:
            watcher.stage(name, done, total, unit)

    def warn(self, text: str) -> None:
        """Pass it on to each."""
        for watcher in self._watchers:
            watcher.warn(text)

    def say(self, text: str) -> None:
        """Pass it on to each."""
        for watcher in self._watchers:
            watcher.say(text)


def _amount(done: int, total: int | None, unit: str) -> str:
    """Return `1.5 GiB of 2.0 GiB of WAL` for bytes, `1,200 of 5,000 rows` for anything else."""
    if unit.split(" ")[0] == "bytes":
        rest = unit.removeprefix("bytes").removeprefix(" of")
        return f"{size(done)}{f' of {size(total)}' if total else ''}{' of' + rest if rest else ''}"
    return f"{done:,}{f' of {total:,}' if total else ''} {unit}"


class _Speed:
    """Measures the rate of each stage and estimates the time left."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def text(self, name: str, done: int, total: int | None, unit: str) -> str:
        """Return `, 310,000 rows/s, 12 s left`, below one a second `, 3.5 s each, …`; empty while there is no rate yet."""
        now = time.monotonic()
        with self._lock:
            began, first = self._began.setdefault(name, (now, done))
            if done < first:  # the stage began again
                began, first = self._began[name] = now, done
        elapsed, came = now - began, done - first
        if elapsed < 1.0 or came <= 0:
            return ""
        rate = came / elapsed
        left = f", {duration((total - done) / rate)} left" if total is not None and total > done else ""
        what = unit.split(" ")[0]
        if what != "bytes" and rate < 1:
            return f", {1 / rate:.1f} s each{left}"
        speed = size(round(rate)) if what == "bytes" else f"{rate:,.0f} {what}"
        return f", {speed}/s{left}"


class _Throttle:
    """Lets a line about a stage through when the stage begins, then every `seconds`, and when it ends."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: dict[str, tuple[float, bool]] = {}
        self._lock = threading.Lock()

    def lets_through(self, name: str, *, complete: bool) -> bool:
        now = time.monotonic()
        with self._lock:
            at, was_complete = self._last.get(name, (-self._seconds, False))
            if now - at < self._seconds and (was_complete or not complete):
                return False
            if was_complete and complete:
                return False
            self._last[name] = (now, complete)
            return True


class DagsterLog:
    """Writes to a run's log, `context.log`: a line when a stage begins, one every ten seconds, and one when it is done."""

    def __init__(self, log: logging.Logger, *, every_seconds: float = _QUIET_SECONDS) -> None:
        self._log = log
        self._throttle = _Throttle(every_seconds)
        self._pace = _Speed()

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Log the stage if a line is due."""
        pace = self._pace.text(name, done, total, unit)
        if self._throttle.lets_through(name, complete=total is not None and done >= total):
            self._log.info("%s: %s%s", printable(name), _amount(done, total, unit), pace)

    def warn(self, text: str) -> None:
        """Log a warning."""
        self._log.warning(printable(text))

    def say(self, text: str) -> None:
        """Log a line."""
        self._log.info(printable(text))


class Terminal:
    """Shows bars on a terminal, or plain lines every ten seconds on any other stream. On stderr, since stdout is for JSON.

    A context manager: the bars are shown from entering to leaving.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, soft_wrap=True, highlight=False)
        self._throttle = _Throttle(_QUIET_SECONDS)
        self._pace = _Speed()
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._lock = threading.Lock()
        self._bars = (
            rich.progress.Progress(
                rich.progress.SpinnerColumn(finished_text="✓"),
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[amount]}", markup=False),
                rich.progress.TimeElapsedColumn(),
                console=self._console,
            )
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:
        """Move the stage's bar, or print a line if one is due."""
        amount = _amount(done, total, unit) + self._pace.text(name, done, total, unit)
        if self._bars is None:
            if self._throttle.lets_through(name, complete=total is not None and done >= total):
                self._print(f"{name}: {amount}")
            return
        with self._lock:
            task = self._tasks.get(name)
            if task is None:
                self._tasks[name] = self._bars.add_task(printable(name), total=total, completed=done, amount=amount)
            else:
                self._bars.update(task, total=total, completed=done, amount=amount)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._print(f"warning: {text}", style="yellow")

    def say(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(printable(text), style=style, markup=False, emoji=False)


_ambient: ContextVar[Progress | None] = ContextVar("pgwal_progress", default=None)


@contextmanager
def watched_by(watcher: Progress) -> Iterator[None]:
    """Within the block, also show `watcher` the progress of runs that this process executes itself."""
    token = _ambient.set(watcher)
    try:
        yield
    finally:
        _ambient.reset(token)


def for_run(log: logging.Logger) -> Progress:
    """Return the watcher for a Dagster run: its log, and the watcher given to `watched_by`, if any."""
    watcher = _ambient.get()
    return DagsterLog(log) if watcher is None else Several(DagsterLog(log), watcher)

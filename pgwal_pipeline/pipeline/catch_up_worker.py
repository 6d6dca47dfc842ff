"""`python -m pgwal_pipeline.pipeline.catch_up_worker START END VERSION BUDGET`: reads one window of a catch-up on a copy of the slot.

The copy is a temporary slot. `CatchUpProcess` starts this program, with the settings in the environment. Each report is a line of JSON on
standard output. When its standard input ends, as it does if the parent process ends, it removes its files and stops.
"""

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from types import FrameType
from typing import Any, TextIO

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.errors import error_to_json
from pgwal_pipeline.pipeline.window_commit import DrainContext, read_ahead
from pgwal_pipeline.postgres.copies import SlotCopy
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn

_REPORT_EVERY = 0.5  # seconds between two reports of progress
_CLEANUP = 5.0  # seconds to remove the files


class _Stopped(BaseException):
    """Raised when the parent process has ended or no longer wants the window."""


class _Reporter:
    """Sends reports to the parent process. It is the `Progress` of this one."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._reported = 0.0

    def send(self, **report: Any) -> None:
        self._out.write(json.dumps(report) + "\n")
        self._out.flush()

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:  # noqa: ARG002 - the parent has its own name and unit
        """Report progress, at most once every `_REPORT_EVERY` seconds, and at the end."""
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY or done == total:
            self._reported = now
            self.send(stage=[done, total])

    def warn(self, text: str) -> None:
        """Report a warning, as a step that was taken."""
        self.send(say=text)

    def say(self, text: str) -> None:
        """Report a step that was taken."""
        self.send(say=text)


def main() -> None:
    """Read the window that the arguments name, and exit with code 0 once it is recorded in the ledger."""
    atexit.register(gc.freeze)  # spares the collector a search through everything loaded when the interpreter exits
    # Standard output takes reports only; what a library prints goes to standard error.
    reporter = _Reporter(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    # Until the handler is set nothing has been written, so that the signal may simply end the process.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        signal.signal(signal.SIGTERM, _stop)
        code = _work(reporter)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Stopped:
        code = 1
    sys.exit(code)


def _work(reporter: _Reporter) -> int:
    start, end, version, budget = map(int, sys.argv[1:5])
    try:
        _read(Settings.from_environment(), (start, end), version, budget, reporter)
        reporter.send(done=True)
    except BrokenPipeError:
        return 1
    except Exception as error:  # noqa: BLE001 - sent to the parent, which raises it
        with suppress(BrokenPipeError):
            reporter.send(error=error_to_json(error))
        return 1
    return 0


def _read(settings: Settings, limits: tuple[int, int], version: int, budget: int, reporter: _Reporter) -> None:
    timeout = settings.blocked_timeout
    with (
        closing(connect(settings.dsn)) as conn,
        closing(SlotCopy.make(settings.dsn, settings.slot, blocked_timeout=timeout, warn=reporter.warn)) as copy,
    ):
        reporter.send(ready=True)
        failpoints.hit("catch_up.copied")
        reporter.say(f"{copy.name} is moved to {format_lsn(limits[0])}")
        with copy.stream(settings.publication, limits[0], server_version=version) as stream:
            failpoints.hit("catch_up.moved")
            ctx = DrainContext(settings, Ledger(Lake(settings.lake)), conn, version, reporter.warn, reporter)
            read = read_ahead(ctx, stream, limits, budget)
            failpoints.hit("catch_up.after_files")
            ctx.ledger.record_read(read)
            failpoints.hit("catch_up.recorded")


def _stop(_: int, __: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    raise _Stopped


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_CLEANUP)
    os._exit(1)


if __name__ == "__main__":
    main()

"""`python -m pgwal_pipeline.pipeline.catch_up_worker START END VERSION BUDGET`: reads one window of a catch-up on a copy of the slot.

The copy is a temporary one. Started by `CatchUpProcess` with the settings in its environment; a line of JSON on its standard output for
each thing that it has to say. It stops when its standard input ends, as that does with the process that started it, and takes away what
it has written.
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
from pgwal_pipeline.pipeline.window_commit import read_ahead
from pgwal_pipeline.postgres.copies import SlotCopy
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn

_SHOWN_EVERY = 0.5  # seconds between two words on how far it is
_LAST_WORDS = 5.0  # seconds to take its files away


class _Stopped(BaseException):
    """Nobody wants the window any more."""


class _Teller:
    """Tells the process that started this one, as its `Progress` too."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = 0.0

    def tell(self, **said: Any) -> None:
        self._out.write(json.dumps(said) + "\n")
        self._out.flush()

    def stage(self, name: str, done: int, total: int | None, unit: str) -> None:  # noqa: ARG002 - the other names it
        """Tell now and then."""
        now = time.monotonic()
        if now - self._shown >= _SHOWN_EVERY or done == total:
            self._shown = now
            self.tell(stage=[done, total])

    def warn(self, text: str) -> None:
        """Tell it."""
        self.tell(say=text)

    def say(self, text: str) -> None:
        """Tell it."""
        self.tell(say=text)


def main() -> None:
    """Read the window that the arguments name, and end with 0 once the ledger has it."""
    atexit.register(gc.freeze)  # nothing that it has loaded is garbage, to be looked for at its end
    # Nothing but what is told may stand on standard output, whatever a library prints.
    teller = _Teller(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    # Until the handler is set nothing has been written, and the signal may end the process by itself.
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    try:
        signal.signal(signal.SIGTERM, _stop)
        code = _work(teller)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except _Stopped:
        code = 1
    sys.exit(code)


def _work(teller: _Teller) -> int:
    start, end, version, budget = map(int, sys.argv[1:5])
    try:
        _read(Settings.from_environment(), (start, end), version, budget, teller)
        teller.tell(done=True)
    except BrokenPipeError:
        return 1
    except Exception as error:  # noqa: BLE001 - the other raises it
        with suppress(BrokenPipeError):
            teller.tell(error=error_to_json(error))
        return 1
    return 0


def _read(settings: Settings, limits: tuple[int, int], version: int, budget: int, teller: _Teller) -> None:
    ledger = Ledger(Lake(settings.lake))
    timeout = settings.blocked_timeout
    with (
        closing(connect(settings.dsn)) as conn,
        closing(SlotCopy.make(settings.dsn, settings.slot, blocked_timeout=timeout, warn=teller.warn)) as copy,
    ):
        teller.tell(ready=True)
        failpoints.hit("catch_up.copied")
        teller.say(f"{copy.name} is moved to {format_lsn(limits[0])}")
        with copy.stream(settings.publication, limits[0], server_version=version) as stream:
            failpoints.hit("catch_up.moved")
            read = read_ahead(stream, settings, ledger, conn, limits, memory_budget=budget, progress=teller)
            failpoints.hit("catch_up.after_files")
            ledger.record_read(read)
            failpoints.hit("catch_up.recorded")


def _stop(_: int, __: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; a second would break off the cleaning up
    raise _Stopped


def _end_with_the_other() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_WORDS)
    os._exit(1)


if __name__ == "__main__":
    main()

"""Interrupts that Python would lose."""

import signal
import sys
import threading
from collections.abc import Callable

_SOON = 0.1  # seconds; by then Python is done with what it was finalizing


def on_lost(lost: Callable[[BaseException | None], int]) -> None:
    """Have an interrupt that was raised while Python finalized an object come again, as the signal that `lost` makes of it.

    What is raised there ends there, an interrupt too: whoever was at work would never learn of it, and the signal is spent. `lost` is
    called in the main thread. Anything else is told on stderr as always.
    """

    def ignored(what: "sys.UnraisableHookArgs") -> None:
        if issubclass(what.exc_type, Exception | SystemExit | GeneratorExit):
            sys.__unraisablehook__(what)
            return
        again = threading.Timer(_SOON, signal.pthread_kill, (threading.main_thread().ident, lost(what.exc_value)))
        again.daemon = True
        again.start()

    sys.unraisablehook = ignored

"""Repeat interrupts that Python would lose."""

import signal
import sys
import threading
from collections.abc import Callable

_SOON = 0.1  # seconds; by then Python has finalized the object


def on_lost(lost: Callable[[BaseException | None], int]) -> None:
    """Send an interrupt again that was raised while Python finalized an object, as the signal that `lost` returns for the exception.

    Python drops exceptions raised there, interrupts too: the code that ran would never see it, and the signal is used up. `lost` is called
    in the main thread. Other exceptions are printed to stderr as usual.
    """

    def ignored(what: "sys.UnraisableHookArgs") -> None:
        if issubclass(what.exc_type, Exception | SystemExit | GeneratorExit):
            sys.__unraisablehook__(what)
            return
        again = threading.Timer(_SOON, signal.pthread_kill, (threading.main_thread().ident, lost(what.exc_value)))
        again.daemon = True
        again.start()

    sys.unraisablehook = ignored

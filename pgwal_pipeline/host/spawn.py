"""Start processes that end with this one, and find ports for servers."""

import ctypes
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from pgwal_pipeline.messages.errors import PgwalError

_PR_SET_PDEATHSIG = 1

# Below it are the well-known ports of programs.
_FIRST_PORT = 20_000


def spawn(command: Sequence[str], log: IO[bytes], *, death_signal: signal.Signals, **options: Any) -> subprocess.Popen[Any]:
    """Start `command` in a session of its own, with its output in `log`. It gets `death_signal` when this process ends (Linux only).

    `options` are Popen's. Raises PgwalError if the program cannot be run.
    """
    # Linux sends the signal when the starting *thread* ends, so it is started by a thread that lives as long as the started process.
    started: list[subprocess.Popen[Any] | BaseException] = []
    ready = threading.Event()

    def run() -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_ask_for(death_signal),  # noqa: PLW1509 (one system call, looked up before)
                **options,
            )
        except BaseException as error:  # noqa: BLE001 (handed to the caller)
            started.append(error)
            ready.set()
            return
        started.append(process)
        ready.set()
        process.wait()

    threading.Thread(target=run, name=f"pgwal-{command[0].rpartition('/')[2]}", daemon=True).start()
    ready.wait()
    outcome = started[0]
    if isinstance(outcome, OSError):
        raise PgwalError(f"The program {command[0]} cannot be run: {outcome.strerror}.") from outcome
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which no program listens.

    It is outside the range that the system assigns by itself, so it is still free when its server restarts.
    """
    below = range(_FIRST_PORT, _first_handed_out())
    for port in random.SystemRandom().sample(below, k=min(100, len(below))):
        if port_free(port):
            return port
    with socket.socket() as probe:  # on a system that assigns nearly all ports
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_free(port: int) -> bool:
    """Return whether a server could listen on `port` of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _first_handed_out() -> int:
    """Return the first port that the system assigns to outgoing connections and to programs that ask for any port."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # the lowest default of common systems


def _ask_for(death_signal: signal.Signals) -> Callable[[], None] | None:
    """Return the function that the new process calls first: it asks for `death_signal` when the parent ends."""
    if not sys.platform.startswith("linux"):
        return None
    # Looked up before the fork, because nothing may be loaded between fork and exec.
    prctl = ctypes.CDLL(None).prctl
    arguments = (ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(death_signal), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))

    def ask() -> None:
        prctl(*arguments)

    return ask

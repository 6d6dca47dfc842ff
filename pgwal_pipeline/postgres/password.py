"""Ask a command for the source's password. It is handed to one connection and not kept; nothing of what the command prints is shown."""

import os
import select
import signal
import subprocess
import time
from contextlib import suppress

from pgwal_pipeline.messages.errors import SettingError, SourceUnavailable

LONGEST = 30.0
"""Seconds that the command may take."""

_VARIABLE = "PGWAL_PASSWORD_COMMAND"
_BY_HAND = "run it by hand to see why"
_MOST = 64 << 10  # bytes; a server takes no longer password
_LOOK_EVERY = 0.25  # seconds between looks whether the command has ended
_CANNOT_RUN = {126: "the shell may not run its program", 127: "the shell finds no such program"}


def ask(command: str, within: float = LONGEST) -> str:
    """Run `command` in a shell and return what it prints, without the newline at the end.

    Raises SettingError for a command that cannot be run, SourceUnavailable if it fails, prints no password, or takes longer than `within`
    seconds: what it asks may answer again later.
    """
    # In a session of its own nothing of it outlives its time, and a terminal's Ctrl-C does not reach it.
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        printed = _printed(process, within)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        assert process.stdout is not None
        process.stdout.close()
        process.wait()
    status = process.returncode
    if status in _CANNOT_RUN:
        raise SettingError(f"{_VARIABLE} cannot be run: {_CANNOT_RUN[status]} (exit status {status}); correct it.")
    if status:
        how = f"was ended by signal {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"
        raise SourceUnavailable(f"{_VARIABLE} {how}; it has to print the source's password: {_BY_HAND}.")
    return _password(printed)


def _printed(process: "subprocess.Popen[bytes]", within: float) -> bytes:
    """Return what the process prints until it ends. What it leaves running in the background may keep its output open."""
    assert process.stdout is not None
    deadline = time.monotonic() + within
    output = process.stdout.fileno()
    poll = select.poll()
    poll.register(output, select.POLLIN)
    printed = b""
    while True:
        ended = process.poll() is not None  # before the last look: what it has printed until then is there
        if poll.poll(0 if ended else _LOOK_EVERY * 1000):
            more = os.read(output, _MOST)
            printed += more
            if not more:
                break
        elif ended:
            break
        if len(printed) > _MOST:
            raise SourceUnavailable(f"{_VARIABLE} printed more than {_MOST >> 10} kB, which is no password; {_BY_HAND}.")
        _require_time(deadline, within)
    while process.poll() is None:
        _require_time(deadline, within)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_EVERY)
    return printed


def _require_time(deadline: float, within: float) -> None:
    if time.monotonic() > deadline:
        raise SourceUnavailable(f"{_VARIABLE} did not end within {within:g} s, and was stopped; {_BY_HAND}.")


def _password(printed: bytes) -> str:
    try:
        password = printed.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise SourceUnavailable(f"{_VARIABLE} printed bytes that are not UTF-8, which is no password; {_BY_HAND}.") from None
    if not password:
        raise SourceUnavailable(f"{_VARIABLE} printed nothing, though it ended with exit status 0; {_BY_HAND}.")
    if "\0" in password:
        raise SourceUnavailable(f"{_VARIABLE} printed a zero byte, which no password has; {_BY_HAND}.")
    return password

"""Programs that the demo starts, and that end with it however it ends.

On Linux the kernel sends a program SIGINT when the demo dies. Processes that the program has started, such as a run in progress, may live
longer. Each process carries a variable in its environment that names its demo; the demo's end and its next start use it to find and end
what is left.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from pgwal_pipeline.host.spawn import spawn
from pgwal_pipeline.messages.errors import PgwalError

_MARK = "PGWAL_DEMO_FOLDER"
_LOG_LIMIT = 16 << 20  # bytes; a larger log is deleted at the next start


def mark(root: Path) -> dict[str, str]:
    """Return the environment variable that marks programs of the demo in `root`; the processes they start inherit it."""
    return {_MARK: str(root)}


class Program:
    """A running program with its output in a file. It gets SIGINT, as from Ctrl-C, when this process dies."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log_file: Path, folder: Path) -> None:
        """Start `command` in `folder` with exactly `environment`. Raises PgwalError if it cannot be started."""
        self.name, self.log_file = name, log_file
        if log_file.exists() and log_file.stat().st_size > _LOG_LIMIT:
            log_file.unlink()
        with log_file.open("ab") as log:
            self._log_begin = log.tell()
            self._process = spawn(command, log, death_signal=signal.SIGINT, env=dict(environment), cwd=folder)

    @property
    def running(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def require_running(self) -> None:
        """Raise PgwalError with the last lines of its log if it has ended."""
        if not self.running:
            raise PgwalError(
                f"{self.name} ended with code {self._process.returncode}; its log {self.log_file} ends with: {self.last_words()}"
            )

    def last_words(self, lines: int = 5) -> str:
        """Return the last lines that it has logged since this start."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_begin)
            return " / ".join(line.strip() for line in log.read().decode(errors="replace").splitlines()[-lines:]) or "nothing"

    def ask_to_end(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        if self.running:
            self._process.send_signal(signal.SIGINT)

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (of `time.monotonic`) for it to end, then kill its process group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def end_programs(programs: Iterable[Program], seconds: float) -> None:
    """Ask all programs to end at once, and kill those that have not ended after `seconds`."""
    deadline = time.monotonic() + seconds
    running = list(programs)
    for program in running:
        program.ask_to_end()
    for program in running:
        program.end(deadline)


def end_marked(root: Path, seconds: float) -> int:
    """End every process marked with the demo in `root`: SIGTERM, after `seconds` SIGKILL. Linux only. Return how many there were."""
    asked: set[int] = set()
    deadline = time.monotonic() + seconds
    while left := _marked(root):
        late = time.monotonic() > deadline
        for pid in left:
            if late or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        if time.monotonic() > deadline + 2:
            break
        time.sleep(0.05)
    return len(asked)


def _marked(root: Path) -> list[int]:
    """Return the ids of marked processes, except this one. A zombie has no environment any more, so it is not among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(_MARK) == str(root):
                found.append(process.pid)
    return found

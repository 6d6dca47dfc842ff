"""Programs that run beside the demo and end with it, whatever ends it.

On Linux a program asks the kernel for a SIGINT when the demo dies. What it has started itself may outlive it for a while, as a run in
progress does; every process bears the mark of its demo in its environment, by which an orderly end, and the next start, find what is left.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from pgwal_pipeline.errors import PgwalError
from pgwal_pipeline.local.process import spawn

_MARK = "PGWAL_DEMO_FOLDER"
_LOG_LIMIT = 16 << 20  # bytes; an older log is thrown away at the next start


def mark(root: Path) -> dict[str, str]:
    """The environment variable that programs of the demo in `root` bear, and hand on to all that they start."""
    return {_MARK: str(root)}


class Program:
    """A running program with its output in a file. It gets a SIGINT, as from Ctrl-C, when we are gone."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log_file: Path, folder: Path) -> None:
        """Start `command` in `folder` with exactly `environment`. Raises PgwalError when it cannot be run."""
        self.name, self.log_file = name, log_file
        if log_file.exists() and log_file.stat().st_size > _LOG_LIMIT:
            log_file.unlink()
        with log_file.open("ab") as log:
            self._log_begin = log.tell()
            self._process = spawn(command, log, death_signal=signal.SIGINT, env=dict(environment), cwd=folder)

    @property
    def running(self) -> bool:
        """Whether it is still alive."""
        return self._process.poll() is None

    def require_running(self) -> None:
        """Raise PgwalError, with the last lines of its log, when it has ended."""
        if not self.running:
            raise PgwalError(
                f"{self.name} ended with code {self._process.returncode}; its log {self.log_file} ends with: {self.last_words()}"
            )

    def last_words(self, lines: int = 5) -> str:
        """The end of what this start of it has logged."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_begin)
            return " / ".join(line.strip() for line in log.read().decode(errors="replace").splitlines()[-lines:]) or "nothing"

    def ask_to_end(self) -> None:
        """SIGINT, which a well-behaved program takes as Ctrl-C."""
        if self.running:
            self._process.send_signal(signal.SIGINT)

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (of `time.monotonic`) for it to end, then kill its whole session."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def end_programs(programs: Iterable[Program], seconds: float) -> None:
    """Ask all to end at once, and see to it that they have after `seconds`."""
    deadline = time.monotonic() + seconds
    running = list(programs)
    for program in running:
        program.ask_to_end()
    for program in running:
        program.end(deadline)


def end_marked(root: Path, seconds: float) -> int:
    """End every process with the mark of the demo in `root`: SIGTERM, after `seconds` SIGKILL. Linux only; returns how many there were."""
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
    """Live processes of ours with the mark, but for this one. A dead one that nobody has collected yet has no environment any more."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(_MARK) == str(root):
                found.append(process.pid)
    return found

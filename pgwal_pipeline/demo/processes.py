"""Programs that run beside the demo and end with it, whatever ends it.

On Linux a program asks the kernel for a SIGINT when the demo dies, and orphans further down come back to the demo as its own children, so
that none is lost. Elsewhere each program's session is ended as a whole.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pgwal_pipeline.errors import PgwalError
from pgwal_pipeline.local.process import spawn

_PR_SET_CHILD_SUBREAPER = 36
_LOG_LIMIT = 16 << 20  # bytes; an older log is thrown away at the next start
_LINUX = sys.platform.startswith("linux")


def adopt_orphans() -> None:
    """From now on, processes that our programs leave behind become our children, so that `end_descendants` finds them. Linux only."""
    if _LINUX:
        zero = ctypes.c_ulong(0)
        ctypes.CDLL(None).prctl(ctypes.c_int(_PR_SET_CHILD_SUBREAPER), ctypes.c_ulong(1), zero, zero, zero)


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


def end_descendants(seconds: float, spare: Iterable[int] = ()) -> None:
    """End every process that stems from this one, but for `spare` and theirs: SIGTERM, after `seconds` SIGKILL. Linux only."""
    if not _LINUX:
        return
    spared = frozenset(spare)
    deadline = time.monotonic() + seconds
    asked: set[int] = set()
    while left := _descendants(spared):
        late = time.monotonic() > deadline
        for pid in left:
            if late or pid not in asked:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        if time.monotonic() > deadline + 2:
            return
        time.sleep(0.05)
        _reap(left)


def _descendants(spared: frozenset[int]) -> list[int]:
    """Live processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (comm) state ppid …: the name in parentheses may hold anything, a parenthesis too.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z" or int(parent) == os.getpid():
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in spared:
                found.append(pid)
                queue.append(pid)
    return found


def _reap(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except (ChildProcessError, OSError):
            continue


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)

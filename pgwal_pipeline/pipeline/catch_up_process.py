"""Run a process that reads one window of a catch-up, and follow what it reports."""

import json
import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Self

from pgwal_pipeline.messages.errors import PgwalError, SourceRefused, error_from_json
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.settings import PREFIX, Settings

_PROGRAM = "pgwal_pipeline.pipeline.catch_up_worker"
_INHERITED = "PGWAL_FAILPOINTS"
_STARTING = 60.0  # seconds for a process to start and to copy the slot
_ENDING = 10.0  # seconds for a process that is stopped to remove its files


class CatchUpProcess:
    """A child process that reads the window `limits` on a copy of the slot. A context manager, which stops it at the end.

    The child gets its settings in the environment and reports on standard output; `progress` shows how far it is as `stage`. It stops when
    its standard input ends, so that it never outlives this process. `failure` is the error that it failed with, None if it has not failed.
    """

    def __init__(
        self, settings: Settings, limits: tuple[int, int], memory_budget: int, server_version: int, stage: str, progress: Progress
    ) -> None:
        self.failure: PgwalError | None = None
        self.may_be_tried_again = False
        self._stage = stage
        self._progress = progress
        self._ready = threading.Event()
        self._has_slot = False
        self._done = False
        given = settings.to_environment()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name == _INHERITED}
        command = [sys.executable, "-m", _PROGRAM, *map(str, limits), str(server_version), str(memory_budget)]
        # In a process group of its own a terminal's Ctrl-C does not reach it: this process decides when it ends.
        self._process = subprocess.Popen(
            command, env=inherited | given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        self._reader = threading.Thread(target=self._follow, name=f"pgwal-{stage}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def has_slot(self) -> bool:
        """Wait until it is known whether the child has a copy of the slot, and return that. If it has none, `failure` says why."""
        self._ready.wait(_STARTING)
        if not self._has_slot and self.failure is None:
            self._fail(SourceRefused(f"its process did not get a copy within {_STARTING:.0f} s."), again=True)
        return self._has_slot

    def wait(self) -> None:
        """Wait until the child has ended."""
        while self._reader.is_alive():
            self._reader.join(0.5)

    def close(self) -> None:
        """Stop the child if it is still running; it then removes its files."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _follow(self) -> None:
        """Read the child's reports until it ends."""
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._handle(json.loads(line))
        code = self._process.wait()
        if not self._done and self.failure is None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self._fail(PgwalError(f"The process of {self._stage} {how} before the window was read; run the drain again."), again=True)
        self._ready.set()

    def _handle(self, report: dict[str, Any]) -> None:
        match report:
            case {"ready": _}:
                self._has_slot = True
                self._ready.set()
            case {"stage": [done, total]}:
                self._progress.stage(self._stage, done, total, "bytes of WAL")
            case {"say": text}:
                self._progress.say(f"{self._stage}: {text}")
            case {"error": {**fields}}:
                failure = error_from_json(fields)
                self._fail(failure, again=failure.transient or not self._has_slot)
            case {"done": _}:
                self._done = True
            case _:
                raise ValueError(f"{report!r} is not a report of the process of a window")

    def _fail(self, failure: PgwalError, *, again: bool) -> None:
        self.failure = failure
        self.may_be_tried_again = again

"""A process that reads one window of a catch-up, as the drain that started it sees it."""

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
_KEPT = "PGWAL_FAILPOINTS"
_STARTING = 60.0  # seconds for a process to start and to copy the slot
_ENDING = 10.0  # seconds for one to take its files away when it is to stop


class CatchUpProcess:
    """Reads the window `limits` on a copy of the slot; ends with this process, however this one ends. A context manager.

    It gets its settings by environment, says how far it is on its standard output, which `progress` shows as `stage`, and stops when its
    standard input ends, which it does with this process. `failure` says why it did not end well, None while it may still.
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
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name == _KEPT}
        command = [sys.executable, "-m", _PROGRAM, *map(str, limits), str(server_version), str(memory_budget)]
        # In a group of its own a terminal's Ctrl-C does not reach it: this process decides when it ends.
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
        """Whether it has a copy of the slot; waits until that is known. If it has none, `failure` says why."""
        self._ready.wait(_STARTING)
        if not self._has_slot and self.failure is None:
            self._fail(SourceRefused(f"its process did not get one within {_STARTING:.0f} s."), again=True)
        return self._has_slot

    def wait(self) -> None:
        """Wait until it has ended."""
        while self._reader.is_alive():
            self._reader.join(0.5)

    def close(self) -> None:
        """Stop it, if it is still at work; it takes away what it has written."""
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
        """Take in what it says, to its end."""
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._take(json.loads(line))
        code = self._process.wait()
        if not self._done and self.failure is None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self._fail(PgwalError(f"The process of {self._stage} {how} before it had read it; run the drain again."), again=True)
        self._ready.set()

    def _take(self, said: dict[str, Any]) -> None:
        match said:
            case {"ready": _}:
                self._has_slot = True
                self._ready.set()
            case {"stage": [done, total]}:
                self._progress.stage(self._stage, done, total, "bytes of WAL")
            case {"say": text}:
                self._progress.say(f"{self._stage}: {text}")
            case {"error": {**said_error}}:
                failure = error_from_json(said_error)
                self._fail(failure, again=failure.transient or not self._has_slot)
            case {"done": _}:
                self._done = True
            case _:
                raise ValueError(f"{said!r} is nothing that the process of a window says")

    def _fail(self, failure: PgwalError, *, again: bool) -> None:
        self.failure = failure
        self.may_be_tried_again = again

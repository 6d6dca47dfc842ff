"""`dagster dev` as a user starts it, for tests."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pgwal_pipeline.host.spawn import free_port
from pgwal_pipeline_tests.support import wait_for

PATIENCE = 500.0  # seconds; a quiet machine needs a twentieth of it
INSTANCE = """
telemetry: { enabled: false }
nux: { enabled: false }
concurrency:
  runs:
    tag_concurrency_limits:
      - { key: pgwal/slot, value: { applyLimitPerUniqueValue: true }, limit: 1 }
"""


class Dev:
    """`dagster dev` as a process group of its own, ended as a terminal's Ctrl-C would end it."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *arguments: str, python: str = sys.executable) -> None:
        self.port = free_port()
        self.log = Path(environment["DAGSTER_HOME"], "dev.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", "dagster", "dev", *arguments, "-h", "127.0.0.1", "-p", str(self.port)],
                cwd=folder,
                env=os.environ | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # Where SIGINT is ignored, as in a background job of a shell, Dagster would ignore it too.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def kill(self) -> None:
        """End it if a test did not come to its end."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, query: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["data"]


def awaited(what: str, met: Callable[[], bool], dev: Dev) -> None:
    """Wait while `dagster dev` runs; its last words tell why when it ends or the time is over."""

    def met_while_it_runs() -> bool:
        done = met()
        assert done or dev.process.poll() is None, dev.log.read_text()[-5000:]
        return done

    wait_for(met_while_it_runs, seconds=PATIENCE, pause=1, what=lambda: f"{what}\n{dev.log.read_text()[-5000:]}")

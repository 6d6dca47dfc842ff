"""`pgwal` as a user runs it: processes of their own, in a folder of the test's own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pgwal_pipeline_tests import children


class Commands:
    """`pgwal` with a slot, a publication, a lake and a DAGSTER_HOME of the test's own: `run` to its end, or `start`ed to be looked at."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PGWAL_", "PG"))}
        self.environment = {
            **inherited,
            "PGWAL_SOURCE_DSN": dsn,
            "PGWAL_LAKE": str(folder / "lake"),
            "PGWAL_SLOT": "cli_test",
            "PGWAL_PUBLICATION": "cli_test",
            "PGWAL_BUSY_TIMEOUT": "3s",
            "PGWAL_SPARK_IDLE": "0",
            "DAGSTER_HOME": str(folder / "dagster"),
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pgwal_pipeline.cli", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env={**self.environment, **environment}, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        everything = {**self.environment, **environment}
        done = children.completed(children.pgwal, *arguments, environment=everything, cwd=self.folder, timeout=240)
        return done.returncode, done.stdout, done.stderr

    def json(self, *arguments: str) -> dict[str, Any]:
        code, out, err = self.run(*arguments, "--json")
        assert code == 0, err
        answer = json.loads(out)
        assert isinstance(answer, dict)
        return answer


def command_lines() -> dict[int, bytes]:
    """The command lines of all processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found

"""Programs as on another host: with a host name and a space of process ids of their own, where this user may make such."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_CONTAINER = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


@cache
def hosts_can_be_made() -> bool:
    """Whether `start` gives a program a host of its own; if not, it runs here."""
    return shutil.which("unshare") is not None and not subprocess.run([*_CONTAINER, "true"], capture_output=True, check=False).returncode


def start(host: str, *command: str, environment: Mapping[str, str], cwd: Path, **streams: Any) -> subprocess.Popen[str]:
    """Start `command` on the host called `host`. Killing the process that is returned kills all of it."""
    before = [*_CONTAINER, "sh", "-c", f'hostname {host} && exec "$0" "$@"'] if hosts_can_be_made() else []
    return subprocess.Popen([*before, *command], env={**environment}, cwd=cwd, text=True, **streams)


def start_pgwal(host: str, *arguments: str, environment: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
    """Start a `pgwal` command on the host called `host`, as `start` does."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start(host, sys.executable, "-m", "pgwal_pipeline.cli", *arguments, environment=environment, cwd=cwd, **pipes)


def name_of(host: str) -> str:
    """The name that programs on `host` know themselves by."""
    return host if hosts_can_be_made() else os.uname().nodename

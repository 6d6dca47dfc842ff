"""Programs that tests run to their end, each in a process of its own: forked from one that has loaded what all of them load first.

A command spends most of its time on that. What a test interrupts or looks at while it runs is started as a shell starts it.
"""

import atexit
import importlib
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from pgwal_pipeline import cli, failpoints

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["pgwal_pipeline_tests.loaded"])


def completed(
    program: Callable[..., object], *arguments: str, environment: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Call `program` in a process of its own, with `environment` as all of its variables, and wait for its end.

    Raises `subprocess.TimeoutExpired` after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("out", "err")]
        process = _FORKED.Process(target=_become, args=(program, arguments, dict(environment), cwd, said))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in said))


def pgwal(*arguments: str) -> None:
    """What the command does."""
    cli.main([*arguments], prog_name="pgwal")


def run_code(code: str) -> None:
    """What `python -c` does."""
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _become(
    program: Callable[..., object], arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path, said: list[Path]
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(said, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    importlib.reload(failpoints)  # it has looked at its variable
    try:
        program(*arguments)
    finally:
        atexit._run_exitfuncs()

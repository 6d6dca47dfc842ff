"""Programs that tests run to their end, each in a process of its own: forked from one that has loaded what all of them load first.

A command spends most of its time on that. What a test interrupts or looks at while it runs is started as a shell starts it.
"""

import atexit
import importlib
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
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
    pipes = [_FORKED.Pipe(duplex=False) for _ in range(2)]
    process = _FORKED.Process(target=_become, args=(program, arguments, dict(environment), cwd, [theirs for _, theirs in pipes]))
    with ThreadPoolExecutor(len(pipes)) as readers:
        process.start()
        for _, theirs in pipes:
            theirs.close()
        said = [readers.submit(_all_of, ours) for ours, _ in pipes]
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(text.result() for text in said))


def _all_of(pipe: Connection) -> str:
    with pipe, open(pipe.fileno(), encoding="utf-8", closefd=False) as text:
        return text.read()


def pgwal(*arguments: str) -> None:
    """What the command does."""
    cli.main([*arguments], prog_name="pgwal")


def run_code(code: str) -> None:
    """What `python -c` does."""
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _become(
    program: Callable[..., object], arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path, said: list[Connection]
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, pipe in enumerate(said, 1):
        with pipe:
            os.dup2(pipe.fileno(), number)
    importlib.reload(failpoints)  # it has looked at its variable
    try:
        program(*arguments)
    finally:
        atexit._run_exitfuncs()

"""The demo as a person runs it: from an empty folder to a first publish and the marts, ended, killed, and started again on what it left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgwal_pipeline.demo.dagster_ui import is_free
from pgwal_pipeline.demo.invariants import broken_in_lake
from pgwal_pipeline.demo.processes import _marked
from pgwal_pipeline.pipeline.as_of import find_publish
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.demo.marts_in_the_ui import await_marts, look_at_marts
from pgwal_pipeline_tests.support import wait_for

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is left behind is found by Linux's means"),
    pytest.mark.timeout(1200),
]

_SECONDS = 600.0  # a machine that does other things too


class Demo:
    """The demo in a process of its own, started as a script starts it in the background: SIGINT ignored.

    It lies in `demo`, unless Python is given other `arguments`.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.said = folder / "said"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "DAGSTER"))}
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *(arguments or ("-m", "pgwal_pipeline.demo", "--folder", str(folder / "demo"), "--port", "34567"))],
                cwd=folder,
                env={**environment, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )

    def await_text(self, pattern: str) -> str:
        """The first match of `pattern` in what it prints; AssertionError with all of it when it ends before."""

        def found() -> str | None:
            text = self.said.read_text()
            match = re.search(pattern, text)
            assert match is not None or self.process.poll() is None, text
            return match[1] if match else None

        return wait_for(found, seconds=_SECONDS, what=f"{pattern!r} in {self.said}")

    def end(self, number: signal.Signals) -> tuple[int, float]:
        """Send a signal; the exit code, and the seconds that it took."""
        begin = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(60), time.monotonic() - begin


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in _marked(tmp_path / "demo"):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_the_demo_from_nothing_to_a_publish_and_again_after_a_kill(folder: Path) -> None:
    demo = Demo(folder)
    address = demo.await_text(r"Dagster's UI is on (http://127\.0\.0\.1:\d+)\.")
    with urllib.request.urlopen(f"{address}/server_info", timeout=20) as answer:
        assert "dagster_version" in json.load(answer)
    demo.await_text(r"(Every current table is at one LSN)")
    publish = find_publish(Settings.from_environment({"PGWAL_LAKE": str(folder / "demo/lake")}))
    assert not any(broken_in_lake(publish["tables"]).values())
    await_marts(address)
    look_at_marts(address)
    demo.end(signal.SIGKILL)

    again = Demo(folder)
    again.await_text(r"(nothing is seeded)")
    address = again.await_text(r"Dagster's UI is on (http://127\.0\.0\.1:\d+)\.")
    assert again.end(signal.SIGINT) == (130, pytest.approx(15, abs=15))
    assert _marked(folder / "demo") == []
    assert not (folder / "demo/postgres/postmaster.pid").exists()
    assert is_free(int(address.rpartition(":")[2]))
    assert find_publish(Settings.from_environment({"PGWAL_LAKE": str(folder / "demo/lake")}))["lsn"] >= publish["lsn"]


_SLOW_TO_END = """
import time
from pgwal_pipeline import cli
from pgwal_pipeline.embedded.postgres import Postgres
cli._CLEAN_SECONDS = 0.5
stop = Postgres.stop
Postgres.stop = lambda server: (time.sleep(2), stop(server), print("stopped"))
cli.main(["demo"])
"""


_FINALIZED = """
import os, signal, time
from pathlib import Path
from pgwal_pipeline.demo import run

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

def nothing_but_that(*_):
    Dying()
    time.sleep(60)

run._run = nothing_but_that
raise SystemExit(run.run_demo(Path("demo")))
"""


def test_a_signal_while_an_object_is_finalized_ends_it_too(folder: Path) -> None:
    demo = Demo(folder, "-c", _FINALIZED)
    assert demo.process.wait(30) == 143
    assert "Traceback" not in demo.said.read_text()


def test_the_command_gives_the_demo_its_own_time_to_end(folder: Path) -> None:
    """Where a command of another kind would have been cut off, and the server left behind."""
    demo = Demo(folder, "-c", _SLOW_TO_END)
    demo.await_text(r"(The shop is open)")
    assert demo.end(signal.SIGINT)[0] == 130
    assert "stopped" in demo.said.read_text()
    # What was being started at that moment is ended by the death of who started it.
    wait_for(lambda: _marked(folder / ".demo") == [], what="the demo's last process to end")
    assert not (folder / ".demo/postgres/postmaster.pid").exists()


def test_one_folder_has_one_demo_at_a_time(folder: Path) -> None:
    (folder / "demo").mkdir()
    demo = Demo(folder)
    demo.await_text(r"(The shop is open)")
    other = subprocess.run(
        [sys.executable, "-m", "pgwal_pipeline.demo", "--folder", str(folder / "demo")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert other.returncode == 1
    assert "A demo is already running in" in other.stderr
    assert demo.end(signal.SIGTERM)[0] == 143
    assert _marked(folder / "demo") == []
    # What ended so is gone on with, as what was killed is.
    again = Demo(folder)
    again.await_text(r"(nothing is seeded)")
    assert again.end(signal.SIGTERM)[0] == 143
    assert not (folder / "demo/postgres/postmaster.pid").exists()

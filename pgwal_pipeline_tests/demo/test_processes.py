"""Programs beside the demo: they end with it, however it ends, and so does what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pgwal_pipeline.demo.processes import Program, end_marked, end_programs, mark
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline_tests.support import wait_for

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part of it is Linux's")

STUBBORN = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)"

# A program whose child leaves its session and its parent, as a daemon does, and does not care for SIGTERM.
LEAVES_AN_ORPHAN = """
import subprocess
subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60 & wait; sleep 60"], start_new_session=True)
"""

DIES = """
import os, sys, time
from pathlib import Path
from pgwal_pipeline.demo.processes import Program
folder = Path(sys.argv[1])
program = Program("it", ["sleep", "60"], {"PATH": os.environ["PATH"]}, folder / "log", folder)
(folder / "pid").write_text(str(program._process.pid))
os.kill(os.getpid(), 9)
"""


def test_a_program_that_ends_by_itself_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    program = Program(
        "It", [sys.executable, "-c", "print('first'); raise SystemExit('something is wrong')"], {}, tmp_path / "log", tmp_path
    )
    wait_for(lambda: not program.running, what="the end of the program")
    with pytest.raises(PgwalError, match=r"It ended with code 1; .*log ends with: .*something is wrong"):
        program.require_running()


def test_a_program_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PgwalError, match=r"no-such-program cannot be run"):
        Program("It", ["no-such-program"], {}, tmp_path / "log", tmp_path)


def test_programs_are_asked_to_end_and_then_made_to(tmp_path: Path) -> None:
    polite = Program("polite", ["sleep", "60"], {"PATH": os.environ["PATH"]}, tmp_path / "polite", tmp_path)
    stubborn = Program("stubborn", [sys.executable, "-c", STUBBORN], {}, tmp_path / "stubborn", tmp_path)
    wait_for(lambda: stubborn.last_words() == "ready", what="the stubborn one")
    begin = time.monotonic()
    end_programs([polite, stubborn], 1.0)
    assert 0.9 < time.monotonic() - begin < 20
    assert not polite.running
    assert not stubborn.running


@linux
def test_what_programs_leave_behind_is_found_by_its_mark(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    other = Program("other", ["sleep", "60"], {**environment, **mark(tmp_path / "other")}, tmp_path / "other", tmp_path)
    program = Program("it", [sys.executable, "-c", LEAVES_AN_ORPHAN], {**environment, **mark(tmp_path)}, tmp_path / "log", tmp_path)
    wait_for(lambda: not program.running, what="the end of the program")
    begin = time.monotonic()
    assert end_marked(tmp_path, 0.5) == 2, "the shell and its sleep"
    assert time.monotonic() - begin < 20
    assert end_marked(tmp_path, 0.5) == 0
    assert other.running
    assert end_marked(tmp_path / "other", 5.0) == 1


@linux
def test_a_program_dies_when_we_are_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not _runs(pid), what="the program's end")


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

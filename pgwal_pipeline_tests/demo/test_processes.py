"""Programs beside the demo: they end with it, however it ends, and so does what they leave behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pgwal_pipeline.demo.dagster_ui import free_port
from pgwal_pipeline.demo.processes import Program, end_programs
from pgwal_pipeline.errors import PgwalError
from pgwal_pipeline_tests.support import wait_for

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part of it is Linux's")

STUBBORN = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(60)"

# Starts a program whose grandchild leaves its session and its parent, as a daemon does.
LEAVES_AN_ORPHAN = """
import subprocess, sys, time
from pathlib import Path
from pgwal_pipeline.demo.processes import Program, adopt_orphans, end_descendants
folder = Path(sys.argv[1])
adopt_orphans()
orphan = f"import os, subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
spared = subprocess.Popen(["sleep", "60"])
program = Program("it", [sys.executable, "-c", orphan], {}, folder / "log", folder)
while program.running:
    time.sleep(0.05)
begin = time.monotonic()
end_descendants(5.0, spare=[spared.pid])
assert time.monotonic() - begin < 4
assert spared.poll() is None
spared.kill()
spared.wait()
left = subprocess.run(["ps", "--ppid", str(__import__("os").getpid()), "-o", "comm="], capture_output=True, text=True).stdout.split()
assert left == ["ps"], left
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
    assert 0.9 < time.monotonic() - begin < 5
    assert not polite.running
    assert not stubborn.running


@linux
def test_orphans_of_programs_are_ended(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVES_AN_ORPHAN, str(tmp_path)], check=True, timeout=30)


@linux
def test_a_program_dies_when_we_are_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not _runs(pid), what="the program's end")


def test_another_port_is_taken_when_the_wanted_one_is_in_use() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        assert free_port(taken) != taken
    assert free_port(taken) == taken


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

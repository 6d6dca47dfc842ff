import shutil
import subprocess
import sys

import pytest

from pgwal_pipeline.host.machine import machine

_SAY = [sys.executable, "-c", "from pgwal_pipeline.host.machine import machine; print(machine())"]


def _said(*before: str) -> str:
    return subprocess.run([*before, *_SAY], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_processes_of_one_machine_agree_and_those_of_a_container_differ() -> None:
    assert _said() == machine()
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*container, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may make no containers")
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$0" "$@"']
    assert _said(*renamed) == machine()
    assert _said(*container) != machine()

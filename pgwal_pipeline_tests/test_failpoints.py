"""Named points: what is done at them, and when."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgwal_pipeline import failpoints
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline_tests.faults import injected
from pgwal_pipeline_tests.support import wait_for


def test_only_what_is_named_does_something() -> None:
    with injected(" a.b=error ; ;c.d=sleep:0"):
        failpoints.hit("a")
        failpoints.hit("c.d")
        with pytest.raises(RuntimeError, match=re.escape("failpoint a.b")):
            failpoints.hit("a.b")
    failpoints.hit("a.b")


def test_only_the_nth_time() -> None:
    with injected("a=error@3"):
        for nth in range(1, 6):
            if nth == 3:
                with pytest.raises(RuntimeError):
                    failpoints.hit("a")
            else:
                failpoints.hit("a")


@pytest.mark.parametrize("kind", failpoints.KINDS)
def test_each_kind_of_error(kind: str) -> None:
    with injected(f"a=raise:{kind}"), pytest.raises(BaseException) as caught:
        failpoints.hit("a")
    assert type(caught.value).__name__ == {"TransientLakeError": "LakeError"}.get(kind, kind)
    assert "failpoint a" in str(caught.value)
    assert not isinstance(caught.value, LakeError) or caught.value.transient == (kind == "TransientLakeError")


def test_a_table_of_its_own_and_any_table() -> None:
    with injected("table.merge/public.a=raise:LakeError;table.read=error"):
        failpoints.at("merge", "public.b")
        with pytest.raises(LakeError):
            failpoints.at("merge", "public.a")
        with pytest.raises(RuntimeError):
            failpoints.at("read", "public.b")


def test_an_action_that_there_is_not() -> None:
    with injected("a=explode:1"), pytest.raises(ValueError, match="'explode:1' is not an action for a"):
        failpoints.hit("a")


def test_a_file_says_that_the_point_is_reached_and_its_removal_lets_it_go_on(tmp_path: Path) -> None:
    marker = tmp_path / "reached"
    program = "from pgwal_pipeline import failpoints\nfailpoints.hit('a')\nprint('on')\nfailpoints.hit('b')\nprint('never')"
    environment = {"PGWAL_FAILPOINTS": f"a=touch:{marker};b=exit", "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen([sys.executable, "-uc", program], env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_for(marker.exists, what="the point")
        assert process.poll() is None
        marker.unlink()
        said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == ("on\n", 70)

"""The command that tells the password: what it prints is taken, and whatever goes wrong is one sentence that shows nothing of it."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pgwal_pipeline.messages.errors import PgwalError, SettingError, SourceUnavailable
from pgwal_pipeline.postgres.password import ask

SECRET = "s3cretZq7"


@pytest.mark.parametrize(
    ("command", "password"),
    [
        ("echo secret", "secret"),
        ("printf secret", "secret"),
        ("printf 'a  b\\n\\n'", "a  b\n"),
        ("printf ' pass wörd '", " pass wörd "),
        ("printf 'one\\n' | tr a-z A-Z; echo noise >&2", "ONE"),
        ("head -c 3000 /dev/zero | tr '\\0' x", "x" * 3000),  # as long as tokens of a cloud may be
        ("echo secret; sleep 60 &", "secret"),
        ("echo secret; exec >&-; sleep 0.5", "secret"),
    ],
)
def test_what_it_prints_is_the_password(command: str, password: str) -> None:
    began = time.monotonic()
    assert ask(command) == password
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("command", "said", "kind"),
    [
        (f"echo {SECRET}; echo {SECRET} >&2; exit 3", "failed with exit status 3", SourceUnavailable),
        (f"echo {SECRET}; kill -9 $$", "was ended by signal SIGKILL", SourceUnavailable),
        (f"/nosuch/{SECRET}", "(exit status 127)", SettingError),
        ("/dev/null", "(exit status 126)", SettingError),
        ("true", "printed nothing", SourceUnavailable),
        ("echo", "printed nothing", SourceUnavailable),
        (f"printf '{SECRET}\\377'", "not UTF-8", SourceUnavailable),
        (f"printf '{SECRET}\\0x'", "a zero byte", SourceUnavailable),
        (f"yes {SECRET}", "more than 64 kB", SourceUnavailable),
    ],
)
def test_what_goes_wrong_is_one_sentence_without_its_output(
    command: str, said: str, kind: type[PgwalError], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind, match="PGWAL_PASSWORD_COMMAND ") as told:
        ask(command)
    assert said in str(told.value)
    assert SECRET not in str(told.value)
    assert "\n" not in str(told.value)
    assert capfd.readouterr() == ("", "")


def _sleeping(folder: Path) -> int:
    return int((folder / "pid").read_text())


@pytest.mark.parametrize("ending", ["echo late", "exec >&- 2>&-; wait"])
def test_one_that_hangs_is_ended_with_all_that_it_started(ending: str, tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"PGWAL_PASSWORD_COMMAND did not end within 0\.5 s"):
        ask(f"sleep 60 & echo $! > {tmp_path}/pid; wait; {ending}".replace("; wait; exec", "; exec"), within=0.5)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(_sleeping(tmp_path)).wait(5)
    assert not psutil.pid_exists(_sleeping(tmp_path))


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ask(f"echo $$ > {tmp_path}/pid; exec sleep 60")
    assert not psutil.pid_exists(_sleeping(tmp_path))


def test_a_terminal_cannot_interrupt_it() -> None:
    assert ask("ps -o sid= -p $$ | tr -d ' '") != str(os.getsid(0))

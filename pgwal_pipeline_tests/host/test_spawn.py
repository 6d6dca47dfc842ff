import signal
import socket
import threading
from pathlib import Path

import pytest

from pgwal_pipeline.host.spawn import free_port, port_free, spawn
from pgwal_pipeline.messages.errors import PgwalError


def test_a_port_chosen_for_a_server_is_given_to_nobody_while_the_server_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as handed_out:
        assert free_port() < 32_768 <= handed_out.getsockname()[1]


def test_a_port_on_which_somebody_listens_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not port_free(port)
    assert port_free(port)


def test_a_program_that_cannot_be_run_is_one_sentence(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    with (tmp_path / "log").open("wb") as log:
        for program, why in ((tmp_path / "missing", "No such file"), (plain, "Permission denied")):
            with pytest.raises(PgwalError, match=f"The program {program} cannot be run: {why}"):
                spawn([str(program)], log, death_signal=signal.SIGTERM)


def test_it_outlives_the_thread_that_started_it_and_writes_to_its_log(tmp_path: Path) -> None:
    """Linux tells a child of the end of the thread that it was started by, not of the process."""
    started = []
    with (tmp_path / "log").open("wb") as log:
        command = ["sh", "-c", "sleep 0.3; echo out; echo err >&2"]
        thread = threading.Thread(target=lambda: started.append(spawn(command, log, death_signal=signal.SIGKILL)))
        thread.start()
        thread.join()
    (process,) = started
    assert process.wait(20) == 0
    assert (tmp_path / "log").read_text() == "out\nerr\n"

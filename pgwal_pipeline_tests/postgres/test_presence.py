"""Runs show themselves in the source: for as long as their process lives, wherever that is, and again after a broken connection."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.postgres.presence import BACK_WITHIN, present, shown
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for

_SHOW = """
import sys, time
from pgwal_pipeline.postgres.presence import shown
with shown(sys.argv[1], sys.argv[2]):
    time.sleep(600)
"""
_AWAY = "postgresql://someone@127.0.0.1:1/db?connect_timeout=2"


def seen(source: Source, run: str, *, gone: bool = False) -> None:
    wait_for(lambda: (run in present(source.dsn, [run])) != gone, seconds=20, pause=0.02, what=f"{run} to be {'gone' if gone else 'seen'}")


def test_a_run_is_seen_while_a_process_of_it_lives(source: Source) -> None:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(subprocess.Popen([sys.executable, "-c", _SHOW, source.dsn, run])) for run in ("run-1", "run-2")
        )
        stack.callback(second.kill)
        stack.callback(first.kill)
        seen(source, "run-1")
        seen(source, "run-2")
        assert present(source.dsn, ["run-1", "run-2", "run-3"]) == {"run-1", "run-2"}
        with shown(source.dsn, "run-1"):  # a second process of the same run
            mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgwal run' AND datname = current_database()"
            wait_for(lambda: source.value(mine) == 3, what="both processes of the run to be seen")
            first.kill()
            wait_for(lambda: source.value(mine) == 2, what="the one that was killed to be gone")
            assert present(source.dsn, ["run-1"]) == {"run-1"}
        seen(source, "run-1", gone=True)
        assert present(source.dsn, ["run-2"]) == {"run-2"}


def test_a_run_is_seen_again_after_its_connection_broke(source: Source) -> None:
    with shown(source.dsn, "run"):
        for _ in range(3):
            seen(source, "run")
            source.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgwal run'")
        broken = time.monotonic()
        seen(source, "run")
        assert time.monotonic() - broken < BACK_WITHIN
    seen(source, "run", gone=True)


def test_a_run_is_seen_again_after_the_source_was_away(make_server: Callable[..., Postgres]) -> None:
    server = make_server()
    with fresh_source(server) as source, shown(source.dsn, "run"):
        seen(source, "run")
        server.kill()
        with pytest.raises(SourceUnavailable):
            present(source.dsn, ["run"])
        server.start()
        source.close()
        back = time.monotonic()
        seen(source, "run")
        assert time.monotonic() - back < BACK_WITHIN


def test_a_run_neither_fails_nor_waits_without_a_source() -> None:
    began = time.monotonic()
    with shown(_AWAY, "run"):
        assert time.monotonic() - began < 1
    with shown("postgresql://no:such:form", "run"):
        pass
    assert time.monotonic() - began < 10

"""One command on a bare libpq connection, awaited in a way that can be bounded, watched and interrupted."""

import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import errors
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from pgwal_pipeline.errors import PgwalError, SourceUnavailable

CANCEL_TIMEOUT = 10.0
"""Seconds for a cancelled command to end."""

_COPYING = (ExecStatus.COPY_BOTH, ExecStatus.COPY_IN, ExecStatus.COPY_OUT)
_FAILED = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE, ExecStatus.NONFATAL_ERROR)


def run(pgconn: PGconn, command: str, *, on_wait: Callable[[], None] | None = None, every: float = 0.25) -> PGresult:
    """Send `command` and give its last result, or the one that begins a COPY.

    `on_wait` is called about every `every` seconds while the server is at it; what it raises ends the wait and leaves the command running.
    Raises psycopg.Error, with the server's SQLSTATE where the server sent one.
    """
    pgconn.send_query(command.encode())
    return result_of(pgconn, on_wait=on_wait, every=every)


def result_of(pgconn: PGconn, *, on_wait: Callable[[], None] | None = None, every: float = 0.25) -> PGresult:
    """The result of the command that runs on `pgconn`; otherwise as `run`."""
    result: PGresult | None = None
    while True:
        _await_answer(pgconn, on_wait, every)
        following = pgconn.get_result()
        if following is None:
            break
        result = following
        if result.status in _COPYING:
            return result
    if result is None:
        raise SourceUnavailable("The source gave no answer to a command; run it again when the source is back.")
    if result.status in _FAILED:
        raise errors.error_from_result(result)
    return result


def cancel(pgconn: PGconn, watching: psycopg.Connection[Any]) -> None:
    """End the command that runs on `pgconn`, by `watching`, which is connected to the same server; after 10 s its session with it.

    The command may still succeed at the last moment. A server that cannot be reached any more is no error, nor is one that does not let
    go of the command after 10 s more, for it cannot be interrupted everywhere; it ends when the server comes to it.
    """
    started = time.monotonic()

    def insist() -> None:
        passed = time.monotonic() - started
        if passed > CANCEL_TIMEOUT:
            watching.execute("SELECT pg_catalog.pg_terminate_backend(%s)", [pgconn.backend_pid])
        if passed > 2 * CANCEL_TIMEOUT:
            raise SourceUnavailable("The source does not end a command that it was told to cancel.")

    with suppress(psycopg.Error, PgwalError):
        watching.execute("SELECT pg_catalog.pg_cancel_backend(%s)", [pgconn.backend_pid])
        result_of(pgconn, on_wait=insist)


def _await_answer(pgconn: PGconn, on_wait: Callable[[], None] | None, every: float) -> None:
    poll = select.poll()
    unsent = pgconn.flush()
    while unsent or pgconn.is_busy():
        poll.register(pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
        if poll.poll(every * 1000):
            pgconn.consume_input()
        elif on_wait is not None:
            on_wait()
        unsent = pgconn.flush()

"""Run one command, with a wait that can be limited, watched and interrupted."""

import time
from contextlib import suppress

import psycopg2

from pgwal_pipeline.messages.errors import PgwalError, SourceUnavailable
from pgwal_pipeline.postgres.connection import Connection, Cursor, OnWait, ReplicationConnection, wait

CANCEL_TIMEOUT = 10.0
"""Seconds that a cancelled command gets to end."""


def run(conn: Connection | ReplicationConnection, command: str, *, on_wait: OnWait | None = None, every: float = 0.25) -> Cursor:
    """Run `command` and return a cursor with its last result.

    `on_wait` is called about every `every` seconds while the command runs. An exception from it ends the wait, and the command goes on.
    Raises psycopg2.Error, with the SQLSTATE if the server sent one.
    """
    with conn.lock:
        cursor = conn.cursor()
        cursor.execute(command.encode())
        wait(conn, on_wait, every)
        return cursor


def cancel(conn: Connection | ReplicationConnection, watching: Connection) -> None:
    """Cancel the command that runs on `conn`, over `watching`, a connection to the same server; after 10 s terminate its session.

    The command may still succeed at the last moment. No error is raised if the server cannot be reached any more, nor if the command still
    runs 10 s later: it cannot be interrupted everywhere, and ends when it next checks for interrupts.
    """
    started = time.monotonic()
    pid = conn.info.backend_pid

    def insist() -> None:
        passed = time.monotonic() - started
        if passed > CANCEL_TIMEOUT:
            watching.execute("SELECT pg_catalog.pg_terminate_backend(%s)", [pid])
        if passed > 2 * CANCEL_TIMEOUT:
            raise SourceUnavailable("The source does not end a command that it was told to cancel.")

    with suppress(psycopg2.Error, PgwalError):
        watching.execute("SELECT pg_catalog.pg_cancel_backend(%s)", [pid])
        wait(conn, insist)

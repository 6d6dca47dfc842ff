"""One command, awaited in a way that can be bounded, watched and interrupted."""

import time
from contextlib import suppress

import psycopg2

from pgwal_pipeline.messages.errors import PgwalError, SourceUnavailable
from pgwal_pipeline.postgres.connection import Connection, Cursor, OnWait, ReplicationConnection, wait

CANCEL_TIMEOUT = 10.0
"""Seconds for a cancelled command to end."""


def run(conn: Connection | ReplicationConnection, command: str, *, on_wait: OnWait | None = None, every: float = 0.25) -> Cursor:
    """Run `command`, whose last result the cursor has.

    `on_wait` is called about every `every` seconds while the server is at it; what it raises ends the wait and leaves the command running.
    Raises psycopg2.Error, with the server's SQLSTATE where the server sent one.
    """
    with conn.lock:
        cursor = conn.cursor()
        cursor.execute(command.encode())
        wait(conn, on_wait, every)
        return cursor


def cancel(conn: Connection | ReplicationConnection, watching: Connection) -> None:
    """End the command that runs on `conn`, by `watching`, which is connected to the same server; after 10 s its session with it.

    The command may still succeed at the last moment. A server that cannot be reached any more is no error, nor is one that does not let
    go of the command after 10 s more, for it cannot be interrupted everywhere; it ends when the server comes to it.
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

"""Show in the source that a run goes on, and see there which runs do, whatever host they are on.

A run holds an advisory lock on a connection of its own, so the server knows when its process ends, however that ends. A process id would
tell nothing on another host, nor in another container on the same one.
"""

import os
import select
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress

import psycopg2

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect, translate
from pgwal_pipeline.postgres.slot import let_go_when_unreachable, lock_key

BACK_WITHIN = 15.0
"""Seconds within which a run shows itself again after it has lost its connection, if the source can be reached: a try may take ten."""

_AGAIN = 0.5  # seconds between tries to connect
_QUIET = 20.0  # seconds without a word from the server until it is asked for one
_NOTICES = {"tcp_user_timeout": "10000"}  # milliseconds until a connection without an answer is taken for lost
_END = 2.0  # seconds that the end waits for the connection to close

_KEPT = "SELECT l.classid::int8, l.objid::int8 FROM pg_catalog.pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 \
AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"


@contextmanager
def shown(dsn: str, run: str) -> Iterator[None]:
    """Show in the source that `run` goes on, for as long as the context does. Several processes may show the same run.

    Neither waits for the source nor fails without it: a thread connects, and again whenever the connection is lost.
    """
    ended, wake = os.pipe()
    thread = threading.Thread(target=_show, args=(dsn, lock_key(run), ended), name="pgwal-presence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(wake)
        thread.join(_END)


def present(dsn: str, runs: Collection[str]) -> set[str]:
    """Return those of `runs` that are shown in the source now. Raises SourceUnavailable, SourceRefused, SettingError."""
    with connect(dsn) as conn:
        try:
            kept = {(high, low) for high, low in conn.execute(_KEPT)}
        except psycopg2.Error as error:
            raise translate(error, "reading which runs go on") from error
    return {run for run in runs if _halves(lock_key(run)) in kept}


def _show(dsn: str, key: int, ended: int) -> None:
    try:
        while not _ends(ended, 0):
            with suppress(PgwalError, psycopg2.Error), closing(connect(dsn, application="pgwal run", **_NOTICES)) as conn:
                let_go_when_unreachable(conn)
                conn.execute(f"SELECT pg_catalog.pg_advisory_lock_shared({key})".encode())
                while not _ends(ended, _QUIET, conn):
                    conn.execute("SELECT 1")
                return
            if _ends(ended, _AGAIN):
                return
    finally:
        os.close(ended)


def _ends(ended: int, seconds: float, conn: Connection | None = None) -> bool:
    """Wait until the context ends, the server says something or closes the connection, or `seconds` are over; whether it ends."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    if conn is not None:
        poll.register(conn.fileno(), select.POLLIN)
    return any(file == ended for file, _ in poll.poll(seconds * 1000))


def _halves(key: int) -> tuple[int, int]:
    """Return an advisory lock's number as `pg_locks` shows it, in two halves."""
    unsigned = key & 0xFFFFFFFFFFFFFFFF
    return unsigned >> 32, unsigned & 0xFFFFFFFF

"""Create or copy a slot, watched from another session: the server may have to wait for others, and the wait has a limit."""

import time
from collections.abc import Callable

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.messages.errors import BlockedByTransaction
from pgwal_pipeline.postgres import blockers
from pgwal_pipeline.postgres.command import cancel, run
from pgwal_pipeline.postgres.connection import Connection, Cursor, ReplicationConnection

_WARN_AFTER = 5.0  # seconds of waiting before a warning names what is waited for
_CHECK_EVERY = 1.0  # seconds between two checks of what is waited for
_LOCK_TIMEOUT = "2s"  # for such a check, in case somebody has locked the catalog
_DONE = {"Making": "made", "Copying": "copied"}


def watched(
    conn: Connection | ReplicationConnection,
    command: str,
    watching: Connection,
    doing: str,
    name: str,
    timeout: float,
    warn: Callable[[str], None],
) -> Cursor:
    """Run the `command` that creates slot `name`; `doing` is "Making" or "Copying".

    After 5 s `warn` is told what the server waits for; after `timeout` seconds BlockedByTransaction is raised. If the wait ends before the
    server answers, the command is first cancelled on the server. Raises psycopg2.Error for an error of the server.
    """
    watch = _Watch(watching, conn.info.backend_pid, doing, name, timeout, warn)
    try:
        return run(conn, command, on_wait=watch)
    except psycopg2.Error:
        raise
    except BaseException:
        cancel(conn, watching)
        raise


def in_recovery(conn: Connection) -> bool:
    """Return whether the server is a standby."""
    row = conn.execute("SELECT pg_catalog.pg_is_in_recovery()").fetchone()
    return row is not None and bool(row[0])


class _Watch:
    """Called while a slot is being created: warns of what the server waits for, and raises after the time-out."""

    def __init__(self, conn: Connection, pid: int, doing: str, name: str, timeout: float, warn: Callable[[str], None]) -> None:
        self._conn = conn
        self._pid = pid
        self._doing = doing
        self._name = name
        self._timeout = timeout
        self._warn = warn
        self._started = time.monotonic()
        self._checked = self._started + _WARN_AFTER - _CHECK_EVERY
        self._named = ""

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._started >= self._timeout:
            raise BlockedByTransaction(
                f"Slot {self._name} could not be {_DONE[self._doing]} within {duration(self._timeout)} (PGWAL_BLOCKED_TIMEOUT), as the "
                f"source waits for {self._whom()[0]}. End that (SELECT pg_terminate_backend(PID), or ROLLBACK PREPARED), or raise the "
                f"setting."
            )
        if now - self._checked >= _CHECK_EVERY:
            self._checked = now
            text, who = self._whom()
            if who != self._named:
                self._named = who
                self._warn(f"{self._doing} slot {self._name} waits for {text}.")

    def _whom(self) -> tuple[str, str]:
        """Return what the server waits for, as text for a message and as an id of the set."""
        try:
            with self._conn.transaction():
                self._conn.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'".encode())
                found = blockers.blocking(self._conn, self._pid)
                if found:
                    return blockers.describe(found), " ".join(str(blocker.pid or blocker.gid) for blocker in found)
                if self._doing == "Making" and in_recovery(self._conn):
                    text = (
                        "the primary's next record of its running transactions (SELECT pg_log_standby_snapshot() on the primary writes one)"
                    )
                    return text, text
                event = blockers.waits_on(self._conn, self._pid)
                if event is not None:
                    found = blockers.at_slots(self._conn, self._pid)
                    who = f", which one of these has: {blockers.describe(found)}" if found else ""
                    return f"{event}{who}", " ".join([event, *(str(blocker.pid) for blocker in found)])
        except errors.LockNotAvailable:
            text = "a session that has locked a table of the catalog (pg_locks names it, once it can be read)"
            return text, text
        if self._doing == "Making":
            return blockers.describe([]), ""
        return "something that it does not show", "nobody"

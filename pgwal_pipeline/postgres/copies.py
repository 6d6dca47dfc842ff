"""Copy the slot, so that a copy reads a later part of a long backlog while the slot itself reads the first.

A copy is temporary: it belongs to the walsender session that made it and ends with that session, however that ends. So no copy is ever left
behind, and none has to be told from somebody else's.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.postgres.command import cancel, run
from pgwal_pipeline.postgres.connection import ReplicationConnection
from pgwal_pipeline.postgres.dsn import connect, replication_connection, translate
from pgwal_pipeline.postgres.slot_state import Connection, existing, explain, first_row, refusal
from pgwal_pipeline.postgres.standbys import HeldBack
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.postgres.waiting import watched
from pgwal_pipeline.values.lsn import format_lsn

_LET_GO = 10.0  # seconds that a walsender that has just ended gets to release its slot


@dataclass(frozen=True, slots=True)
class Room:
    """The numbers of replication slots and walsenders that are free on the server."""

    slots: int
    senders: int


def room(conn: Connection) -> Room:
    """Return how many slots and walsenders are free now, by max_replication_slots and max_wal_senders."""
    row = first_row(
        conn,
        "counting the free replication slots",
        "SELECT current_setting('max_replication_slots')::int4 - (SELECT count(*) FROM pg_catalog.pg_replication_slots), "
        "current_setting('max_wal_senders')::int4 - (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders())",
    )
    assert row is not None
    return Room(max(0, row[0]), max(0, row[1]))


def positions(conn: Connection, slot: str) -> dict[int, int]:
    """Return the sent LSN of each walsender that reads `slot` or a copy now, by the confirmed LSN of the slot it reads."""
    try:
        rows = conn.execute(
            "SELECT s.confirmed_flush_lsn - '0/0'::pg_lsn, r.sent_lsn - '0/0'::pg_lsn FROM pg_catalog.pg_replication_slots s "
            "JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid "
            "WHERE (s.slot_name = %(slot)s OR (s.temporary AND pg_catalog.starts_with(s.slot_name::text, %(slot)s || '_w_'))) "
            "AND s.confirmed_flush_lsn IS NOT NULL AND r.sent_lsn IS NOT NULL",
            {"slot": slot},
        ).fetchall()
    except psycopg2.Error as error:
        raise translate(error, f"reading which sessions read slot {slot}") from error
    return {int(start): int(sent) for start, sent in rows}


class SlotCopy:
    """A temporary copy of a slot, in a session of its own: read it with `stream`, or end it with `close`."""

    def __init__(self, conn: ReplicationConnection, dsn: str, name: str) -> None:
        self.name = name
        self._conn = conn
        self._dsn = dsn

    @classmethod
    def make(cls, dsn: str, slot: str, *, blocked_timeout: float = 600.0, warn: Callable[[str], None] = lambda _: None) -> "SlotCopy":
        """Copy `slot`, even while it is read; the copy is named `<slot>_w_…`.

        For this the server does not wait for open transactions, but it may wait for a session that creates or drops another slot, for its
        disk, or for a lock on its catalog. After 5 s `warn` is told what it waits for. Raises BlockedByTransaction after `blocked_timeout`
        seconds, and leaves no copy; SourceRefused if the server or the role cannot copy it, or no slot or walsender is free; SlotLost if
        the slot is gone or lost.
        """
        name = f"{slot}_w_{secrets.token_hex(4)}"
        conn = replication_connection(dsn)
        try:
            with closing(connect(dsn)) as watching:
                command = f"SELECT pg_catalog.pg_copy_logical_replication_slot('{slot}', '{name}', true)"
                watched(conn, command, watching, "Copying", name, blocked_timeout, warn)
        except BaseException as error:
            conn.close()
            if isinstance(error, psycopg2.Error):
                raise _explained(dsn, name, error) from error
            raise
        return cls(conn, dsn, name)

    def stream(self, publication: str, start_lsn: int, *, server_version: int) -> ReplicationStream:
        """Advance the copy to `start_lsn` and read it from there; otherwise as `ReplicationStream.open`. The stream owns the session."""
        try:
            _advance(lambda command: run(self._conn, command), self.name, start_lsn)
            return ReplicationStream.begin(self._conn, self._dsn, self.name, publication, start_lsn, server_version=server_version)
        except psycopg2.Error as error:
            self.close()
            raise explain(self._dsn, self.name, error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session, and the copy with it. Does nothing if it has ended already."""
        self._conn.close()


def confirm_unread(conn: Connection, dsn: str, slot: str, lsn: int, *, warn: Callable[[str], None]) -> None:
    """Confirm the slot up to `lsn` without having read to there, so that it releases the WAL before.

    After 5 s `warn` is told of standbys that hold the slot back; after 60 s SourceUnavailable is raised. Other errors are raised as
    `slot_state.refusal` returns them, such as SlotBusy while the slot is read, and SlotLost.
    """
    existing(conn, slot)
    with suppress(psycopg2.Error):
        # If this process dies while the server waits for standbys, the server then releases the slot by itself.
        conn.execute("SET client_connection_check_interval = '2s'")
    held = HeldBack(dsn, slot, warn)
    deadline = time.monotonic() + _LET_GO
    while True:
        try:
            _advance(lambda command: _watched(conn, dsn, command, held), slot, lsn)
        except errors.ObjectInUse as error:
            if time.monotonic() > deadline:
                raise refusal(conn, slot, error) from error
            time.sleep(0.05)
        except psycopg2.Error as error:
            raise refusal(conn, slot, error) from error
        else:
            return


def _watched(conn: Connection, dsn: str, command: str, held: HeldBack) -> None:
    """Run `command`; on an exception that is not the server's, cancel the command on the server first."""
    try:
        run(conn, command, on_wait=held.stands)
    except psycopg2.Error:
        raise
    except BaseException:
        with suppress(PgwalError), closing(connect(dsn)) as watching:
            cancel(conn, watching)
        raise


def _advance(execute: Callable[[str], object], name: str, lsn: int) -> None:
    """Advance a slot to `lsn` without reading the WAL between, which takes the server about a tenth of the time of decoding it.

    It does so twice. The first time the server notes only the first LSN in between from which the slot could restart, and would begin to
    read there. Once the confirmed LSN is past such a point, the server takes it at once, and so arrives at the last one.
    """
    for _ in range(2):
        execute(f"SELECT pg_catalog.pg_replication_slot_advance('{name}', '{format_lsn(lsn)}'::pg_catalog.pg_lsn)")


def _explained(dsn: str, name: str, error: psycopg2.Error) -> PgwalError:
    try:
        with closing(connect(dsn)) as conn:
            return refusal(conn, name, error)
    except PgwalError as found:
        return found

"""Create, inspect and drop the replication slot, and lock it for one drain at a time."""

import hashlib
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.messages.errors import PgwalError, SlotBusy
from pgwal_pipeline.postgres.command import CANCEL_TIMEOUT
from pgwal_pipeline.postgres.dsn import connect, replication_connection, translate
from pgwal_pipeline.postgres.slot_state import (
    PLUGIN,
    SESSION_OF,
    Connection,
    SlotState,
    busy,
    describe_session,
    existing,
    explain,
    first_row,
    inspect,
    lag,
    refusal,
    require_kind,
    require_usable,
)
from pgwal_pipeline.postgres.waiting import in_recovery, watched
from pgwal_pipeline.values.lsn import parse_lsn

__all__ = [
    "SlotState",
    "create",
    "create_with_snapshot",
    "drop",
    "exclusive",
    "explain",
    "force_flush",
    "inspect",
    "lag",
    "let_go_when_unreachable",
    "lock_key",
    "require_kind",
    "require_usable",
]

_LONGEST_TIMEOUT = 2**31 - 1  # milliseconds, the longest time-out that the server accepts


def create(dsn: str, name: str, *, blocked_timeout: float, warn: Callable[[str], None]) -> SlotState:
    """Create the slot for pgoutput and return its state; on a primary of 17 or newer it is a failover slot.

    The server creates it only once every transaction that was open has ended. After 5 s `warn` is told which ones it waits for. Raises
    BlockedByTransaction after `blocked_timeout` seconds, and leaves no slot; SourceRefused, with what to change: wal_level,
    max_replication_slots, the role's REPLICATION, or a slot of this name that exists already.
    """
    with closing(connect(dsn)) as making, closing(connect(dsn)) as watching:
        if inspect(watching, name) is not None:
            raise refusal(watching, name, errors.DuplicateObject())
        try:
            failover = watching.info.server_version >= 170000 and not in_recovery(watching)
            # If this process dies, the server then gives up by itself.
            with suppress(psycopg2.Error):
                making.execute("SET client_connection_check_interval = '2s'")
            milliseconds = (blocked_timeout + 2 * CANCEL_TIMEOUT) * 1000
            making.execute(f"SET statement_timeout = {int(milliseconds) if milliseconds <= _LONGEST_TIMEOUT else 0}".encode())
            command = (
                f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}', false, false{', true' if failover else ''})"
            )
            watched(making, command, watching, "Making", name, blocked_timeout, warn)
        except psycopg2.Error as error:
            raise refusal(watching, name, error) from error
        except BaseException:
            with suppress(PgwalError):
                drop(watching, name)
            raise
        return existing(watching, name)


@contextmanager
def create_with_snapshot(
    dsn: str, name: str, *, blocked_timeout: float = 600.0, warn: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[int, str]]:
    """Create a temporary slot that exports a snapshot, and yield `(consistent_lsn, snapshot_name)`. Both end with the context.

    The snapshot sees exactly the transactions with a commit LSN below `consistent_lsn`. Waits and raises as `create` does.
    """
    with closing(connect(dsn)) as watching:
        walsender = replication_connection(dsn)
        try:
            export = "(SNAPSHOT 'export')" if watching.info.server_version >= 150000 else "EXPORT_SNAPSHOT"
            try:
                command = f'CREATE_REPLICATION_SLOT "{name}" TEMPORARY LOGICAL {PLUGIN} {export}'
                made = watched(walsender, command, watching, "Making", name, blocked_timeout, warn).fetchone()
            except psycopg2.Error as error:
                raise refusal(watching, name, error) from error
            assert made is not None
            yield parse_lsn(made[1]), made[2]
        finally:
            walsender.close()


def drop(conn: Connection, name: str, *, timeout: float = 10.0) -> bool:
    """Drop the slot, and return whether there was one. Raises SlotBusy if it is still being read after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            conn.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", [name])
        except errors.UndefinedObject:
            return False
        except errors.ObjectInUse as error:
            if time.monotonic() > deadline:
                raise busy(conn, name) from error
            time.sleep(0.05)
        except errors.InsufficientPrivilege as error:
            raise refusal(conn, name, error) from error
        except psycopg2.Error as error:
            raise translate(error, f"dropping slot {name}") from error
        else:
            return True


def force_flush(conn: Connection) -> bool:
    """Make the server flush its WAL up to now, which an idle one may put off, with a small commit that touches no table.

    Returns whether it did: not on a standby, nor if the role may not call pg_logical_emit_message. `conn` must not be inside a transaction.
    Raises SourceUnavailable.
    """
    try:
        if in_recovery(conn):
            return False
        with conn.transaction():
            # Flush on this server, whatever the role's default, without waiting for a standby.
            conn.execute("SET LOCAL synchronous_commit = local")
            conn.execute("SELECT pg_catalog.pg_logical_emit_message(true, 'pgwal', '')")
    except errors.InsufficientPrivilege:
        return False
    except psycopg2.Error as error:
        raise translate(error, "forcing a flush of the WAL") from error
    return True


@contextmanager
def exclusive(dsn: str, slot_name: str, timeout: float) -> Iterator[None]:
    """Hold the lock on `slot_name` of this source, so that no other process on any machine works on it.

    It is an advisory lock on a connection of its own, so it is released as soon as its holder ends, however that ends. Waits up to
    `timeout` seconds for another holder, or a reader of the slot, to end. Raises SlotBusy, naming them, if they do not.
    """
    deadline = time.monotonic() + timeout
    with closing(connect(dsn, application=f"pgwal on {platform.node()}")) as conn:
        let_go_when_unreachable(conn)
        locked, pause = False, 0.02
        while True:
            if not locked:
                row = first_row(conn, f"locking slot {slot_name}", "SELECT pg_catalog.pg_try_advisory_lock(%s)", lock_key(slot_name))
                locked = row is not None and bool(row[0])
            if locked:
                state = inspect(conn, slot_name)
                if state is None or not state.active:
                    break
            if time.monotonic() >= deadline:
                raise busy(conn, slot_name) if locked else _locked(conn, slot_name, timeout)
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(0.5, pause * 2)
        yield


def let_go_when_unreachable(conn: Connection) -> None:
    """Make the server notice within a minute that this machine is gone, so that the lock is then released."""
    for setting in ("tcp_keepalives_idle = 20", "tcp_keepalives_interval = 10", "tcp_keepalives_count = 3"):
        with suppress(psycopg2.Error):
            conn.execute(f"SET {setting}".encode())


def lock_key(slot_name: str) -> int:
    """Return the number of the advisory lock on `slot_name`, from -2^63 to 2^63 - 1."""
    digest = hashlib.sha256(f"pgwal_pipeline slot {slot_name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _locked(conn: Connection, slot_name: str, timeout: float) -> SlotBusy:
    key = lock_key(slot_name) & 0xFFFFFFFFFFFFFFFF
    row = first_row(
        conn,
        f"asking who holds slot {slot_name}",
        f"{SESSION_OF} (SELECT l.pid FROM pg_catalog.pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
        "AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()) "
        "AND l.classid::int8 = %s AND l.objid::int8 = %s LIMIT 1)",
        key >> 32,
        key & 0xFFFFFFFF,
    )
    name, _, work = slot_name.partition("/")
    held = f"Slot {name} ({work})" if work else f"Slot {name}"
    return SlotBusy(
        f"{held} is held by another run ({describe_session(row)}), which did not let go within {duration(timeout)} "
        f"(PGWAL_BUSY_TIMEOUT): wait for it to end, or end it."
    )

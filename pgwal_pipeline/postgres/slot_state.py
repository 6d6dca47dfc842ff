"""Read the state of a replication slot, and build the errors for a slot that is not usable."""

from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.errors import PgwalError, SlotBusy, SlotLost, SourceRefused
from pgwal_pipeline.postgres import positions
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect, translate
from pgwal_pipeline.values.relation import quote_ident

PLUGIN = "pgoutput"


@dataclass(frozen=True, slots=True)
class SlotState:
    """A replication slot as the server shows it; an LSN is 0 if the server shows none.

    `lag_bytes`: bytes of flushed WAL that are not confirmed. `wal_status`: reserved, extended, unreserved or lost. `safe_wal_size`: bytes
    of WAL that may still be written before the slot is in danger of being lost, None without a limit. `plugin` and `database` are empty for
    a physical slot. `invalidation_reason`: why the server has invalidated the slot, None if it has not. `inactive_since`: set from 17 on,
    while nobody reads the slot.
    """

    name: str
    active: bool
    active_pid: int | None
    confirmed_flush_lsn: int
    restart_lsn: int
    lag_bytes: int
    wal_status: str
    safe_wal_size: int | None
    plugin: str
    database: str
    invalidation_reason: str | None
    inactive_since: datetime | None = None

    @property
    def lost(self) -> bool:
        """Whether the server has invalidated the slot, so that it can never be read again."""
        return self.wal_status == "lost" or self.invalidation_reason is not None


_INVALIDATION = {
    "wal_removed": "the WAL it needs was removed, past max_slot_wal_keep_size",
    "rows_removed": "rows of the catalog that it needs were removed",
    "wal_level_insufficient": "wal_level was lowered on the primary",
    "idle_timeout": "nobody read it for longer than idle_replication_slot_timeout",
    "conflict": "it conflicted with the standby's recovery",
}


def inspect(conn: Connection, name: str) -> SlotState | None:
    """Return the slot `name` of any database and plugin; None if there is none. Raises SourceUnavailable, SourceRefused."""
    version = conn.info.server_version
    if version >= 170000:
        reason, since = "s.invalidation_reason", "s.inactive_since"
    else:
        conflict = "WHEN s.conflicting THEN 'conflict' " if version >= 160000 else ""
        reason, since = f"CASE WHEN s.wal_status = 'lost' THEN 'wal_removed' {conflict}END", "NULL::timestamptz"
    row = first_row(
        conn,
        f"reading the state of slot {name}",
        f"""SELECT s.slot_name::text, s.active, s.active_pid, {_bytes("s.confirmed_flush_lsn")}, {_bytes("s.restart_lsn")},
            greatest(0, {_bytes(positions.FLUSHED)} - {_bytes("s.confirmed_flush_lsn")}), coalesce(s.wal_status, ''), s.safe_wal_size,
            coalesce(s.plugin::text, ''), coalesce(s.database::text, ''), {reason}, {since}
            FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %s""",
        name,
    )
    if row is None:
        return None
    state = SlotState(*row)
    if positions.known_to_differ(conn):
        return replace(state, lag_bytes=max(0, positions.stream_position(conn) - state.confirmed_flush_lsn))
    return state


def existing(conn: Connection, name: str) -> SlotState:
    """Return the slot `name`. Raises SlotLost if there is none."""
    state = inspect(conn, name)
    if state is None:
        raise _gone(name)
    return state


def lag(conn: Connection, name: str) -> int:
    """Return how many bytes of flushed WAL the slot has not confirmed. Raises SlotLost if there is no such slot."""
    return existing(conn, name).lag_bytes


def require_usable(state: SlotState, database: str) -> None:
    """Raise SlotLost for a slot that the server has invalidated, SourceRefused for one that is not pgoutput's on `database`."""
    require_kind(state, database)
    if state.lost:
        why = _INVALIDATION.get(state.invalidation_reason or "", state.invalidation_reason or "it needs WAL that is gone")
        raise SlotLost(
            f"Slot {state.name} is lost: {why}. Run `pgwal resnapshot --all` to make it anew and read every table again; then "
            f"let the source keep more WAL (max_slot_wal_keep_size), or drain more often."
        )


def require_kind(state: SlotState, database: str) -> None:
    """Raise SourceRefused for a slot, lost or not, that cannot be ours because it is not pgoutput's on `database`."""
    if state.plugin == "":
        raise SourceRefused(f"Slot {state.name} is a physical slot, such as a standby's; set PGWAL_SLOT to another name.")
    if state.database != database:
        raise SourceRefused(
            f"Slot {state.name} belongs to database {state.database}, not to {database}: set PGWAL_SLOT to another name, or "
            f"PGWAL_SOURCE_DSN to that database."
        )
    if state.plugin != PLUGIN:
        raise SourceRefused(
            f"Slot {state.name} is for the plugin {state.plugin}, not {PLUGIN}, so somebody else uses it; set PGWAL_SLOT to another name."
        )


def refusal(conn: Connection, name: str, error: psycopg2.Error) -> PgwalError:
    """Return the exception to raise if the server refused to create or read the slot, with what to change.

    The reason is found from the slot and the settings, as the server's message may be in any language.
    """
    if _connection_trouble(error):
        return translate(error, f"working on slot {name}")
    state = inspect(conn, name)
    if state is not None and not isinstance(error, errors.InsufficientPrivilege):
        try:
            require_usable(state, conn.info.dbname)
        except PgwalError as found:
            return found
    if isinstance(error, errors.ObjectInUse):
        return busy(conn, name)
    row = first_row(
        conn,
        f"finding out why slot {name} was refused",
        "SELECT current_setting('wal_level'), current_setting('max_replication_slots'), current_user::text, "
        "(SELECT string_agg(slot_name, ', ' ORDER BY slot_name) FROM pg_catalog.pg_replication_slots WHERE NOT active)",
    )
    assert row is not None
    wal_level, limit, role, idle = row
    if isinstance(error, errors.ObjectNotInPrerequisiteState) and wal_level != "logical":
        return SourceRefused(
            f"Slot {name} needs wal_level = logical on the source, which has {wal_level}: run ALTER SYSTEM SET wal_level = 'logical' and "
            f"restart it."
        )
    if isinstance(error, errors.ConfigurationLimitExceeded):
        unused = f", or drop one that nobody reads ({idle})" if idle else ""
        return SourceRefused(
            f"There is no room for slot {name}: all {limit} replication slots of the source are taken; raise max_replication_slots and "
            f"restart it{unused}."
        )
    if isinstance(error, errors.InsufficientPrivilege):
        return SourceRefused(
            f"Slot {name} needs a role that may replicate: run ALTER ROLE {quote_ident(role)} REPLICATION "
            f"(on a managed service grant its replication role instead)."
        )
    if isinstance(error, errors.DuplicateObject):
        return SourceRefused(f"Slot {name} exists already; drop it with `pgwal drop`, or set PGWAL_SLOT to another name.")
    return translate(error, f"working on slot {name}")


def explain(dsn: str, name: str, error: psycopg2.Error) -> PgwalError:
    """Return `refusal` for a slot that must exist and could not be read; uses a connection of its own."""
    if _connection_trouble(error):
        return translate(error, f"starting to read slot {name}")
    try:
        with closing(connect(dsn)) as conn:
            existing(conn, name)
            return refusal(conn, name, error)
    except PgwalError as found:
        return found


def busy(conn: Connection, name: str) -> SlotBusy:
    """Return the exception to raise if another session reads the slot; it names the session."""
    row = first_row(
        conn,
        f"finding out who reads slot {name}",
        f"{SESSION_OF} (SELECT s.active_pid FROM pg_catalog.pg_replication_slots s WHERE s.slot_name = %s)",
        name,
    )
    return SlotBusy(
        f"Slot {name} is read by {describe_session(row)}: wait for that reader to end, or end it with SELECT pg_terminate_backend(PID); "
        f"if it is not ours, set PGWAL_SLOT to another name."
    )


SESSION_OF = """SELECT a.pid, nullif(a.application_name, ''), a.usename::text, pg_catalog.host(a.client_addr), a.backend_start
FROM pg_catalog.pg_stat_activity a WHERE a.pid = """
"""The start of a query for `describe_session`; a pid must follow."""


def describe_session(row: tuple[Any, ...] | None) -> str:
    """Return a session as text for a message: pid, application, user, client address and start time."""
    if row is None:
        return "a session that has just ended"
    pid, application, user, host, since = row
    parts = [f"pid {pid}", application, f"user {user}", f"from {host}" if host else None]
    began = "" if since is None else f" since {since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return ", ".join(filter(None, parts)) + began


def first_row(conn: Connection, doing: str, statement: str, *params: Any) -> tuple[Any, ...] | None:
    """Run one statement and return its first row. Raises the error that `translate` returns; `doing` is as there."""
    try:
        return conn.execute(statement.encode(), params).fetchone()
    except psycopg2.Error as error:
        raise translate(error, doing) from error


def _connection_trouble(error: psycopg2.Error) -> bool:
    if isinstance(error, errors.DuplicateObject):  # may be raised by us, without an SQLSTATE
        return False
    return error.pgcode is None or (error.pgcode[:2] in ("08", "53", "57") and not isinstance(error, errors.ConfigurationLimitExceeded))


def _bytes(lsn: str) -> str:
    return f"coalesce(({lsn}) - '0/0'::pg_lsn, 0)::int8"


def _gone(name: str) -> SlotLost:
    return SlotLost(
        f"Slot {name} is not on the source: it was dropped, or never made. Run `pgwal resnapshot --all` to make it and read every table "
        f"again."
    )

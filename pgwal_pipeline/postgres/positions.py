"""Find the end of the source's WAL, as an LSN of the stream.

SQL reports it cheaply, and on Postgres itself the stream reaches the LSN that SQL reports. On a service that keeps its own storage below
Postgres (Aurora is reported to), the two may be different sequences: a drain that waits for an LSN of the other sequence would never end,
or end at once. So SQL's LSN is compared with a walsender's own once, and if they differ, a walsender is asked each time.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2 import errors, extensions

from pgwal_pipeline.messages.errors import PgwalError, SourceRefused
from pgwal_pipeline.postgres.command import run
from pgwal_pipeline.postgres.connection import Connection, ReplicationConnection
from pgwal_pipeline.postgres.dsn import replication_connection, translate
from pgwal_pipeline.values.lsn import parse_lsn

_IN_RECOVERY = "pg_catalog.pg_is_in_recovery()"
FLUSHED = f"CASE WHEN {_IN_RECOVERY} THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_flush_lsn() END"
_INSERTED = f"CASE WHEN {_IN_RECOVERY} THEN pg_catalog.pg_last_wal_replay_lsn() ELSE pg_catalog.pg_current_wal_insert_lsn() END"
# A standby's walsender reports the WAL that has been received; some of it may not be replayed yet.
_RECEIVED = (
    f"CASE WHEN {_IN_RECOVERY} THEN greatest(pg_catalog.pg_last_wal_replay_lsn(), pg_catalog.pg_last_wal_receive_lsn()) "
    "ELSE pg_catalog.pg_current_wal_flush_lsn() END"
)
_FREE_SENDERS = "current_setting('max_wal_senders')::int8 - (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders())"

_COMPARE_EVERY = 3600.0  # seconds between two comparisons, as another server may have the address by then
_GOING = 2.0  # seconds that a closed walsender session gets to disappear from the server

_compared: dict[tuple[Any, ...], tuple[bool, float]] = {}  # by server, database and role: whether they agree, and when that was checked


@dataclass(frozen=True, slots=True)
class Comparison:
    """A walsender's flush LSN, and the flush LSNs that SQL reported before and after it."""

    before: int
    stream: int
    after: int

    @property
    def agree(self) -> bool:
        """Whether the stream reaches the LSN that SQL reports."""
        return self.before <= self.stream <= self.after


def flush_lsn(conn: Connection) -> int:
    """Return the LSN up to which the WAL is flushed, and so can be streamed; on a standby, up to which it is replayed.

    It is an LSN of the stream even if SQL's differ. For a server error, all functions here raise the error that `dsn.translate` returns.
    """
    return _read(conn, FLUSHED) if _agree(conn) else stream_position(conn)


def insert_lsn(conn: Connection, *, force: bool = True) -> int:
    """Return the LSN at which the next record is written, flushed or not; on a standby, the LSN up to which the WAL is replayed.

    If SQL's LSNs are not the stream's, a flush is forced and the walsender's flush LSN after it returned; with `force` false, the current
    one. Raises SourceRefused if the role may not force a flush.
    """
    return _read(conn, _INSERTED) if _agree(conn) else stream_position(conn, force=force)


def stream_position(conn: Connection, *, force: bool = False) -> int:
    """Return the flush LSN of a walsender, asked over a new session to the server of `conn`; `force` forces a flush first."""
    walsender = replication_connection(_dsn_of(conn))
    try:
        if force and not _one(conn, _IN_RECOVERY):
            _force_flush(walsender)
        return parse_lsn(run(walsender, "IDENTIFY_SYSTEM").fetchall()[0][2])
    except psycopg2.Error as error:
        raise translate(error, "asking a walsender for its position") from error
    finally:
        pid = walsender.info.backend_pid
        walsender.close()
        with suppress(psycopg2.Error):
            _await_its_end(conn, pid)


def compare(conn: Connection) -> Comparison:
    """Compare SQL's flush LSN with a walsender's, which takes up a walsender for a moment. Raises as `replication_connection` does."""
    before = _read(conn, FLUSHED)
    return Comparison(before, stream_position(conn), _read(conn, _RECEIVED))


def known_to_differ(conn: Connection) -> bool:
    """Return whether SQL and the stream have been found to differ on this server; False if they have not been compared yet."""
    return not _compared.get(_server(conn), (True, 0.0))[0]


def _agree(conn: Connection) -> bool:
    """Return whether SQL reports LSNs of the stream.

    It is checked once an hour for each server. While no walsender is free for that, the last answer holds, and at first True.
    """
    server, now = _server(conn), time.monotonic()
    agree, at = _compared.get(server, (True, float("-inf")))
    if now - at < _COMPARE_EVERY:
        return agree
    if _one(conn, _FREE_SENDERS) < 2:  # the last free walsender is for a drain
        return agree
    try:
        agree = compare(conn).agree
    except PgwalError:
        return agree
    _compared[server] = agree, now
    return agree


def _server(conn: Connection) -> tuple[Any, ...]:
    info = conn.info
    return info.host, info.dsn_parameters.get("hostaddr"), info.port, info.dbname, info.user


def _dsn_of(conn: Connection) -> str:
    """Return a DSN for the very server of `conn`, whose own DSN may name several."""
    info = conn.info
    parameters = info.dsn_parameters | {"host": info.host, "port": str(info.port)}
    if info.password:
        parameters["password"] = info.password
    return extensions.make_dsn(**parameters)


def _force_flush(walsender: ReplicationConnection) -> None:
    run(walsender, "SET synchronous_commit = local")
    try:
        run(walsender, "SELECT pg_catalog.pg_logical_emit_message(true, 'pgwal', '')")
    except errors.InsufficientPrivilege as error:
        raise SourceRefused(
            "The role may not call pg_logical_emit_message, which this source needs, as its SQL does not tell where the stream ends: "
            "run GRANT EXECUTE ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text) for it."
        ) from error


def _await_its_end(conn: Connection, pid: int) -> None:
    """Wait until a closed session has ended on the server: its walsender may be the last free one."""
    deadline = time.monotonic() + _GOING
    while _one(conn, f"EXISTS (SELECT FROM pg_catalog.pg_stat_get_activity({int(pid)}))") and time.monotonic() < deadline:
        time.sleep(0.002)


def _read(conn: Connection, lsn: str) -> int:
    return int(_one(conn, f"(({lsn}) - '0/0'::pg_catalog.pg_lsn)::bigint"))


def _one(conn: Connection, expression: str) -> Any:
    try:
        return conn.execute(f"SELECT {expression}".encode()).fetchall()[0][0]
    except psycopg2.Error as error:
        raise translate(error, "asking where the WAL ends") from error

"""Where the source's WAL ends, in the terms of the stream.

SQL tells it cheaply, and on Postgres itself the stream reaches what SQL tells. On a service that keeps its own storage below Postgres
(Aurora is reported to) the two may be different sequences, and a drain that waits for a position of the other one would never end, or end
at once. So what SQL says is compared with a walsender's own position once, and where they differ a walsender is asked each time.
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
# A standby's walsender tells what has been received, which may be replayed later.
_RECEIVED = (
    f"CASE WHEN {_IN_RECOVERY} THEN greatest(pg_catalog.pg_last_wal_replay_lsn(), pg_catalog.pg_last_wal_receive_lsn()) "
    "ELSE pg_catalog.pg_current_wal_flush_lsn() END"
)
_FREE_SENDERS = "current_setting('max_wal_senders')::int8 - (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders())"

_LOOK_AGAIN = 3600.0  # seconds; another server may have the address by then
_GOING = 2.0  # seconds for a walsender that has ended to be gone

_compared: dict[tuple[Any, ...], tuple[bool, float]] = {}  # by server, database and role: whether they agree, and when that was found


@dataclass(frozen=True, slots=True)
class Comparison:
    """A flush position that a walsender gave, between two that SQL gave before and after it."""

    before: int
    stream: int
    after: int

    @property
    def agree(self) -> bool:
        """Whether the stream reaches what SQL says."""
        return self.before <= self.stream <= self.after


def flush_lsn(conn: Connection) -> int:
    """The LSN up to which the WAL is flushed, and so may be streamed; on a standby the one up to which it is replayed.

    As the stream has it, also where SQL says something else. Raises what `dsn.translate` makes of an error of the server's, as all here do.
    """
    return _read(conn, FLUSHED) if _agree(conn) else stream_position(conn)


def insert_lsn(conn: Connection, *, force: bool = True) -> int:
    """The LSN at which the next record is written, flushed or not; on a standby the one up to which it is replayed.

    Where SQL does not say that in the stream's terms, a flush is forced and it is the LSN behind that; not so without `force`, where it is
    the flush position of now. Raises SourceRefused where the role may not force it.
    """
    return _read(conn, _INSERTED) if _agree(conn) else stream_position(conn, force=force)


def stream_position(conn: Connection, *, force: bool = False) -> int:
    """A walsender's own flush position, asked on a session of its own on the server of `conn`; after a flush that it forces, if told to."""
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
    """Compare what SQL says with what a walsender says; takes a walsender for a moment. Raises as `replication_connection` does."""
    before = _read(conn, FLUSHED)
    return Comparison(before, stream_position(conn), _read(conn, _RECEIVED))


def known_to_differ(conn: Connection) -> bool:
    """Whether SQL and the stream have been found to differ on this server; False also where nobody has looked yet."""
    return not _compared.get(_server(conn), (True, 0.0))[0]


def _agree(conn: Connection) -> bool:
    """Whether SQL may be asked; found out once a server and an hour, and taken for granted while no walsender can be had for it."""
    server, now = _server(conn), time.monotonic()
    agree, at = _compared.get(server, (True, float("-inf")))
    if now - at < _LOOK_AGAIN:
        return agree
    if _one(conn, _FREE_SENDERS) < 2:  # the last one is for a drain
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
    """A DSN that leads to the very server of `conn`, of several that its own may name."""
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
    """A session ends a moment after its connection, and its walsender may be the last that the server has."""
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

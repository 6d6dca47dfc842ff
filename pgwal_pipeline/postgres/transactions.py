"""Begin reads with a known snapshot, and wait for open transactions."""

import time
from collections.abc import Callable
from typing import Any

import psycopg2

from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.messages.errors import BlockedByTransaction, SourceUnavailable
from pgwal_pipeline.postgres.blockers import Blocker, describe
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import translate

_WARN_AFTER = 5.0
_LIST_EVERY = 5.0
_SETTLE_TIMEOUT = 60.0

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

# The open transactions with an xid below the given one. Every role sees the xids in pg_locks, but not those in pg_stat_activity. They have
# 32 of the 64 bits, so "below" means within the half circle before it.
_BELOW = "((%(xid)s - {}::text::int8) & 4294967295) BETWEEN 1 AND 2147483648"
_OLDER_SQL = f"""
SELECT a.pid, NULL::text, a.datname::text, a.usename::text, nullif(a.application_name, ''),
    extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.backend_start))::float8, a.state,
    nullif(a.query, '<insufficient privilege>')
FROM pg_catalog.pg_stat_activity a
WHERE a.pid IN (SELECT l.pid FROM pg_catalog.pg_locks l
                WHERE l.locktype = 'transactionid' AND l.granted AND l.mode = 'ExclusiveLock' AND {_BELOW.format("l.transactionid")})
UNION ALL
SELECT NULL, p.gid, p.database::text, p.owner::text, NULL, extract(epoch FROM clock_timestamp() - p.prepared)::float8, NULL, NULL
FROM pg_catalog.pg_prepared_xacts p WHERE {_BELOW.format("p.transaction")}
ORDER BY 6 DESC NULLS LAST
"""


def wait_for_transactions(conn: Connection, xid64: int, timeout: float, warn: Callable[[str], None]) -> None:
    """Wait until every transaction of any database with a 64-bit xid below `xid64` has ended, prepared ones too.

    After 5 s `warn` is told which ones are still open, and again when these change. Raises BlockedByTransaction, naming them, after
    `timeout` seconds.
    """
    started = time.monotonic()
    listed, named, pause = started + _WARN_AFTER - _LIST_EVERY, "", 0.05
    while True:
        try:
            if _oldest_running(conn) >= xid64:
                return
            now = time.monotonic()
            if now - started >= timeout:
                raise BlockedByTransaction(
                    f"Transactions that were open when tables joined the publication did not end within {duration(timeout)} "
                    f"(PGWAL_BLOCKED_TIMEOUT), and what they wrote is in no stream: {_whom(conn, xid64)[0]}; end them "
                    "(SELECT pg_terminate_backend(PID), or ROLLBACK PREPARED), or raise PGWAL_BLOCKED_TIMEOUT."
                )
            if now - listed >= _LIST_EVERY:
                listed = now
                text, who = _whom(conn, xid64)
                if who != named:
                    named = who
                    warn(f"Tables that joined the publication are not read before older transactions end: {text}.")
        except psycopg2.Error as error:
            raise translate(error, "waiting for open transactions") from error
        time.sleep(max(0.0, min(pause, started + timeout - now)))
        pause = min(1.0, pause * 1.5)


def older_transactions(conn: Connection, xid64: int) -> list[Blocker]:
    """Return the open transactions with an xid below `xid64`, oldest first. A standby does not show its primary's."""
    return [Blocker(*row) for row in conn.execute(_OLDER_SQL.encode(), {"xid": xid64 & 0xFFFFFFFF})]


def begin_snapshot(conn: Connection, before: Callable[[], object] = lambda: None) -> str:
    """Begin a REPEATABLE READ, READ ONLY transaction on an autocommit connection, and return its snapshot.

    `before` is called in the transaction before the snapshot is taken, to lock tables; more than once if the snapshot is taken again.
    The snapshot is as from `pg_current_snapshot()`, `xmin:xmax:xid,…`: it sees the transactions below xmax that are not listed, and no
    others. On a standby Postgres leaves the list empty though transactions run; here it is filled in, by checking the status of each
    transaction before and after the snapshot. Raises SourceUnavailable if, on a standby, transactions come and go so quickly that this does
    not succeed within a minute.
    """
    if not _one(conn, "SELECT pg_catalog.pg_is_in_recovery()")[0]:
        conn.execute(_BEGIN.encode())
        before()
        return _one(conn, "SELECT pg_catalog.pg_current_snapshot()::text")[0]
    deadline = time.monotonic() + _SETTLE_TIMEOUT
    running: list[int] = []
    known_below = 0
    while True:
        conn.execute(_BEGIN.encode())
        before()
        # The snapshot is taken before the statuses are read, which are those of the moment of reading.
        xmin, xmax, candidates, still = _one(
            conn,
            """SELECT s.xmin, s.xmax, s.candidates,
                   ARRAY(SELECT x FROM pg_catalog.unnest(s.candidates) x WHERE pg_catalog.pg_xact_status(x::text::xid8) = 'in progress')
               FROM (SELECT b.xmin, b.xmax,
                         ARRAY(SELECT x FROM pg_catalog.unnest(%(running)s::int8[]) x WHERE x >= b.xmin
                               UNION ALL SELECT pg_catalog.generate_series(greatest(b.xmin, %(known)s::int8), b.xmax - 1)) AS candidates
                     FROM (SELECT pg_catalog.pg_snapshot_xmin(s)::text::int8 AS xmin, pg_catalog.pg_snapshot_xmax(s)::text::int8 AS xmax
                           FROM pg_catalog.pg_current_snapshot() s) b) s""",
            {"running": running, "known": known_below},
        )
        # A transaction that ran or was unknown at the last check, and has ended now, may have ended before or after the snapshot.
        if len(still) == len(candidates):
            return f"{xmin}:{xmax}:{','.join(map(str, sorted(still)))}"
        conn.execute(b"ROLLBACK")
        running, known_below = still, xmax
        if time.monotonic() > deadline:
            raise SourceUnavailable(
                "The source is a standby, and its primary's transactions come and go too quickly to tell which of them a read sees; "
                "take the snapshot at a quieter time, or set PGWAL_SOURCE_DSN to the primary."
            )


def _whom(conn: Connection, xid64: int) -> tuple[str, str]:
    """Return the transactions still waited for, as text for a message and as an id of the set."""
    found = older_transactions(conn, xid64)
    return describe(found), " ".join(str(blocker.pid or blocker.gid) for blocker in found)


def _oldest_running(conn: Connection) -> int:
    return _one(conn, "SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::int8")[0]


def _one(conn: Connection, query: str, values: dict[str, Any] | None = None) -> tuple[Any, ...]:
    return conn.execute(query.encode(), values).fetchall()[0]

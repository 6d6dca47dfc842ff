"""Find the open transactions on the source, prepared ones too, that others have to wait for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.postgres.connection import Connection

_SHOWN = 3
_QUERY_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Blocker:
    """A transaction of a session (`pid`) or a prepared one (`gid`), open for `seconds`. What the role may not see of it is None."""

    pid: int | None
    gid: str | None
    database: str | None
    user: str | None
    application: str | None
    seconds: float | None
    state: str | None
    query: str | None

    def __str__(self) -> str:
        if self.gid is not None:
            who = f"the prepared transaction {self.gid!r} in database {self.database}"
        else:
            who = f"pid {self.pid}" + "".join(f", {part}" for part in (self.application, self.user, self.database) if part)
        age = "" if self.seconds is None else f", open for {duration(self.seconds)}"
        state = f", {self.state}" if self.state and self.state != "active" else ""
        query = f": {' '.join(self.query.split())[:_QUERY_LENGTH]}" if self.query else ""
        return f"{who}{age}{state}{query}"


def describe(blockers: Sequence[Blocker]) -> str:
    """Return the first 3 blockers as text for a message, and how many more there are; `an open transaction` if there are none."""
    if not blockers:
        return "an open transaction"
    more = f"; and {len(blockers) - _SHOWN} more" if len(blockers) > _SHOWN else ""
    return "; ".join(map(str, blockers[:_SHOWN])) + more


_SESSION = """SELECT a.pid, NULL::text, a.datname::text, a.usename::text, nullif(a.application_name, ''),
       extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.backend_start))::float8, a.state,
       nullif(a.query, '<insufficient privilege>')
FROM pg_catalog.pg_stat_activity a"""
_PREPARED = """SELECT NULL::int, p.gid, p.database::text, p.owner::text, NULL::text,
       extract(epoch FROM clock_timestamp() - p.prepared)::float8, NULL::text, NULL::text
FROM pg_catalog.pg_prepared_xacts p"""


def blocking(conn: Connection, pid: int) -> list[Blocker]:
    """Return the transactions that session `pid` waits for now, oldest first. Creating a slot waits for one after the other."""
    return _ordered(
        conn,
        f"{_SESSION} WHERE a.pid = ANY (pg_catalog.pg_blocking_pids(%(pid)s)) UNION ALL {_PREPARED} "
        "WHERE p.transaction::text IN (SELECT l.transactionid::text FROM pg_catalog.pg_locks l "
        "WHERE l.pid = %(pid)s AND l.locktype = 'transactionid' AND NOT l.granted)",
        {"pid": pid},
    )


def locking(conn: Connection, oid: int) -> list[Blocker]:
    """Return the transactions that have locked the table `oid`, or a partition of it, against reading, or wait to, oldest first."""
    locks = (
        "(SELECT l.pid, l.virtualtransaction FROM pg_catalog.pg_locks l WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' "
        "AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database()) AND (l.relation = %(oid)s "
        "OR l.relation IN (SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = %(oid)s)))"
    )
    return _ordered(
        conn,
        f"WITH locks AS {locks} {_SESSION} WHERE a.pid IN (SELECT pid FROM locks) UNION ALL {_PREPARED} "
        "WHERE p.transaction::text IN (SELECT l.transactionid::text FROM pg_catalog.pg_locks l WHERE l.locktype = 'transactionid' "
        "AND l.virtualtransaction IN (SELECT virtualtransaction FROM locks WHERE pid IS NULL))",
        {"oid": oid},
    )


def waits_on(conn: Connection, pid: int) -> str | None:
    """Return the server's internal wait event of session `pid`, such as `LWLock ReplicationSlotAllocation`; None if it waits for none."""
    row = conn.execute(
        "SELECT a.wait_event_type || ' ' || a.wait_event FROM pg_catalog.pg_stat_activity a "
        "WHERE a.pid = %s AND a.wait_event_type IN ('LWLock', 'IO', 'IPC', 'BufferPin')",
        [pid],
    ).fetchone()
    return None if row is None else str(row[0])


def at_slots(conn: Connection, pid: int) -> list[Blocker]:
    """Return the other sessions that are creating, copying, advancing or dropping a slot now, oldest first.

    They are found by their statements, as the server's internal locks on slots name no holder; the role may not see every statement.
    """
    return _ordered(
        conn,
        f"{_SESSION} WHERE a.state = 'active' AND a.query ~* 'replication_slot' AND a.pid NOT IN (%(pid)s, pg_catalog.pg_backend_pid())",
        {"pid": pid},
    )


def older_than(conn: Connection, seconds: float) -> list[Blocker]:
    """Return the transactions, in any database, that have written and been open for longer than `seconds`, oldest first.

    Sessions of other roles are visible only with the privileges of pg_read_all_stats; prepared transactions are visible to every role.
    """
    return _ordered(
        conn,
        f"{_SESSION} WHERE a.xact_start < clock_timestamp() - make_interval(secs => %(seconds)s) AND a.backend_xid IS NOT NULL "
        f"UNION ALL {_PREPARED} "
        "WHERE p.prepared < clock_timestamp() - make_interval(secs => %(seconds)s)",
        {"seconds": seconds},
    )


def _ordered(conn: Connection, query: str, params: dict[str, Any]) -> list[Blocker]:
    return [Blocker(*row) for row in conn.execute(f"{query} ORDER BY 6 DESC NULLS LAST".encode(), params)]

"""Who holds others up on the source: transactions that are still open, prepared ones too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.postgres.connection import Connection

_SHOWN = 3
_QUERY_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Blocker:
    """An open transaction, of a session (`pid`) or prepared (`gid`), open for `seconds`. What the role may not see of it is None."""

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
    """The first few of them, for a message; `an open transaction` where none could be found."""
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
    """The transactions for which the session `pid` waits now, the oldest first; a slot being made waits for one after the other."""
    return _ordered(
        conn,
        f"{_SESSION} WHERE a.pid = ANY (pg_catalog.pg_blocking_pids(%(pid)s)) UNION ALL {_PREPARED} "
        "WHERE p.transaction::text IN (SELECT l.transactionid::text FROM pg_catalog.pg_locks l "
        "WHERE l.pid = %(pid)s AND l.locktype = 'transactionid' AND NOT l.granted)",
        {"pid": pid},
    )


def waits_on(conn: Connection, pid: int) -> str | None:
    """What of the server's own the session `pid` waits for, such as `LWLock ReplicationSlotAllocation`; None where it does not."""
    row = conn.execute(
        "SELECT a.wait_event_type || ' ' || a.wait_event FROM pg_catalog.pg_stat_activity a "
        "WHERE a.pid = %s AND a.wait_event_type IN ('LWLock', 'IO', 'IPC', 'BufferPin')",
        [pid],
    ).fetchone()
    return None if row is None else str(row[0])


def at_slots(conn: Connection, pid: int) -> list[Blocker]:
    """The other sessions that are making, copying, moving or dropping a slot now: the server's own locks on slots name no holder.

    Only those whose statements the role may see.
    """
    return _ordered(
        conn,
        f"{_SESSION} WHERE a.state = 'active' AND a.query ~* 'replication_slot' AND a.pid NOT IN (%(pid)s, pg_catalog.pg_backend_pid())",
        {"pid": pid},
    )


def older_than(conn: Connection, seconds: float) -> list[Blocker]:
    """The transactions that have written and been open for longer than `seconds`, in any database, the oldest first.

    Others' sessions are seen only by a role that has the privileges of pg_read_all_stats; prepared transactions by all.
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

"""Look into a slot's backlog for changes, without reading it."""

import psycopg2

from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.values.relation import quote_ident
from pgwal_pipeline.values.xid import Snapshot

_ROWS = 1000
_DEFINITIONS = """
    SELECT EXISTS (
        SELECT FROM pg_publication_tables p
        JOIN pg_namespace n ON n.nspname = p.schemaname
        JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = p.tablename
        LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        WHERE p.pubname = %s AND (
            least(age(c.xmin), age(a.xmin)) <= pg_snapshot_xmax(pg_current_snapshot())::text::bigint - %s
            OR ARRAY[c.xmin::text::bigint, a.xmin::text::bigint] && %s::bigint[]))"""
_CHANGES = """
    SELECT count(*), count(*) FILTER (WHERE get_byte(data, 0) NOT IN (ascii('B'), ascii('C')))
    FROM pg_logical_slot_peek_binary_changes(%s, NULL, %s, 'proto_version', '1', 'publication_names', %s)"""


def has_changes(conn: Connection, slot: str, publication: str, since: Snapshot) -> bool:
    """Return whether the backlog of `slot` has a change of a table in `publication`, or such a table's definition has changed.

    `since` is a snapshot from before the backlog; transactions of other databases, of autovacuum and the like are no changes. True also if
    it cannot be told within a second, as while another session reads the slot. The slot is not moved. The server decodes the backlog up to
    its first transaction with a change, so the backlog must be short. `conn` keeps a statement time-out of a second.
    """
    # Before Postgres 15 transactions without a change come too, as Begin and Commit.
    most = 1 if conn.info.server_version >= 150000 else _ROWS
    try:
        conn.execute("SET statement_timeout = '1s'")
        ((defined,),) = conn.execute(_DEFINITIONS, [publication, since.high, [xid % (1 << 32) for xid in since.running]]).fetchall()
        if defined:
            return True
        ((rows, found),) = conn.execute(_CHANGES, [slot, most, quote_ident(publication)]).fetchall()
    except psycopg2.Error:
        return True
    return found > 0 or rows >= _ROWS

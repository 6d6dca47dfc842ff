"""Look into a slot's backlog for changes, without reading it."""

import psycopg2

from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.publication_query import published_sql
from pgwal_pipeline.values.relation import quote_ident
from pgwal_pipeline.values.xid import Snapshot

_ROWS = 1000
_DEFINITIONS = """
    SELECT EXISTS (
        SELECT FROM ({published}) p
        JOIN pg_catalog.pg_class c ON c.oid = p.relid
        LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        WHERE least(pg_catalog.age(c.xmin), pg_catalog.age(a.xmin))
                <= pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint - %s
            OR ARRAY[c.xmin::text::bigint, a.xmin::text::bigint] && %s::bigint[])"""
_CHANGES = """
    SELECT count(*), count(*) FILTER (WHERE pg_catalog.get_byte(data, 0) NOT IN (pg_catalog.ascii('B'), pg_catalog.ascii('C')))
    FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, NULL, %s, 'proto_version', '1', 'publication_names', %s)"""


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
        definitions = _DEFINITIONS.format(published=published_sql(conn.info.server_version))
        ((defined,),) = conn.execute(definitions, [publication, since.high, [xid % (1 << 32) for xid in since.running]]).fetchall()
        if defined:
            return True
        ((rows, found),) = conn.execute(_CHANGES, [slot, most, quote_ident(publication)]).fetchall()
    except psycopg2.Error:
        return True
    return found > 0 or rows >= _ROWS

"""Read how large the source's tables are: estimates that cost one query for all tables."""

from collections.abc import Collection
from dataclasses import dataclass

from pgwal_pipeline.postgres.catalog import Connection, fetch
from pgwal_pipeline.values.relation import TableName

_LOCK_TIMEOUT = "1s"  # for a table that is being altered


@dataclass(frozen=True, slots=True)
class TableSize:
    """A table's size: its rows as the planner estimates them (None before the first ANALYZE), and its bytes with indexes and TOAST."""

    rows: int | None
    bytes: int


def table_sizes(conn: Connection, tables: Collection[TableName]) -> dict[TableName, TableSize]:
    """Return the sizes of those of `tables` that exist, partitions included.

    A table that is being altered is waited for a second. Raises the error that `dsn.translate` returns for a server error.
    """
    fetch(conn, "SELECT pg_catalog.set_config('lock_timeout', %s, false)", _LOCK_TIMEOUT)
    rows = fetch(
        conn,
        """SELECT t.schema, t.name,
               sum(CASE WHEN p.reltuples >= 0 THEN p.reltuples ELSE nullif(pg_catalog.pg_stat_get_live_tuples(p.oid), 0) END)::int8,
               sum(pg_catalog.pg_total_relation_size(p.oid))::int8
           FROM ROWS FROM (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) AS t (schema, name)
           JOIN pg_catalog.pg_namespace n ON n.nspname = t.schema
           JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.name
           CROSS JOIN LATERAL (
               SELECT relid FROM pg_catalog.pg_partition_tree(c.oid) WHERE isleaf
               UNION SELECT c.oid WHERE c.relkind <> 'p'
           ) leaf
           JOIN pg_catalog.pg_class p ON p.oid = leaf.relid
           GROUP BY t.schema, t.name""",
        [table.schema for table in tables],
        [table.name for table in tables],
    )
    return {TableName(schema, name): TableSize(estimate, size or 0) for schema, name, estimate, size in rows}

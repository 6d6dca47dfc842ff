"""Read the source's catalog: which server it is, and the tables of a publication with their types, keys and columns.

Each question is one query for all tables, never one per table, so that some hundred tables cost as little as one.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import psycopg2

from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import translate
from pgwal_pipeline.postgres.positions import flush_lsn, insert_lsn
from pgwal_pipeline.postgres.publication_query import ROW_FILTER, published_sql
from pgwal_pipeline.values.relation import Column, PgType, Relation, ReplicaIdentity, TableName

__all__ = [
    "Connection",
    "PublishedTable",
    "SourceIdentity",
    "StreamedColumn",
    "StreamedRelation",
    "describe",
    "fetch",
    "flush_lsn",
    "insert_lsn",
    "primary_key",
    "published_tables",
    "resolve_types",
    "running_transactions",
    "source_identity",
    "tables_of",
]


class StreamedColumn(Protocol):
    """A column of the stream's Relation message; `identity`: whether old rows carry it."""

    @property
    def name(self) -> str: ...
    @property
    def type_oid(self) -> int: ...
    @property
    def typmod(self) -> int: ...
    @property
    def identity(self) -> bool: ...


class StreamedRelation(Protocol):
    """The stream's Relation message; `schema` is empty for pg_catalog."""

    @property
    def oid(self) -> int: ...
    @property
    def schema(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def replica_identity(self) -> str: ...
    @property
    def columns(self) -> Sequence[StreamedColumn]: ...


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The identity of a source: the cluster, its timeline, and the database in it."""

    system_identifier: int
    timeline: int
    database_oid: int
    database: str
    server_version: int
    """As in `server_version_num`: 180006 for 18.6."""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table of a publication, and the condition (SQL, unqualified column names) that rows must meet to be published."""

    relation: Relation
    row_filter: str | None


# Two subqueries on a table's indexes: the columns of the primary key and of the replica identity's index, in the index's order. INCLUDE
# columns are not part of the key. A deferrable key does not count: within a transaction two rows may share it.
_INDEX_COLUMNS = """(SELECT pg_catalog.array_agg(a.attname::text ORDER BY k.place)
     FROM pg_catalog.pg_index i
     CROSS JOIN LATERAL pg_catalog.unnest(i.indkey) WITH ORDINALITY AS k (attnum, place)
     JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
     WHERE i.indrelid = c.oid AND i.{which} AND i.indisvalid AND i.indimmediate AND k.place <= i.indnkeyatts)"""
PRIMARY_KEY_SQL = _INDEX_COLUMNS.format(which="indisprimary")
IDENTITY_INDEX_SQL = _INDEX_COLUMNS.format(which="indisreplident")

# From 18 on a NOT NULL constraint may be unvalidated, with nulls in old rows; before 18 it has no row in pg_constraint.
_NULLABLE_SQL = """(NOT a.attnotnull OR EXISTS (
     SELECT FROM pg_catalog.pg_constraint n
     WHERE n.conrelid = a.attrelid AND n.contype = 'n' AND NOT n.convalidated AND n.conkey[1] = a.attnum))"""


def source_identity(conn: Connection) -> SourceIdentity:
    """Return the identity of the source that `conn` is connected to.

    For a server error, all functions here raise the error that `dsn.translate` returns.
    """
    row = _one(
        conn,
        """SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()),
               CASE WHEN pg_catalog.pg_is_in_recovery()
                    THEN (SELECT greatest(r.min_recovery_end_timeline, k.timeline_id)
                          FROM pg_catalog.pg_control_recovery() r, pg_catalog.pg_control_checkpoint() k)
               END,
               d.oid, d.datname::text
           FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()""",
    )
    timeline = row[1]
    if timeline is None:
        # After a promotion the control file has the old timeline until the next checkpoint; the current WAL file's name has the new one.
        file = _one(conn, "SELECT pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn())")[0]
        timeline = int(file[:8], 16)
    return SourceIdentity(row[0], timeline, row[2], row[3], conn.info.server_version)


def running_transactions(conn: Connection) -> str:
    """Return `pg_current_snapshot()`, `xmin:xmax:xid,…`: transactions below xmax that are not listed have ended. A standby lists none."""
    return _one(conn, "SELECT pg_catalog.pg_current_snapshot()::text")[0]


def resolve_types(conn: Connection, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], PgType]:
    """Return the types of (type oid, typmod) pairs, in one query.

    A domain becomes its base type, with the domain's typmod; an array has an element type, to which the typmod applies. A type that the
    catalog no longer has is named `???` and has no element.
    """
    asked = set(pairs)
    if not asked:
        return {}
    rows = fetch(
        conn,
        """WITH RECURSIVE needed (oid, typmod) AS (
               SELECT * FROM unnest(%s::oid[], %s::int4[])
             UNION
               SELECT CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.typelem END,
                   CASE t.typtype WHEN 'd' THEN t.typtypmod ELSE n.typmod END
               FROM needed n JOIN pg_catalog.pg_type t ON t.oid = n.oid
               WHERE t.typtype = 'd' OR t.typoutput = 'pg_catalog.array_out'::pg_catalog.regproc
           )
           SELECT n.oid, n.typmod, pg_catalog.format_type(n.oid, n.typmod), t.typtype = 'd', t.typbasetype, t.typtypmod,
               t.typoutput = 'pg_catalog.array_out'::pg_catalog.regproc, t.typelem, t.typdelim::text
           FROM needed n JOIN pg_catalog.pg_type t ON t.oid = n.oid""",
        [oid for oid, _ in asked],
        [typmod for _, typmod in asked],
    )
    known = {(row[0], row[1]): row[2:] for row in rows}

    def resolve(oid: int, typmod: int) -> PgType:
        if (oid, typmod) not in known:
            return PgType(oid, typmod, "???")
        name, is_domain, base, base_typmod, is_array, element, delimiter = known[oid, typmod]
        if is_domain:
            below = resolve(base, base_typmod)
            return PgType(below.oid, below.typmod, name, below.element, delimiter)
        # A domain over an array has array_out too, but the element of its base type: it is handled above.
        return PgType(oid, typmod, name, resolve(element, typmod) if is_array else None, delimiter)

    return {pair: resolve(*pair) for pair in asked}


def primary_key(conn: Connection, oid: int) -> tuple[str, ...]:
    """Return the columns of the table's primary key in its index's order; empty if there is none or it is deferrable."""
    row = fetch(conn, f"SELECT {PRIMARY_KEY_SQL} FROM pg_catalog.pg_class c WHERE c.oid = %s", oid)
    return tuple(row[0][0] or ()) if row else ()


def user_schemas(conn: Connection) -> list[str]:
    """Return the schemas that have user tables, sorted by name."""
    rows = fetch(
        conn,
        """SELECT DISTINCT n.nspname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
           WHERE c.relkind IN ('r', 'p') AND n.nspname <> 'information_schema' AND NOT pg_catalog.starts_with(n.nspname::text, 'pg_')
           ORDER BY 1""",
    )
    return [row[0] for row in rows]


def readable(conn: Connection, oids: Collection[int]) -> set[int]:
    """Return those of the tables `oids` that the role may read whole: every column, and no row hidden by row-level security."""
    rows = fetch(
        conn,
        """SELECT c.oid::int8 FROM pg_catalog.pg_class c
           WHERE c.oid = ANY (%s::oid[]) AND NOT pg_catalog.row_security_active(c.oid)
               AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
               AND (pg_catalog.has_table_privilege(c.oid, 'SELECT') OR NOT EXISTS (
                   SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                       AND NOT pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')))""",
        list(oids),
    )
    return {row[0] for row in rows}


def tables_of(conn: Connection, publication: str) -> list[Relation]:
    """Return the tables of a publication as the stream will send them; see `published_tables`. Waits for no lock on a table."""
    return [table.relation for table in _published(conn, publication, "NULL::text")]


def published_tables(conn: Connection, publication: str) -> list[PublishedTable]:
    """Return the tables of a publication, sorted by name, as the stream will send them, in two queries.

    A root stands for its partitions if the publication publishes through it. Columns are those of the column list, and generated columns
    are included only if the server publishes them. Waits for whoever has locked a table that has a row filter. Raises SourceRefused if
    there is no such publication.
    """
    return _published(conn, publication, ROW_FILTER)


def _published(conn: Connection, publication: str, row_filter: str) -> list[PublishedTable]:
    version = conn.info.server_version
    # A column list may name generated columns from 18 on; before, none is published.
    listed = "" if version >= 180000 else "a.attgenerated = '' AND "
    rows = fetch(
        conn,
        f"""SELECT c.oid, n.nspname::text, c.relname::text, c.relreplident::text, {row_filter}, {PRIMARY_KEY_SQL}, {IDENTITY_INDEX_SQL},
                a.names, a.types, a.typmods, a.nullables
            FROM ({published_sql(version)}) p
            JOIN pg_catalog.pg_class c ON c.oid = p.relid
            JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            CROSS JOIN LATERAL (
                SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) AS names,
                    pg_catalog.array_agg(a.atttypid::int8 ORDER BY a.attnum) AS types,
                    pg_catalog.array_agg(a.atttypmod ORDER BY a.attnum) AS typmods,
                    pg_catalog.array_agg({_NULLABLE_SQL} ORDER BY a.attnum) AS nullables
                FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                    AND CASE WHEN p.attnums IS NULL THEN a.attgenerated = '' OR p.generated AND a.attgenerated = 's'
                             ELSE {listed}a.attnum = ANY (p.attnums) END
            ) a
            ORDER BY n.nspname, c.relname""",
        publication,
    )
    if not rows and not fetch(conn, "SELECT FROM pg_catalog.pg_publication WHERE pubname = %s", publication):
        raise SourceRefused(f"There is no publication {publication} on the source; name an existing one in PGWAL_PUBLICATION.")
    types = resolve_types(conn, {pair for row in rows for pair in zip(row[8] or (), row[9] or (), strict=True)})
    tables = []
    for oid, schema, name, identity, condition, primary, index, names, oids, typmods, nullables in rows:
        carried = set({"f": names or (), "d": primary or (), "i": index or ()}.get(identity, ()))
        columns = tuple(
            Column(column, types[type_oid, typmod], column in carried, nullable)
            for column, type_oid, typmod, nullable in zip(names or (), oids or (), typmods or (), nullables or (), strict=True)
        )
        tables.append(PublishedTable(_relation(oid, TableName(schema, name), identity, columns, primary or (), index or ()), condition))
    return tables


def describe(conn: Connection, message: StreamedRelation) -> Relation:
    """Return the definition of the table in a Relation message of the stream, with its types resolved and its key found.

    The message describes the table when its rows were written, the catalog as it is now. Names, types and replica identity come from the
    message; the primary key and which columns are NOT NULL come from the catalog. A column that the catalog no longer has may be null.
    """
    types = resolve_types(conn, {(column.type_oid, column.typmod) for column in message.columns})
    rows = fetch(
        conn,
        f"""SELECT {PRIMARY_KEY_SQL}, {IDENTITY_INDEX_SQL},
                (SELECT pg_catalog.array_agg(a.attname::text) FROM pg_catalog.pg_attribute a
                 WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND NOT {_NULLABLE_SQL})
            FROM pg_catalog.pg_class c WHERE c.oid = %s""",
        message.oid,
    )
    primary, index, not_null = rows[0] if rows else (None, None, None)
    columns = tuple(
        Column(column.name, types[column.type_oid, column.typmod], column.identity, column.name not in (not_null or ()))
        for column in message.columns
    )
    table = TableName(message.schema or "pg_catalog", message.name)
    return _relation(message.oid, table, message.replica_identity, columns, primary or (), index or ())


def _relation(
    oid: int, table: TableName, identity: str, columns: tuple[Column, ...], primary: Sequence[str], index: Sequence[str]
) -> Relation:
    """Return a Relation with its key. `primary` and `index`: the columns of the primary key and of the identity index, in index order."""
    carried = [column.name for column in columns if column.identity]
    if primary and set(primary) <= set(carried):
        key = tuple(primary)
    elif identity == "f":
        key = ()
    else:
        # In the index's order if the index still has the same columns, so that a range of keys is a range of the index.
        key = tuple(index) if set(index) == set(carried) else tuple(carried)
    return Relation(oid, table, cast(ReplicaIdentity, identity), columns, key)


def fetch(conn: Connection, query: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of a catalog query; each `%s` stands for one of `values`. Raises the error that `dsn.translate` returns."""
    try:
        return conn.execute(query.encode(), values or None).fetchall()
    except psycopg2.Error as error:
        raise translate(error, "reading the catalog") from error


def _one(conn: Connection, query: str) -> tuple[Any, ...]:
    return fetch(conn, query)[0]

"""Find the source's tables that our publication may hold, and the reasons why others must be left out."""

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg2

from pgwal_pipeline.postgres.catalog import IDENTITY_INDEX_SQL, PRIMARY_KEY_SQL, Connection
from pgwal_pipeline.postgres.dsn import translate
from pgwal_pipeline.values.globs import matcher
from pgwal_pipeline.values.relation import TableName, quote_ident

_FIRST_USER_OID = 16384


@dataclass(frozen=True, slots=True)
class Candidate:
    """A user table that the globs match.

    `reason` says why our publication must leave the table out, and what to do; None if it may be in. `owned`: whether the connection's role
    has the rights of the `owner`, without which it cannot add the table to a publication. `identities` are the columns that an old row has
    in the WAL, None for all: the table's, or those of each of its partitions.
    """

    table: TableName
    oid: int
    reason: str | None
    owner: str
    owned: bool
    identities: tuple[frozenset[str] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class _Row:
    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    identity: str
    owner: str
    owned: bool
    parent: int | None
    primary_key: list[str] | None
    identity_index: list[str] | None
    deferrable_key: bool
    stored: list[str] | None
    virtual: list[str] | None
    may_enter: bool
    unreadable: list[str] | None

    @property
    def table(self) -> TableName:
        return TableName(self.schema, self.name)

    @property
    def carried(self) -> frozenset[str] | None:
        """The columns of an old row that the WAL carries (the replica identity); None for all."""
        if self.identity == "f":
            return None
        return frozenset({"d": self.primary_key, "i": self.identity_index}.get(self.identity) or ())


# Tables of extensions are left out. Privileges on single columns are checked only if the role may not read the whole table.
_TABLES_SQL = f"""
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, c.relreplident::text,
    pg_catalog.pg_get_userbyid(c.relowner)::text, pg_catalog.pg_has_role(c.relowner, 'USAGE'),
    CASE WHEN c.relispartition THEN (SELECT i.inhparent FROM pg_catalog.pg_inherits i WHERE i.inhrelid = c.oid) END,
    {PRIMARY_KEY_SQL}, {IDENTITY_INDEX_SQL},
    EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND NOT i.indimmediate),
    g.stored, g.virtual,
    pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
    CASE WHEN NOT pg_catalog.has_table_privilege(c.oid, 'SELECT') THEN
        (SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
             AND NOT pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT'))
    END
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attgenerated = 's') AS stored,
        pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) FILTER (WHERE a.attgenerated = 'v') AS virtual
    FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> ''
) g
WHERE c.relkind IN ('r', 'p', 'f') AND c.relpersistence <> 't' AND c.oid >= {_FIRST_USER_OID}
    AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
    AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_depend d
        WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.objsubid = 0 AND d.deptype = 'e')
ORDER BY n.nspname, c.relname
"""


def candidate_tables(conn: Connection, globs: str) -> list[Candidate]:
    """Return every user table that `globs` match, sorted by name, in one query.

    `globs` is as in PGWAL_TABLES: comma-separated `schema.table` with `*`, `?` and `[…]`, matched with the names as the catalog has them; a
    part in double quotes is taken literally. A partitioned table stands for its partitions; a partition is listed only if the globs match
    none of its parents. Temporary tables and those of system schemas or extensions are never listed. Raises the error that `dsn.translate`
    returns for a server error.
    """
    try:
        rows = [_Row(*row) for row in conn.execute(_TABLES_SQL.encode()).fetchall()]
        role = conn.execute("SELECT current_user::text").fetchall()[0][0]
    except psycopg2.Error as error:
        raise translate(error, "reading the catalog") from error
    matches = matcher(globs)
    by_oid = {row.oid: row for row in rows}
    children: dict[int, list[_Row]] = {}
    for row in rows:
        if row.parent is not None:
            children.setdefault(row.parent, []).append(row)
    matching = {row.oid for row in rows if matches(row.table)}
    found = []
    for row in rows:
        if row.oid in matching and not any(parent in matching for parent in _parents(row, by_oid)):
            leaves = _leaves(row, children)
            reason = _reason(row, leaves, role, conn.info.server_version)
            identities = tuple({each.carried for each in (row, *leaves)})
            found.append(Candidate(row.table, row.oid, reason, row.owner, row.owned, identities))
    return found


def _parents(row: _Row, by_oid: dict[int, _Row]) -> Iterable[int]:
    while row.parent is not None:
        yield row.parent
        if row.parent not in by_oid:
            return
        row = by_oid[row.parent]


def _leaves(row: _Row, children: dict[int, list[_Row]]) -> list[_Row]:
    below: list[_Row] = []
    for child in children.get(row.oid, ()):
        below += _leaves(child, children) if child.kind == "p" else [child]
    return below


def _reason(row: _Row, leaves: list[_Row], role: str, server_version: int) -> str | None:
    """Return the first reason why our publication must not hold this table; None if there is none."""
    reason = _own_reason(row, server_version) or _read_reason(row, role)
    if reason is not None:
        return reason
    for leaf in leaves:
        reason = _own_reason(leaf, server_version) or _leaf_reason(row, leaf)
        if reason is not None:
            return f"partition {leaf.table}: {reason}"
    if row.kind == "p" and not row.primary_key:
        return (
            "partitioned without a primary key: a partition made later would have no usable replica identity, so that its UPDATE and "
            f"DELETE would fail; run ALTER TABLE {row.table} ADD PRIMARY KEY (…)"
        )
    return None


def _own_reason(row: _Row, server_version: int) -> str | None:
    """Return what is wrong with the table itself: the WAL lacks its rows, or publishing it would make its UPDATE and DELETE fail."""
    table = row.table
    if row.kind == "f":
        return "a foreign table, whose rows are not in this server's WAL"
    if row.persistence == "u":
        return f"unlogged, so its changes are not in the WAL; run ALTER TABLE {table} SET LOGGED"
    if row.carried is not None and not row.carried:
        found = {
            "d": "the primary key is deferrable" if row.deferrable_key else "no primary key",
            "i": "the index of the replica identity is gone",
            "n": "the replica identity is NOTHING",
        }[row.identity]
        remedies = [f"ALTER TABLE {table} REPLICA IDENTITY FULL"]
        if row.primary_key:
            remedies = [f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT"]
        elif not row.deferrable_key:
            remedies.insert(0, f"ALTER TABLE {table} ADD PRIMARY KEY (…)")
        return f"no usable replica identity ({found}): once published, its UPDATE and DELETE would fail; run {' or '.join(remedies)}"
    if row.identity == "f" and row.virtual:
        return (
            f"replica identity FULL with a virtual generated column ({quote_ident(row.virtual[0])}): once published, its UPDATE and DELETE "
            f"would fail; run ALTER TABLE {table} REPLICA IDENTITY DEFAULT, which needs a primary key"
        )
    generated = sorted((row.carried or frozenset()) & set(row.stored or ()))
    if generated and server_version < 180000:
        return (
            f"no usable replica identity (column {quote_ident(generated[0])} of its key is generated, and servers before 18 do not publish "
            f"it); run ALTER TABLE {table} REPLICA IDENTITY FULL"
        )
    return None


def _read_reason(row: _Row, role: str) -> str | None:
    if not row.may_enter:
        return f"role {role} may not use its schema; run GRANT USAGE ON SCHEMA {quote_ident(row.schema)} TO {quote_ident(role)}"
    if row.unreadable:
        which = ", ".join(quote_ident(column) for column in row.unreadable[:3]) + (", …" if len(row.unreadable) > 3 else "")
        return f"role {role} may not read column {which}; run GRANT SELECT ON {row.table} TO {quote_ident(role)}"
    return None


def _leaf_reason(root: _Row, leaf: _Row) -> str | None:
    """Return a reason if the partition's replica identity lacks columns of the root's.

    Old rows are written with the partition's replica identity and read with the root's.
    """
    if leaf.carried is None or (root.carried is not None and root.carried <= leaf.carried):
        return None
    return (
        "its replica identity lacks columns of the whole table's, by which old rows are identified; "
        f"run ALTER TABLE {leaf.table} REPLICA IDENTITY FULL"
    )

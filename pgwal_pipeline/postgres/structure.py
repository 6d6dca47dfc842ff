"""Read the structure of a database from its catalog, as statements that make it anew elsewhere, without any row.

The copy is for trying statements that alter tables. It has what these depend on: schemas, roles, types, sequences, functions, tables with
their partitions, keys, constraints and indexes, views. Nothing is locked and no row is read at the source.

Each statement stands for itself. What the other server refuses, such as a default that calls a function it lacks, is left out by whoever
runs them; only a table that cannot be made is missed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pgwal_pipeline.postgres.catalog import Connection, fetch
from pgwal_pipeline.values.relation import TableName, quote_ident

_USERS = "n.nspname <> 'information_schema' AND NOT pg_catalog.starts_with(n.nspname::text, 'pg_')"
_OF_EXTENSION = """SELECT FROM pg_catalog.pg_depend x WHERE x.deptype = 'e' AND x.classid = '{catalog}'::pg_catalog.regclass
    AND x.objid = {oid}"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its type as `format_type` has it with every schema, and the SQL of what else there is to it."""

    name: str
    type: str
    collation: str | None
    default: str | None
    generated: str
    identity: str
    not_null: bool
    local: bool

    def definition(self, known: "frozenset[str] | None" = None) -> str:
        """Return the column as CREATE TABLE has it; a type that is not in `known` (None: any) is text there."""
        kind = self.type if known is None or self.type in known else "text"
        parts = [quote_ident(self.name), kind]
        if self.collation is not None and kind == self.type:
            parts.append(f"COLLATE {self.collation}")
        if self.generated:
            kept = "STORED" if self.generated == "s" else "VIRTUAL"
            parts.append(f"GENERATED ALWAYS AS ({self.default}) {kept}")
        elif self.identity:
            parts.append(f"GENERATED {'ALWAYS' if self.identity == 'a' else 'BY DEFAULT'} AS IDENTITY")
        if self.not_null:
            parts.append("NOT NULL")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Table:
    """A table. `parents` are the quoted names of those that it inherits from; `bound` is that of a partition, `partitioned_by` its key."""

    oid: int
    name: TableName
    columns: tuple[Column, ...]
    unlogged: bool
    parents: tuple[str, ...]
    bound: str | None
    partitioned_by: str | None

    def create(self, known: "frozenset[str] | None" = None) -> str:
        """Return the statement that makes the table without defaults; see `Column.definition`."""
        made = f"CREATE {'UNLOGGED ' if self.unlogged else ''}TABLE {self.name}"
        if self.bound is not None:
            made += f" PARTITION OF {self.parents[0]} {self.bound}"
        else:
            made += f" ({', '.join(column.definition(known) for column in self.columns if column.local)})"
            if self.parents:
                made += f" INHERITS ({', '.join(self.parents)})"
        return made + (f" PARTITION BY {self.partitioned_by}" if self.partitioned_by else "")

    def defaults(self) -> Iterator[str]:
        """Yield the statements that give columns their defaults."""
        for column in self.columns:
            if column.default is not None and not column.generated:
                yield f"ALTER TABLE ONLY {self.name} ALTER {quote_ident(column.name)} SET DEFAULT {column.default}"

    def without_generated(self) -> "Table":
        """Return the table with plain columns instead of generated ones, for a server that refuses their expressions."""
        return replace(self, columns=tuple(replace(column, generated="", default=None) for column in self.columns))


@dataclass(frozen=True, slots=True)
class Structure:
    """A database's structure: `before` are statements for what tables need, `after` those for what needs tables, in an order that works.

    `extensions` are names with their schemas. `search_path` is that of the source's role in its database.
    """

    extensions: Mapping[str, str]
    before: tuple[str, ...]
    tables: tuple[Table, ...]
    after: tuple[str, ...]
    search_path: str


def structure(conn: Connection) -> Structure:
    """Return the structure of the database that `conn` is connected to. Raises the error that `dsn.translate` returns."""
    with conn.transaction():
        # That of the role and the database; this session has its own.
        path = fetch(conn, "SELECT reset_val FROM pg_catalog.pg_settings WHERE name = 'search_path'")[0][0]
        # So that the server writes the schema of everything but its own.
        fetch(conn, "SELECT pg_catalog.set_config('search_path', '', true)")
        extensions = dict(
            fetch(
                conn,
                """SELECT e.extname::text, n.nspname::text FROM pg_catalog.pg_extension e
                   JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace WHERE e.extname <> 'plpgsql' ORDER BY e.oid""",
            )
        )
        before = tuple(text for query in _BEFORE for (text,) in fetch(conn, query))
        tables = _tables(conn)
        after = tuple(text for query in _AFTER for (text,) in fetch(conn, query))
    return Structure(extensions, before, tables, after, path)


_NOT_OF_EXTENSION = {
    name: f"NOT EXISTS ({_OF_EXTENSION.format(catalog=f'pg_catalog.{name}', oid='o.oid')})"
    for name in ("pg_type", "pg_class", "pg_proc", "pg_namespace")
}
_BEFORE = (
    # They may do all there, as each of them may do something here.
    """SELECT pg_catalog.format('CREATE ROLE %I SUPERUSER', rolname) FROM pg_catalog.pg_roles
       WHERE NOT pg_catalog.starts_with(rolname::text, 'pg_')""",
    f"SELECT pg_catalog.format('CREATE SCHEMA IF NOT EXISTS %I', n.nspname) FROM pg_catalog.pg_namespace n WHERE {_USERS}",
    f"""SELECT pg_catalog.format('CREATE TYPE %I.%I AS ENUM (%s)', n.nspname, o.typname,
            (SELECT pg_catalog.string_agg(pg_catalog.quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder)
             FROM pg_catalog.pg_enum e WHERE e.enumtypid = o.oid))
        FROM pg_catalog.pg_type o JOIN pg_catalog.pg_namespace n ON n.oid = o.typnamespace
        WHERE o.typtype = 'e' AND {_USERS} AND {_NOT_OF_EXTENSION["pg_type"]}""",
    # Domains and composite types may need one another; they are in the order in which they were made.
    f"""SELECT text FROM (
            SELECT o.oid, pg_catalog.format('CREATE DOMAIN %I.%I AS %s%s%s%s', n.nspname, o.typname,
                pg_catalog.format_type(o.typbasetype, o.typtypmod), coalesce(' DEFAULT ' || o.typdefault, ''),
                CASE WHEN o.typnotnull THEN ' NOT NULL' ELSE '' END,
                (SELECT coalesce(pg_catalog.string_agg(' CONSTRAINT ' || pg_catalog.quote_ident(k.conname) || ' '
                    || pg_catalog.pg_get_constraintdef(k.oid), ''), '')
                 FROM pg_catalog.pg_constraint k WHERE k.contypid = o.oid AND k.contype = 'c')) AS text
            FROM pg_catalog.pg_type o JOIN pg_catalog.pg_namespace n ON n.oid = o.typnamespace
            WHERE o.typtype = 'd' AND {_USERS} AND {_NOT_OF_EXTENSION["pg_type"]}
            UNION ALL
            SELECT o.oid, pg_catalog.format('CREATE TYPE %I.%I AS (%s)', n.nspname, o.typname,
                (SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname) || ' ' || pg_catalog.format_type(a.atttypid, a.atttypmod),
                    ', ' ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
                 WHERE a.attrelid = o.typrelid AND a.attnum > 0 AND NOT a.attisdropped))
            FROM pg_catalog.pg_type o JOIN pg_catalog.pg_namespace n ON n.oid = o.typnamespace
            JOIN pg_catalog.pg_class c ON c.oid = o.typrelid AND c.relkind = 'c'
            WHERE {_USERS} AND {_NOT_OF_EXTENSION["pg_type"]}
            UNION ALL
            SELECT o.oid, pg_catalog.format('CREATE TYPE %I.%I AS RANGE (SUBTYPE = %s)', n.nspname, o.typname,
                pg_catalog.format_type(r.rngsubtype, NULL))
            FROM pg_catalog.pg_range r JOIN pg_catalog.pg_type o ON o.oid = r.rngtypid
            JOIN pg_catalog.pg_namespace n ON n.oid = o.typnamespace WHERE {_USERS} AND {_NOT_OF_EXTENSION["pg_type"]}
        ) made ORDER BY oid""",
    f"""SELECT pg_catalog.format('CREATE SEQUENCE %I.%I', n.nspname, o.relname)
        FROM pg_catalog.pg_class o JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace
        WHERE o.relkind = 'S' AND {_USERS} AND {_NOT_OF_EXTENSION["pg_class"]} AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_depend d WHERE d.objid = o.oid AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                AND d.deptype = 'i')""",
    f"""SELECT pg_catalog.pg_get_functiondef(o.oid)
        FROM pg_catalog.pg_proc o JOIN pg_catalog.pg_namespace n ON n.oid = o.pronamespace
        JOIN pg_catalog.pg_language l ON l.oid = o.prolang AND l.lanname IN ('sql', 'plpgsql')
        WHERE o.prokind IN ('f', 'p') AND {_USERS} AND {_NOT_OF_EXTENSION["pg_proc"]} ORDER BY o.oid""",
)
_AFTER = (
    # A constraint of a partitioned table makes those of its partitions. Foreign keys come last.
    f"""SELECT pg_catalog.format('ALTER TABLE %s%I.%I ADD CONSTRAINT %I %s', CASE WHEN o.relkind = 'p' THEN '' ELSE 'ONLY ' END,
            n.nspname, o.relname, k.conname, pg_catalog.pg_get_constraintdef(k.oid))
        FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class o ON o.oid = k.conrelid
        JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace
        WHERE k.contype IN ('p', 'u', 'x', 'c', 'f') AND k.conparentid = 0 AND k.conislocal AND {_USERS}
            AND {_NOT_OF_EXTENSION["pg_class"]}
        ORDER BY k.contype = 'f', k.contype <> 'p', o.relkind <> 'p', k.oid""",
    f"""SELECT pg_catalog.pg_get_indexdef(i.indexrelid)
        FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class o ON o.oid = i.indrelid
        JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace
        WHERE i.indisvalid AND o.relkind IN ('r', 'p') AND {_USERS} AND {_NOT_OF_EXTENSION["pg_class"]}
            AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.conindid = i.indexrelid AND k.contype IN ('p', 'u', 'x'))
            AND NOT EXISTS (SELECT FROM pg_catalog.pg_inherits h WHERE h.inhrelid = i.indexrelid)
        ORDER BY o.relkind <> 'p', i.indexrelid""",
    f"""SELECT pg_catalog.format('ALTER TABLE %I.%I REPLICA IDENTITY %s', n.nspname, o.relname, CASE o.relreplident
            WHEN 'f' THEN 'FULL' WHEN 'n' THEN 'NOTHING' ELSE (
                SELECT 'USING INDEX ' || pg_catalog.quote_ident(c.relname) FROM pg_catalog.pg_index i
                JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = o.oid AND i.indisreplident) END)
        FROM pg_catalog.pg_class o JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace
        WHERE o.relkind IN ('r', 'p') AND o.relreplident IN ('f', 'n', 'i') AND {_USERS} AND {_NOT_OF_EXTENSION["pg_class"]}""",
    f"""SELECT pg_catalog.format('CREATE %sVIEW %I.%I AS %s', CASE WHEN o.relkind = 'm' THEN 'MATERIALIZED ' ELSE '' END, n.nspname,
            o.relname, pg_catalog.pg_get_viewdef(o.oid))
        FROM pg_catalog.pg_class o JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace
        WHERE o.relkind IN ('v', 'm') AND {_USERS} AND {_NOT_OF_EXTENSION["pg_class"]} ORDER BY o.oid""",
)


def _tables(conn: Connection) -> tuple[Table, ...]:
    """The tables, partitioned ones and parents before those that are made of them."""
    rows = fetch(
        conn,
        f"""WITH RECURSIVE depth (oid, level) AS (
                SELECT c.oid, 0 FROM pg_catalog.pg_class c WHERE c.relkind IN ('r', 'p')
                UNION ALL SELECT i.inhrelid, d.level + 1 FROM depth d JOIN pg_catalog.pg_inherits i ON i.inhparent = d.oid
                JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relkind IN ('r', 'p'))
            SELECT o.oid::int8, n.nspname::text, o.relname::text, o.relpersistence = 'u',
                ARRAY(SELECT pg_catalog.format('%I.%I', pn.nspname, p.relname) FROM pg_catalog.pg_inherits i
                    JOIN pg_catalog.pg_class p ON p.oid = i.inhparent JOIN pg_catalog.pg_namespace pn ON pn.oid = p.relnamespace
                    WHERE i.inhrelid = o.oid ORDER BY i.inhseqno),
                CASE WHEN o.relispartition THEN pg_catalog.pg_get_expr(o.relpartbound, o.oid) END,
                CASE WHEN o.relkind = 'p' THEN pg_catalog.pg_get_partkeydef(o.oid) END,
                (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
                    (SELECT pg_catalog.format('%I.%I', ln.nspname, l.collname) FROM pg_catalog.pg_collation l
                     JOIN pg_catalog.pg_namespace ln ON ln.oid = l.collnamespace JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
                     WHERE l.oid = a.attcollation AND a.attcollation <> t.typcollation),
                    (SELECT pg_catalog.pg_get_expr(d.adbin, d.adrelid) FROM pg_catalog.pg_attrdef d
                     WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum),
                    a.attgenerated, a.attidentity, a.attnotnull, a.attislocal OR o.relispartition) ORDER BY a.attnum)
                 FROM pg_catalog.pg_attribute a WHERE a.attrelid = o.oid AND a.attnum > 0 AND NOT a.attisdropped)
            FROM pg_catalog.pg_class o JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace
            JOIN (SELECT oid, max(level) AS level FROM depth GROUP BY oid) d ON d.oid = o.oid
            WHERE o.relkind IN ('r', 'p') AND o.relpersistence <> 't' AND {_USERS} AND {_NOT_OF_EXTENSION["pg_class"]}
            ORDER BY d.level, o.oid""",
    )
    return tuple(
        Table(oid, TableName(schema, name), tuple(Column(*column) for column in columns or ()), unlogged, tuple(parents), bound, key)
        for oid, schema, name, unlogged, parents, bound, key, columns in rows
    )

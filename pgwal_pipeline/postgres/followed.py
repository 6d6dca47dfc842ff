"""Find which tables are followed, or will be once the pipeline has run, also before there is a publication."""

from collections.abc import Collection

import psycopg2

from pgwal_pipeline.postgres.candidates import candidate_tables
from pgwal_pipeline.postgres.catalog import PRIMARY_KEY_SQL, Connection, fetch, resolve_types, tables_of
from pgwal_pipeline.postgres.dsn import translate
from pgwal_pipeline.postgres.publication import COMMENT
from pgwal_pipeline.values.relation import Column, Relation, TableName

_LONGEST_COMMENT = 1000  # characters


def comments(conn: Connection, oids: Collection[int]) -> dict[int, dict[str | None, str]]:
    """Return the COMMENTs on tables, by their oids, and on their columns: by the column's name, the table's own under None.

    One that is longer than 1000 characters is cut. Raises the error that `dsn.translate` returns for a server error.
    """
    rows = fetch(
        conn,
        """SELECT d.objoid::int8, a.attname::text, pg_catalog."left"(d.description, %s)
           FROM pg_catalog.pg_description d
           LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid AND d.objsubid > 0 AND NOT a.attisdropped
           WHERE d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objoid = ANY (%s::oid[])
               AND (d.objsubid = 0 OR a.attname IS NOT NULL)""",
        _LONGEST_COMMENT + 1,
        list(oids),
    )
    found: dict[int, dict[str | None, str]] = {}
    for oid, column, text in rows:
        cut = text if len(text) <= _LONGEST_COMMENT else text[: _LONGEST_COMMENT - 1] + "…"
        found.setdefault(oid, {})[column] = cut
    return found


def followed_tables(conn: Connection, publication: str, globs: str) -> list[Relation]:
    """Return the publication's tables, sorted by name; if it is ours or does not exist yet, also those that would be added to it.

    Changes and locks nothing. Raises the error that `dsn.translate` returns for a server error.
    """
    try:
        rows = conn.execute(
            "SELECT pg_catalog.obj_description(oid, 'pg_publication') = %s FROM pg_catalog.pg_publication WHERE pubname = %s",
            [COMMENT, publication],
        ).fetchall()
    except psycopg2.Error as error:
        raise translate(error, "reading the catalog") from error
    published = tables_of(conn, publication) if rows else []
    if rows and not rows[0][0]:
        return published
    held = {relation.table for relation in published}
    joining = [
        candidate.oid
        for candidate in candidate_tables(conn, globs)
        if candidate.reason is None and candidate.owned and candidate.table not in held
    ]
    return sorted([*published, *_relations(conn, joining)], key=lambda relation: relation.table)


def _relations(conn: Connection, oids: list[int]) -> list[Relation]:
    if not oids:
        return []
    generated = "a.attgenerated IN ('', 's')" if conn.info.server_version >= 180000 else "a.attgenerated = ''"
    try:
        rows = conn.execute(
            f"""SELECT c.oid, n.nspname::text, c.relname::text, c.relreplident::text, {PRIMARY_KEY_SQL},
                    pg_catalog.array_agg(a.attname::text ORDER BY a.attnum), pg_catalog.array_agg(a.atttypid::int8 ORDER BY a.attnum),
                    pg_catalog.array_agg(a.atttypmod ORDER BY a.attnum), pg_catalog.array_agg(NOT a.attnotnull ORDER BY a.attnum)
                FROM pg_catalog.pg_class c
                JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND {generated}
                WHERE c.oid = ANY (%s::oid[])
                GROUP BY c.oid, n.nspname, c.relname, c.relreplident""".encode(),
            [oids],
        ).fetchall()
    except psycopg2.Error as error:
        raise translate(error, "reading the catalog") from error
    types = resolve_types(conn, {pair for row in rows for pair in zip(row[6], row[7], strict=True)})
    return [
        Relation(
            oid,
            TableName(schema, name),
            identity,
            tuple(
                Column(column, types[type_oid, typmod], nullable=nullable)
                for column, type_oid, typmod, nullable in zip(names, oids_, typmods, nullables, strict=True)
            ),
            tuple(primary or ()),
        )
        for oid, schema, name, identity, primary, names, oids_, typmods, nullables in rows
    ]

"""What our publication sends of each table: the columns and rows that the table's options leave, where the server can be told.

A column list or a row filter must never make the source's own UPDATE and DELETE fail. Postgres refuses these for a table with a replica
identity that the list does not cover, and lets nothing but the columns of the identity stand in a filter. So a table without such an
identity has no list; its columns are then sent, and dropped where they arrive.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pgwal_pipeline.postgres.candidates import Candidate
from pgwal_pipeline.postgres.catalog import Connection
from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline.values.table_options import EXCLUDED, TableOptions

FIRST_WITH_LISTS = 150000
"""The first server version with column lists and row filters."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of the tables: their options, the row filters that the publication has now (by oid), and tables to leave out.

    The filters in force are known from the ledger, as the catalog has another text of them. `barred` has the reasons.
    """

    options: TableOptions = field(default_factory=TableOptions)
    in_force: Mapping[int, str] = field(default_factory=dict)
    barred: Mapping[TableName, str] = field(default_factory=dict)


EVERYTHING = Wanted()


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent of a table: its columns, None for all, and the condition of its rows, None for all."""

    columns: tuple[str, ...] | None = None
    rows: str | None = None

    @property
    def sql(self) -> str:
        """What follows the table's name in a statement about the publication."""
        listed = "" if self.columns is None else f" ({', '.join(map(quote_ident, self.columns))})"
        return listed + ("" if self.rows is None else f" WHERE ({self.rows}\n)")


Shapes = Mapping[TableName, Shape]
"""By the tables' names; a table that is not there is sent whole."""


def shapes(conn: Connection, candidates: Collection[Candidate], wanted: Wanted) -> Shapes:
    """Return what is to be sent of those of the tables that are not sent whole."""
    if conn.info.server_version < FIRST_WITH_LISTS or not wanted.options.rules:
        return {}
    columns = _columns(conn, [candidate.oid for candidate in candidates if wanted.options.of(candidate.table).exclude])
    found = {}
    for candidate in candidates:
        options = wanted.options.of(candidate.table)
        names = columns.get(candidate.oid, ())
        left = tuple(name for name in names if options.treatment(name) != EXCLUDED)
        covered = all(identity is not None and identity <= set(left) for identity in candidate.identities)
        shape = Shape(left if covered and len(left) < len(names) else None, options.rows)
        if shape != Shape():
            found[candidate.table] = shape
    return found


def reshaped(conn: Connection, publication_oid: int, held: Collection[Candidate], shaped: Shapes, wanted: Wanted) -> list[TableName]:
    """Return those of the tables that the publication holds of which it sends something else than it should."""
    if conn.info.server_version < FIRST_WITH_LISTS:
        return []
    rows = conn.execute(
        """SELECT r.prrelid, r.prqual IS NOT NULL,
               (SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs::int2[]))
           FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = %s AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)""",
        [publication_oid],
    ).fetchall()
    now = {
        oid: Shape(None if columns is None else tuple(columns), wanted.in_force.get(oid, "") if filtered else None)
        for oid, filtered, columns in rows
    }
    return [candidate.table for candidate in held if now.get(candidate.oid, Shape()) != shaped.get(candidate.table, Shape())]


def _columns(conn: Connection, oids: list[int]) -> dict[int, list[str]]:
    """Return the names of the columns that may be in a column list, in their order, by the tables' oids."""
    if not oids:
        return {}
    generated = "a.attgenerated IN ('', 's')" if conn.info.server_version >= 180000 else "a.attgenerated = ''"
    rows = conn.execute(
        f"""SELECT a.attrelid, pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = ANY (%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND {generated} GROUP BY 1""".encode(),
        [oids],
    ).fetchall()
    return dict(rows)

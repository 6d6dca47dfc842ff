"""What a table's stored rows depend on but the stream does not tell: the numbers of its columns, its files, its place in the publication.

A Relation message has names and types alone. A column that was dropped and made again, a default that old rows carry without being written,
a rewrite, a partition that came with rows in it: all of them show here, and only here.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pgwal_pipeline.postgres.catalog import Connection, fetch


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column as it is stored. `number` is its attnum, never used twice; `type_oid` its declared type.

    `default_of_old`: rows written before the column was added have a value that is kept in the catalog (`atthasmissing`).
    """

    number: int
    name: str
    type_oid: int
    default_of_old: bool


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A table or leaf partition with rows of its own: its relfilenode, and the transaction (32 bits) that last wrote its pg_class row.

    `attached` are the transactions that attached it, or a partition that it is part of: those that were made before they became partitions,
    or may have been, so that they may have brought rows with them. `altered`: a column of the table was altered by the transaction that
    last wrote the pg_class row, or by a later one.
    """

    oid: int
    node: int
    xid: int
    attached: tuple[int, ...] = ()
    altered: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """How a table is stored and published.

    `membership` are the ids of what puts the table into the publication, and the transaction that last altered the publication: where they
    differ, changes may have gone by unpublished. `shown` are the columns that the table had, in their order, where the stream has been read
    up to; none while that is not known.
    """

    columns: tuple[StoredColumn, ...]
    files: tuple[StoredFile, ...]
    membership: tuple[int, ...]
    shown: tuple[str, ...] = ()

    def to_json(self) -> str:
        """As compact JSON."""
        columns = [[column.number, column.name, column.type_oid, column.default_of_old] for column in self.columns]
        files = [[file.oid, file.node, file.xid, file.attached, file.altered] for file in self.files]
        return json.dumps([columns, files, self.membership, self.shown], ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Storage":
        """What `to_json` wrote."""
        columns, files, membership, *more = json.loads(text)
        shown = more[0] if more else ()
        return cls(tuple(StoredColumn(*column) for column in columns), tuple(map(_file, files)), tuple(membership), tuple(shown))


def _file(found: Sequence[Any]) -> StoredFile:
    oid, node, xid, attached, *altered = found
    return StoredFile(oid, node, xid, tuple(attached) if isinstance(attached, list) else (), *altered)


def storages(conn: Connection, publication: str, oids: Collection[int]) -> dict[int, Storage]:
    """How the published tables `oids` are stored, by oid, in one query; one that is gone is missing.

    A partition made by CREATE TABLE … PARTITION OF has its rows from the stream alone. ATTACH PARTITION writes the catalog row of each
    column anew (it is no longer local), so that none is as old as those of the system columns, which nothing ever changes. SET SCHEMA
    writes the dependency on the schema anew, and nothing else does.
    """
    namespaces = (
        """UNION ALL SELECT pg_catalog.unnest(ARRAY[pn.oid::int8, d.xmin::text::int8]) FROM pg_catalog.pg_publication_namespace pn
           JOIN pg_catalog.pg_class k ON k.relnamespace = pn.pnnspid
           LEFT JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = k.oid AND d.objsubid = 0
               AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
           WHERE pn.pnpubid = p.oid AND k.oid IN (SELECT relid FROM above)"""
        if conn.info.server_version >= 150000
        else ""
    )
    rows = fetch(
        conn,
        f"""SELECT c.oid::int8,
               (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(a.attnum, a.attname, a.atttypid::int8, a.atthasmissing OR EXISTS (
                    SELECT FROM pg_catalog.pg_partition_tree(c.oid) leaf JOIN pg_catalog.pg_attribute la ON la.attrelid = leaf.relid
                    WHERE c.relkind = 'p' AND la.attname = a.attname AND la.atthasmissing)) ORDER BY a.attnum)
                FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
               (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(
                    f.oid::int8, pg_catalog.pg_relation_filenode(f.oid)::int8, f.xmin::text::int8,
                    (SELECT coalesce(pg_catalog.json_agg(
                        (SELECT i.xmin::text::int8 FROM pg_catalog.pg_inherits i WHERE i.inhrelid = part.relid)
                     ) FILTER (WHERE NOT EXISTS (
                        SELECT FROM pg_catalog.pg_attribute s JOIN pg_catalog.pg_attribute a ON a.attrelid = s.attrelid
                        WHERE s.attrelid = part.relid AND s.attname = 'ctid' AND a.attnum > 0 AND a.xmin = s.xmin AND a.cmin = s.cmin)
                     ), '[]')
                     FROM pg_catalog.pg_partition_ancestors(f.oid) part
                     WHERE part.relid NOT IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(c.oid))),
                    EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                        AND pg_catalog.age(a.xmin) <= pg_catalog.age(f.xmin))
                    ) ORDER BY f.oid)
                FROM pg_catalog.pg_class f
                WHERE f.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree(c.oid) WHERE isleaf)
                    OR (c.relkind <> 'p' AND f.oid = c.oid)),
               (WITH above AS (SELECT relid::oid FROM pg_catalog.pg_partition_ancestors(c.oid) UNION SELECT c.oid)
                SELECT pg_catalog.json_agg(id ORDER BY id) FROM (
                    SELECT pr.oid::int8 AS id FROM pg_catalog.pg_publication_rel pr
                    WHERE pr.prpubid = p.oid AND pr.prrelid IN (SELECT relid FROM above)
                    {namespaces}) ids),
               p.oid::int8, p.xmin::text::int8
            FROM pg_catalog.pg_class c, pg_catalog.pg_publication p
            WHERE c.oid = ANY (%s::oid[]) AND p.pubname = %s""",
        list(oids),
        publication,
    )
    return {
        oid: Storage(
            columns=tuple(StoredColumn(*column) for column in columns or ()),
            files=tuple(map(_file, files or ())),
            membership=(publication_oid, publication_xid, *(ids or ())),
        )
        for oid, columns, files, ids, publication_oid, publication_xid in rows
    }

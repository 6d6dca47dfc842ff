"""What a table's stored rows depend on but the stream does not tell: the numbers of its columns, its files, its place in the publication.

A Relation message has names and types alone. A column that was dropped and made again, a default that old rows carry without being written,
a rewrite, a partition that came with rows in it: all of them show here, and only here.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass

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

    `attached`: it was made before it became a partition, or may have been, so that it may have brought rows with it.
    """

    oid: int
    node: int
    xid: int
    attached: bool


@dataclass(frozen=True, slots=True)
class Storage:
    """How a table is stored and published.

    `membership` are the ids of what puts the table into the publication, and the transaction that last altered the publication: where they
    differ, changes may have gone by unpublished.
    """

    columns: tuple[StoredColumn, ...]
    files: tuple[StoredFile, ...]
    membership: tuple[int, ...]

    def to_json(self) -> str:
        """As compact JSON."""
        columns = [[column.number, column.name, column.type_oid, column.default_of_old] for column in self.columns]
        files = [[file.oid, file.node, file.xid, file.attached] for file in self.files]
        return json.dumps([columns, files, self.membership], ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Storage":
        """What `to_json` wrote."""
        columns, files, membership = json.loads(text)
        return cls(tuple(StoredColumn(*column) for column in columns), tuple(StoredFile(*file) for file in files), tuple(membership))


def storages(conn: Connection, publication: str, oids: Collection[int]) -> dict[int, Storage]:
    """How the published tables `oids` are stored, by oid, in one query; one that is gone is missing.

    A partition made by CREATE TABLE … PARTITION OF has its rows from the stream alone. ATTACH PARTITION writes the catalog row of each
    column anew (it is no longer local), so that none is as old as those of the system columns, which nothing ever changes.
    """
    namespaces = (
        """UNION ALL SELECT pn.oid::int8 FROM pg_catalog.pg_publication_namespace pn
           JOIN pg_catalog.pg_class k ON k.relnamespace = pn.pnnspid WHERE pn.pnpubid = p.oid AND k.oid IN (SELECT relid FROM above)"""
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
                    f.oid <> c.oid AND NOT EXISTS (
                        SELECT FROM pg_catalog.pg_attribute s JOIN pg_catalog.pg_attribute a ON a.attrelid = s.attrelid
                        WHERE s.attrelid = f.oid AND s.attname = 'ctid' AND a.attnum > 0 AND a.xmin = s.xmin AND a.cmin = s.cmin)
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
            files=tuple(StoredFile(*file) for file in files or ()),
            membership=(publication_oid, publication_xid, *(ids or ())),
        )
        for oid, columns, files, ids, publication_oid, publication_xid in rows
    }

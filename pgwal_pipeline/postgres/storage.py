"""Read from the catalog how the published tables are stored."""

from collections.abc import Collection

from pgwal_pipeline.postgres.catalog import Connection, fetch
from pgwal_pipeline.values.storage import Storage, StoredColumn, stored_file


def storages(conn: Connection, publication: str, oids: Collection[int]) -> dict[int, Storage]:
    """Return how the published tables `oids` are stored, by oid, in one query; a table that is gone is left out.

    A partition made by CREATE TABLE … PARTITION OF gets all its rows through the stream; an attached one may already have rows. ATTACH
    PARTITION rewrites the catalog row of each column (it is no longer local), so that none has the age of the system columns' rows, which
    never change. Only SET SCHEMA rewrites the dependency on the schema. No table is opened:
    `pg_partition_tree` would wait for a locked one.
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
        f"""WITH RECURSIVE below (root, relid) AS (
                SELECT c.oid, c.oid FROM pg_catalog.pg_class c WHERE c.oid = ANY (%s::oid[]) AND c.relkind = 'p'
                UNION ALL SELECT b.root, i.inhrelid FROM below b JOIN pg_catalog.pg_class k ON k.oid = b.relid AND k.relkind = 'p'
                JOIN pg_catalog.pg_inherits i ON i.inhparent = k.oid)
            SELECT c.oid::int8,
               (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(a.attnum, a.attname, a.atttypid::int8, a.atthasmissing OR EXISTS (
                    SELECT FROM below leaf JOIN pg_catalog.pg_attribute la ON la.attrelid = leaf.relid
                    WHERE leaf.root = c.oid AND la.attname = a.attname AND la.atthasmissing)) ORDER BY a.attnum)
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
                WHERE f.relkind <> 'p' AND f.oid IN (SELECT relid FROM below WHERE root = c.oid) OR c.relkind <> 'p' AND f.oid = c.oid),
               (WITH above AS (SELECT relid::oid FROM pg_catalog.pg_partition_ancestors(c.oid) UNION SELECT c.oid)
                SELECT pg_catalog.json_agg(id ORDER BY id) FROM (
                    SELECT pr.oid::int8 AS id FROM pg_catalog.pg_publication_rel pr
                    WHERE pr.prpubid = p.oid AND pr.prrelid IN (SELECT relid FROM above)
                    {namespaces}) ids),
               p.oid::int8, p.xmin::text::int8
            FROM pg_catalog.pg_class c, pg_catalog.pg_publication p
            WHERE c.oid = ANY (%s::oid[]) AND p.pubname = %s""",
        list(oids),
        list(oids),
        publication,
    )
    return {
        oid: Storage(
            columns=tuple(StoredColumn(*column) for column in columns or ()),
            files=tuple(map(stored_file, files or ())),
            membership=(publication_oid, publication_xid, *(ids or ())),
        )
        for oid, columns, files, ids, publication_oid, publication_xid in rows
    }

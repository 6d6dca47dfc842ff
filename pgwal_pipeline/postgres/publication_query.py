"""The SQL for the tables of a publication, as `pg_publication_tables` has them, but without opening any of them.

From Postgres 15 on that view opens each table, and so waits for whoever has locked one of them (VACUUM FULL, a long ALTER TABLE): one table
would hold up the reading of all others. The rules are those of `pg_get_publication_tables` in Postgres's pg_publication.c.
"""

ROW_FILTER = "pg_catalog.pg_get_expr(p.qual, p.relid)"
"""The text of the filter in a row `p` of `published_sql`. It opens the table, if that has a filter."""


def published_sql(version: int) -> str:
    """Return the query for one publication, whose name is its one parameter. `version` is that of the server, such as 150004.

    A row is a table that the stream names: `relid`, `qual` (its row filter as Postgres stores it, or null), `attnums` (the column list, or
    null) and `generated`, whether stored generated columns are published without being listed. `ROW_FILTER` is the filter's text.
    """
    listed = version >= 150000  # column lists, row filters and schemas
    generated = "p.pubgencols = 's'" if version >= 180000 else "false"
    schemas = (
        """UNION SELECT c.oid, true FROM pub p JOIN pg_catalog.pg_publication_namespace pn ON pn.pnpubid = p.oid
           JOIN pg_catalog.pg_class c ON c.relnamespace = pn.pnnspid
           WHERE NOT p.puballtables AND pg_catalog.pg_relation_is_publishable(c.oid)"""
        if listed
        else ""
    )
    return f"""
        WITH RECURSIVE pub AS (SELECT p.*, {generated} AS generated FROM pg_catalog.pg_publication p WHERE p.pubname = %s),
        named (relid, whole) AS (
            SELECT pr.prrelid, false FROM pub p JOIN pg_catalog.pg_publication_rel pr ON pr.prpubid = p.oid
            WHERE NOT p.puballtables
            {schemas}
            UNION SELECT c.oid, true FROM pub p JOIN pg_catalog.pg_class c ON c.relkind IN ('r', 'p')
            WHERE p.puballtables AND pg_catalog.pg_relation_is_publishable(c.oid)),
        below (relid) AS (
            SELECT n.relid FROM named n
            UNION SELECT i.inhrelid FROM below b JOIN pg_catalog.pg_class k ON k.oid = b.relid AND k.relkind = 'p'
            JOIN pg_catalog.pg_inherits i ON i.inhparent = k.oid),
        above (relid, parent) AS (
            SELECT c.oid, i.inhparent FROM pg_catalog.pg_class c JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid
            WHERE c.relispartition AND c.oid IN (SELECT relid FROM named)
            UNION SELECT a.relid, i.inhparent FROM above a JOIN pg_catalog.pg_class c ON c.oid = a.parent AND c.relispartition
            JOIN pg_catalog.pg_inherits i ON i.inhrelid = a.parent),
        chosen (relid) AS (
            SELECT b.relid FROM below b JOIN pg_catalog.pg_class c ON c.oid = b.relid, pub p WHERE NOT p.pubviaroot AND c.relkind <> 'p'
            UNION SELECT n.relid FROM named n JOIN pg_catalog.pg_class c ON c.oid = n.relid, pub p
            WHERE p.pubviaroot AND NOT (p.puballtables AND c.relispartition)
                AND NOT EXISTS (SELECT FROM above a JOIN named r ON r.relid = a.parent WHERE a.relid = n.relid))
        SELECT t.relid, {"pr.prqual" if listed else "NULL::pg_node_tree"} AS qual,
            {"pr.prattrs::int2[]" if listed else "NULL::int2[]"} AS attnums, p.generated
        FROM chosen t CROSS JOIN pub p
        LEFT JOIN pg_catalog.pg_publication_rel pr ON pr.prpubid = p.oid AND pr.prrelid = t.relid
            AND NOT EXISTS (SELECT FROM named n JOIN pg_catalog.pg_class c ON c.oid = n.relid
                            WHERE n.whole AND (n.relid = t.relid OR c.relnamespace = (
                                SELECT k.relnamespace FROM pg_catalog.pg_class k WHERE k.oid = t.relid)))"""

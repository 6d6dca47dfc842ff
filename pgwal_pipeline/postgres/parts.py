"""Read what is needed to compare a large table in parts: where the next part of its key ends, and how many rows there are."""

import psycopg2

from pgwal_pipeline.postgres.copy import enter_snapshot, next_bound
from pgwal_pipeline.postgres.dsn import connect, translate
from pgwal_pipeline.postgres.key_order import key_order
from pgwal_pipeline.postgres.table_locks import from_item
from pgwal_pipeline.values.relation import Relation


def has_order(dsn: str, relation: Relation) -> bool:
    """Return whether a table can be read by ranges of its key, whose bounds may be written down."""
    if not relation.key or relation.hides_key:
        return False
    with connect(dsn) as conn:
        return key_order(conn, relation) is not None


def part_end(dsn: str, relation: Relation, lower: tuple[str, ...] | None, rows: int) -> tuple[str, ...] | None:
    """Return the key `rows` rows after `lower`, or after the table's beginning; None if the rest is no more than that."""
    with connect(dsn) as conn:
        try:
            order, source = key_order(conn, relation), from_item(conn, relation)
            bound = None if order is None else next_bound(conn, source, order, lower, rows)
            if order is None or bound is None or next_bound(conn, source, order, bound, 1) is None:
                return None
            return bound
        except psycopg2.Error as error:
            raise translate(error, f"looking for a part of {relation.table}") from error


def count_rows(dsn: str, exported: str, relation: Relation, row_filter: str | None) -> int:
    """Return how many rows a table has in an exported snapshot, of those that meet the publication's condition."""
    where = "" if row_filter is None else f" WHERE ({row_filter})"
    with connect(dsn) as conn:
        try:
            conn.execute(b"SET row_security = off; SET lock_timeout = '60s'")
            enter_snapshot(conn, exported)
            return conn.execute(f"SELECT pg_catalog.count(*) FROM {from_item(conn, relation)}{where}".encode()).fetchall()[0][0]
        except psycopg2.Error as error:
            raise translate(error, f"counting the rows of {relation.table}") from error

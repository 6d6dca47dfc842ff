"""Lock tables for reading without waiting long for those who have locked them."""

from collections.abc import Sequence

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.postgres import blockers
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import translate
from pgwal_pipeline.values.relation import Relation


class TableLocked(TableError):
    """Raised if another session has locked a table for too long; it can be read once that session's transaction has ended."""

    transient = True


def from_item(conn: Connection, relation: Relation) -> str:
    """Return the SQL for a table's rows in FROM. ONLY for a plain table: tables that inherit from it are separate tables."""
    kind = conn.execute("SELECT relkind::text FROM pg_catalog.pg_class WHERE oid = %s", [relation.oid]).fetchall()
    return str(relation.table) if kind and kind[0][0] == "p" else f"ONLY {relation.table}"


def lock_free_ones(conn: Connection, relations: Sequence[Relation]) -> list[Relation]:
    """Lock plain tables for reading, in the transaction of `conn`, and return those of `relations` for which that succeeded.

    Waits for nobody. A table that another session has locked, that the role may not read, or that is gone does not come with the others.
    """
    if not relations:
        return []
    names = ", ".join(f"ONLY {relation.table}" for relation in relations)
    try:
        conn.execute(f"SAVEPOINT pgwal; LOCK TABLE {names} IN ACCESS SHARE MODE NOWAIT; RELEASE pgwal".encode())
    except psycopg2.Error:
        conn.execute(b"ROLLBACK TO pgwal; RELEASE pgwal")
        half = len(relations) // 2
        return lock_free_ones(conn, relations[:half]) + lock_free_ones(conn, relations[half:]) if half else []
    return list(relations)


def wait_until_free(conn: Connection, relation: Relation, seconds: float) -> None:
    """Wait until nobody has locked a table, or a partition of it, against reading. Does not keep it from being locked after that.

    `conn` must not be inside a transaction. Raises TableLocked after `seconds`, which names the sessions that have it, SourceUnavailable if
    the connection breaks. What else may be wrong with the table is left to its reading.
    """
    limit = "" if seconds <= 0 else f"SET LOCAL lock_timeout = '{max(1, round(seconds * 1000))}ms'; "
    try:
        with conn.transaction():
            conn.execute(f"{limit}LOCK TABLE {from_item(conn, relation)} IN ACCESS SHARE MODE{'' if limit else ' NOWAIT'}".encode())
    except errors.LockNotAvailable:
        raise locked(relation, blockers.describe(_holders(conn, relation.oid))) from None
    except psycopg2.Error as error:
        if not error.pgcode:
            raise translate(error, f"reading table {relation.table}") from error


def locked(relation: Relation, who: str) -> TableLocked:
    """Return the error for a table that `who` has locked."""
    return TableLocked(
        str(relation.table),
        f"Table {relation.table} cannot be read yet, as it is locked by {who}; it is read by a later run.",
        relation.oid,
        "read",
    )


def _holders(conn: Connection, oid: int) -> list[blockers.Blocker]:
    try:
        return blockers.locking(conn, oid)
    except psycopg2.Error as error:
        raise translate(error, "looking up who has locked a table") from error

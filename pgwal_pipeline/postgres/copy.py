"""Read a table's rows in ranges of its key, each in a short transaction of its own whose snapshot is recorded. Small tables share one.

A table without a key is read in ranges of blocks, all under one exported snapshot.

Values leave Postgres as the text that their types' output functions write. The stream carries the same text, so both are decoded alike.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.errors import PgwalError, SourceRefused, SourceUnavailable, TableError, row_too_large
from pgwal_pipeline.postgres.catalog import Connection, insert_lsn, resolve_types
from pgwal_pipeline.postgres.dsn import BYTES_AS_THEY_ARE, connect, copying_connection, translate
from pgwal_pipeline.postgres.key_order import BORROWED_SQL, KeyOrder, key_order
from pgwal_pipeline.postgres.table_locks import from_item, lock_free_ones, locked
from pgwal_pipeline.postgres.transactions import begin_snapshot, wait_for_transactions
from pgwal_pipeline.values.relation import PgType, Relation, quote_ident

__all__ = [
    "ChunkBounds",
    "ChunkRead",
    "ChunkReader",
    "TableBusy",
    "TableChanged",
    "estimated_size",
    "exported_snapshot",
    "plan_chunks",
    "seem_small",
    "wait_for_transactions",
]

_BLOCK_BYTES = 4 << 20
_TEXTUAL = frozenset({25, 114, 1042, 1043})  # text, json, char(n), varchar: their binary form is their text

# With row_security off, a read from which a policy would hide rows is an error instead of silently lacking them. The lock_timeout is there
# because a transaction that waits for a lock holds back the source's vacuum.
_SETTINGS = "SET row_security = off; SET jit = off; SET lock_timeout = '60s'"
# Whoever wants to alter one of several tables waits until all of them are read.
_SETTINGS_TOGETHER = "SET row_security = off; SET jit = off; SET lock_timeout = '1s'"
_LOCAL = "SET LOCAL row_security = off; SET LOCAL lock_timeout = '60s'"
# A bound is found by a walk along the index; with wrong statistics the planner may prefer to sort the whole table.
_ALONG_THE_INDEX = f"{_LOCAL}; SET LOCAL jit = off; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """A range of the key, `lower < key <= upper`; None for an open end. Two equal bounds mean that key alone.

    A bound has the value of each key column, in the key's order, as text that Postgres writes. For a relation without a key it is a range
    of row addresses, `lower <= ctid < upper`. With `keys` the range is only these, each like a bound.
    """

    lower: tuple[str, ...] | None
    upper: tuple[str, ...] | None
    keys: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """The result of a read: its snapshot (`xmin:xmax:xid,…`), the number of rows and bytes, and the insert LSN after its last row."""

    snapshot: str
    rows: int
    bytes: int
    insert_lsn: int


class TableChanged(TableError):
    """Raised if the table is not what it was when its columns were read; it must be read again from the start, as it is now."""

    transient = True


class TableBusy(SourceUnavailable):
    """Raised if a table is not read in one transaction with others: it is not small, or another session has locked it or an index of it."""


def plan_chunks(conn: Connection, relation: Relation, rows_per_chunk: int) -> Iterator[ChunkBounds]:
    """Cut a table into ranges of its key with about `rows_per_chunk` rows each, in the key's order; together they cover every key.

    The first range has no lower bound, the last no upper one. A table that seems smaller than a chunk, has no index in its key's order, or
    has a protected key is one chunk. Each bound costs a walk along the index over one chunk, and is queried when the iterator gets to it. A
    table without a key is cut into ranges of blocks, to be read under one snapshot (`exported_snapshot`); on a standby, which exports none,
    it is one chunk. `conn` must not be inside a transaction. Raises TableError if the role may not read the table, TableChanged if it
    differs from `relation`, TableLocked if it is locked for a minute, and for other errors the one that `dsn.translate` returns.
    """
    lower = None
    if relation.hides_key:
        pass  # the bounds would be written down: the table is one chunk
    elif not relation.key:
        for block in _block_bounds(conn, relation, rows_per_chunk):
            upper = (f"({block},0)",)
            yield ChunkBounds(lower, upper)
            lower = upper
    else:
        try:
            source = from_item(conn, relation)
            order = key_order(conn, relation) if _estimated_rows(conn, source) >= rows_per_chunk else None
            if order is not None:
                bound = next_bound(conn, source, order, None, rows_per_chunk)
                while bound is not None:
                    following = next_bound(conn, source, order, bound, rows_per_chunk)
                    if following is None:
                        break
                    yield ChunkBounds(lower, bound)
                    lower, bound = bound, following
        except errors.CharacterNotInRepertoire:
            pass  # in a SQL_ASCII database a key that is not UTF-8 cannot be a bound: the rest is one chunk
        except psycopg2.Error as error:
            raise _read_error(error, relation, conn) from error
    yield ChunkBounds(lower, None)


@contextmanager
def exported_snapshot(dsn: str) -> Iterator[str | None]:
    """Export a snapshot with which several reads see the same rows, for as long as the context; None on a standby, which exports none."""
    conn = connect(dsn, application="pgwal snapshot")
    try:
        if conn.execute("SELECT pg_catalog.pg_is_in_recovery()").fetchall()[0][0]:
            yield None
            return
        begin_snapshot(conn)
        yield conn.execute("SELECT pg_catalog.pg_export_snapshot()").fetchall()[0][0]
    except psycopg2.Error as error:
        raise translate(error, "exporting a snapshot") from error
    finally:
        conn.close()


def seem_small(conn: Connection, oids: Collection[int], most_bytes: int) -> frozenset[int]:
    """Return those of the plain tables `oids` that have at most `most_bytes` by the catalog's estimate. Waits for no lock."""
    try:
        rows = conn.execute(
            """SELECT oid::int8 FROM pg_catalog.pg_class
               WHERE oid = ANY (%s::int8[]::oid[]) AND relkind = 'r' AND relpages * current_setting('block_size')::int8 <= %s""",
            [list(oids), most_bytes],
        ).fetchall()
    except psycopg2.Error as error:
        raise translate(error, "looking up the sizes of tables") from error
    return frozenset(row[0] for row in rows)


def estimated_size(conn: Connection, relation: Relation) -> tuple[int, int]:
    """Return the planner's estimate of a table's rows, and its bytes on disk, partitions included.

    Raises TableError and TableChanged as `plan_chunks` does.
    """
    try:
        size = _set_and_ask(
            conn,
            _LOCAL,
            f"""SELECT coalesce(sum(pg_catalog.pg_table_size(relid)), pg_catalog.pg_table_size({relation.oid}::oid::regclass))::int8
                FROM pg_catalog.pg_partition_tree({relation.oid}::oid::regclass)""",
        )[0][0]
        return round(_estimated_rows(conn, from_item(conn, relation))), size or 0
    except psycopg2.Error as error:
        raise _read_error(error, relation, conn) from error


class ChunkReader:
    """Reads ranges of tables one after another in one transaction under one snapshot: a new one, or `exported_snapshot`.

    For one thread, as a context manager, whose end ends the transaction. After an error it must not be used again.
    """

    def __init__(self, dsn: str, exported_snapshot: str | None = None) -> None:
        self._conn = copying_connection(dsn, application="pgwal snapshot")
        self._exported = exported_snapshot
        self._snapshot: str | None = None
        self._together = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # No ROLLBACK: after a COPY that was broken off, the connection takes no more statements.
        with suppress(psycopg2.Error):
            if kind is None and self._snapshot is not None:
                self._conn.execute(b"COMMIT")
        self._conn.close()

    def begin_together(self, relations: Collection[Relation], most_bytes: int) -> frozenset[int]:
        """Begin the transaction for several small tables, and return the OIDs of those that may be read in it.

        Left out are tables that another session has locked, that LOCK TABLE refuses, or that take more than `most_bytes` on disk. The
        others stay locked until the transaction ends, so none is altered or truncated between the snapshot and its read. Raises
        SourceUnavailable if the connection breaks.
        """
        free: list[Relation] = []

        def lock() -> None:
            free[:] = lock_free_ones(self._conn, list(relations))

        self._together = True
        try:
            self._conn.execute(_SETTINGS_TOGETHER.encode())
            self._snapshot = begin_snapshot(self._conn, lock)
            # The size of a table with another name now is not asked for: that table is not locked, and the query would wait for its lock.
            sizes = self._conn.execute(
                """SELECT t.oid, CASE WHEN pg_catalog.to_regclass(t.name)::oid::int8 = t.oid
                                      THEN pg_catalog.pg_table_size(t.oid::oid::regclass) END
                   FROM unnest(%s::int8[], %s::text[]) t (oid, name)""",
                [[relation.oid for relation in free], [str(relation.table) for relation in free]],
            ).fetchall()
        except psycopg2.Error as error:
            raise translate(error, "reading small tables") from error
        return frozenset(oid for oid, size in sizes if size is not None and size <= most_bytes)

    def read(
        self,
        relation: Relation,
        bounds: ChunkBounds,
        on_rows: Callable[[bytearray, list[int]], None],
        *,
        binary: Collection[int] = (),
        row_filter: str | None = None,
        largest_row: int = 1 << 30,
    ) -> ChunkRead:
        """Read the rows of a range, and pass them to `on_rows` as blocks of messages of a COPY in binary format.

        Each field is the text that its type's output function writes, or for the type OIDs in `binary` the bytes that its send function
        writes. A message is a row; the first has the 19 bytes of the header before it, and the last message is the trailer. `on_rows` gets
        about 4 MiB of messages end to end, which it may keep, and the length of each. `row_filter` is the publication's condition for this
        table (`catalog.published_tables`): rows that are not in the stream must not be in the snapshot.

        Raises TableError if rows cannot be read (no SELECT, row-level security that would hide some, a row of more than `largest_row`
        bytes, or another error of the source about this table), TableChanged if the table differs from `relation` now, TableLocked if it is
        locked (TableBusy after `begin_together`), SourceUnavailable if the read broke off.
        """
        conn = self._conn
        try:
            if self._snapshot is None:
                conn.execute(_SETTINGS.encode())
                self._snapshot = begin_snapshot(conn) if self._exported is None else enter_snapshot(conn, self._exported)
            statement = _copy_statement(conn, relation, bounds, binary, row_filter)
            if conn.info.parameter_status("server_encoding") == "SQL_ASCII":
                conn.execute(BYTES_AS_THEY_ARE.encode())
            rows, size = _copy_out(conn, statement, on_rows, largest_row, relation)
            # The LSN after the read, not that of its snapshot: a read sees TRUNCATE and DDL that rewrites the table even if they came
            # later.
            lsn = insert_lsn(conn)
            # Names are resolved as they are now, not as of the snapshot. The lock on the table prevents renames until the transaction
            # ends.
            if conn.execute("SELECT pg_catalog.to_regclass(%s)::oid::int8", [str(relation.table)]).fetchall()[0][0] != relation.oid:
                raise TableChanged(
                    str(relation.table), f"Table {relation.table} was renamed or replaced by another while it was read; read it again."
                )
        except psycopg2.Error as error:
            if self._together and isinstance(error, errors.LockNotAvailable):
                raise TableBusy(f"Table {relation.table} is locked; it is read by itself.") from error
            if relation.is_protected:  # its message, and what it has besides, may show values
                raise _guarded_error(error, relation, conn) from None
            raise _read_error(error, relation, conn) from error
        return ChunkRead(self._snapshot, rows, size, lsn)


def enter_snapshot(conn: Connection, exported: str) -> str:
    """Begin a transaction with an exported snapshot, and return that snapshot as text. Raises SourceUnavailable if it is gone."""
    conn.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        conn.execute(("SET TRANSACTION SNAPSHOT '" + exported.replace("'", "''") + "'").encode())
    except psycopg2.DatabaseError as error:
        raise SourceUnavailable(f"Snapshot {exported} is gone, as the session that exported it has ended; run it again.") from error
    return conn.execute("SELECT pg_catalog.pg_current_snapshot()::text").fetchall()[0][0]


def _copy_statement(conn: Connection, relation: Relation, bounds: ChunkBounds, binary: Collection[int], row_filter: str | None) -> str:
    fields = _fields(conn, relation, binary)
    conditions = []
    if not relation.key:
        conditions += [f"ctid >= '{bounds.lower[0]}'::tid"] if bounds.lower is not None else []
        conditions += [f"ctid < '{bounds.upper[0]}'::tid"] if bounds.upper is not None else []
    elif bounds.lower is not None or bounds.upper is not None or bounds.keys is not None:
        order = key_order(conn, relation)
        if order is None:
            raise TableChanged(str(relation.table), f"Table {relation.table} lost the index of its key while it was read; read it again.")
        if bounds.keys is not None:
            conditions.append(order.among(bounds.keys))
        elif bounds.lower is not None and bounds.lower == bounds.upper:
            conditions.append(order.equal(bounds.lower))
        else:
            conditions += [order.after(bounds.lower)] if bounds.lower is not None else []
            conditions += [order.up_to(bounds.upper)] if bounds.upper is not None else []
    if row_filter is not None:
        conditions.append(f"({row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"COPY (SELECT {', '.join(fields)} FROM {from_item(conn, relation)}{where}) TO STDOUT (FORMAT binary)"


def _fields(conn: Connection, relation: Relation, binary: Collection[int]) -> list[str]:
    """Return the columns' SQL expressions: the value itself for the types in `binary`, else its text. Raises TableChanged, TableError."""
    rows = conn.execute(
        """SELECT n.nspname::text, c.relname::text, pg_catalog.row_security_active(c.oid)
           FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s""",
        [relation.oid],
    ).fetchall()
    if not rows or (rows[0][0], rows[0][1]) != (relation.table.schema, relation.table.name):
        raise TableChanged(
            str(relation.table), f"Table {relation.table} was dropped, renamed or replaced by another while it was read; read it again."
        )
    if rows[0][2]:
        raise _hidden_rows(relation, conn)
    stored = {
        row[0]: (row[1], row[2])
        for row in conn.execute(
            """SELECT attname::text, atttypid::int8, atttypmod FROM pg_catalog.pg_attribute
               WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped""",
            [relation.oid],
        )
    }
    types = resolve_types(conn, set(stored.values()))
    for column in relation.columns:
        if column.name not in stored or not _same(types[stored[column.name]], column.type):
            raise TableChanged(
                str(relation.table), f"Column {quote_ident(column.name)} of {relation.table} was altered while it was read; read it again."
            )
    outputs = {
        row[0]: row[1:]
        for row in conn.execute(
            f"""SELECT t.oid::int8, n.nspname::text, p.proname::text, p.proisstrict, pg_catalog.format_type(t.oid, -1), {BORROWED_SQL}
               FROM pg_catalog.pg_type t
               JOIN pg_catalog.pg_proc p ON p.oid = t.typoutput
               JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
               WHERE t.oid = ANY (%s::oid[])""",
            [[column.type.oid for column in relation.columns]],
        )
    }
    fields = []
    for column in relation.columns:
        schema, function, strict, type_name, borrowed = outputs[column.type.oid]
        value = quote_ident(column.name)
        # Polymorphic output functions such as enum_out do not accept a domain as its base type.
        typed = f"{value}::{type_name}" if stored[column.name][0] != column.type.oid else value
        if (column.type.oid in binary and column.protection is None) or column.type.oid in _TEXTUAL:
            fields.append(typed)
            continue
        text = f"pg_catalog.textin({quote_ident(schema)}.{quote_ident(function)}({typed}))"
        if borrowed:
            text, strict = f"pg_catalog.concat({typed})", False
        fields.append(text if strict else f"CASE WHEN {value} IS DISTINCT FROM NULL THEN {text} END")
    return fields


def _same(one: PgType, other: PgType) -> bool:
    """Return whether two types have the same values and texts; a domain's name does not matter."""
    if one.element is None or other.element is None:
        return (one.oid, one.typmod, one.element) == (other.oid, other.typmod, other.element)
    return (one.oid, one.typmod) == (other.oid, other.typmod) and _same(one.element, other.element)


class _Rows:
    """The file that COPY writes to, row by row; it passes the rows on in blocks.

    It runs as little Python per row as possible and keeps no objects that the garbage collector tracks, which took three times as long as
    the copy.
    """

    def __init__(self, on_rows: Callable[[bytearray, list[int]], None], largest_row: int, relation: Relation) -> None:
        self._on_rows = on_rows
        self._largest_row = largest_row
        self._relation = relation
        self._rows, self._lengths = bytearray(), list[int]()
        self.total = 0

    def write(self, row: bytes) -> None:
        """Add a row. Raises TableError if it is too large."""
        if len(row) > self._largest_row:
            raise row_too_large(self._relation.table, len(row), self._largest_row, self._relation.oid, "read")
        self._rows += row
        self._lengths.append(len(row))
        if len(self._rows) >= _BLOCK_BYTES:
            self.hand_on()

    def hand_on(self) -> None:
        """Pass on the rows that have come, if there are any."""
        if self._lengths:
            rows, lengths = self._rows, self._lengths
            self._rows, self._lengths = bytearray(), []
            self.total += len(rows)
            self._on_rows(rows, lengths)


def _copy_out(
    conn: Connection, statement: str, on_rows: Callable[[bytearray, list[int]], None], largest_row: int, relation: Relation
) -> tuple[int, int]:
    """Run a COPY … TO STDOUT, and return the number of rows and bytes that came."""
    rows = _Rows(on_rows, largest_row, relation)
    with conn.cursor() as cursor:
        cursor.copy_expert(statement.encode(), rows)
        rows.hand_on()
        return max(cursor.rowcount, 0), rows.total


def _estimated_rows(conn: Connection, source: str) -> float:
    """Return the planner's estimate of the rows. It counts the table's current pages and needs no statistics."""
    plan = _set_and_ask(conn, _LOCAL, f"EXPLAIN (FORMAT JSON) SELECT FROM {source}")[0][0]
    return float(plan[0]["Plan"]["Plan Rows"])


def _block_bounds(conn: Connection, relation: Relation, rows_per_chunk: int) -> range:
    """Return the first block of each chunk but the first. A chunk of a partitioned table has the same blocks of every partition."""
    try:
        rows, _ = estimated_size(conn, relation)
        blocks, recovering = conn.execute(
            """SELECT coalesce(max(pg_catalog.pg_relation_size(c.oid) / current_setting('block_size')::int8), 0)::int8,
                   pg_catalog.pg_is_in_recovery()
               FROM pg_catalog.pg_class c WHERE c.relkind = 'r' AND (c.oid = %(oid)s
                   OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree(%(oid)s::oid::regclass)))""",
            {"oid": relation.oid},
        ).fetchall()[0]
    except psycopg2.Error as error:
        raise _read_error(error, relation, conn) from error
    chunks = 1 if recovering else math.ceil(rows / rows_per_chunk)
    if chunks < 2:
        return range(0)
    step = max(1, math.ceil(blocks / chunks))
    return range(step, blocks, step)


def next_bound(conn: Connection, source: str, order: KeyOrder, after: tuple[str, ...] | None, rows: int) -> tuple[str, ...] | None:
    """Return the key `rows` rows after the given one, or the last key if there are fewer; None if there is none."""
    where = f" WHERE {order.after(after)}" if after is not None else ""
    walk = f"SELECT {order.columns} FROM {source}{where} ORDER BY {order.ascending} LIMIT {rows}"
    found = _set_and_ask(conn, _ALONG_THE_INDEX, f"SELECT {order.texts} FROM ({walk}) k ORDER BY {order.descending} LIMIT 1")
    return tuple(found[0]) if found else None


def _set_and_ask(conn: Connection, settings: str, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query run with `SET LOCAL` settings: statements that are sent together are one transaction."""
    return conn.execute(f"{settings}; {query}".encode()).fetchall()


# The errors of a statement that waited for its table while the table was altered: other names, or values of other types.
_ALTERED = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedObject,
    errors.UndefinedFunction,
    errors.InvalidSchemaName,
    errors.CannotCoerce,
    errors.DatatypeMismatch,
)


def _read_error(error: psycopg2.Error, relation: Relation, conn: Connection) -> PgwalError:
    table = relation.table
    if isinstance(error, errors.InsufficientPrivilege):
        if "row-level security" in str(error):
            return _hidden_rows(relation, conn)
        role = conn.info.user
        return TableError(
            str(table),
            f"Role {role} may not read table {table} ({error.diag.message_primary}); "
            f"run GRANT SELECT ON {table} TO {quote_ident(role)}, then `pgwal resnapshot '{table}'`.",
            relation.oid,
            "access",
        )
    if isinstance(error, _ALTERED):
        return TableChanged(str(table), f"Table {table} was altered while it was read ({error.diag.message_primary}); read it again.")
    if isinstance(error, errors.CharacterNotInRepertoire | errors.UntranslatableCharacter):
        return TableError(
            str(table),
            f"Table {table} holds text that the source cannot write as UTF-8 ({error.diag.message_primary}); "
            f"correct it there, then run `pgwal resnapshot '{table}'`.",
        )
    if isinstance(error, errors.LockNotAvailable):
        return locked(relation, "another session")
    found = translate(error, f"reading table {table}")
    if not isinstance(found, SourceRefused):
        return found
    # The statement reads only this table, so the cause is there: a damaged block, a row too large for the source, a function that fails.
    return TableError(str(table), f"{found} Fix it there, then run `pgwal resnapshot '{table}'`.", relation.oid, "read")


def _guarded_error(error: psycopg2.Error, relation: Relation, conn: Connection) -> PgwalError:
    """Return the error of a table with protected columns, without what the source says if that may be about a value."""
    told = (errors.InsufficientPrivilege, *_ALTERED, errors.LockNotAvailable)
    if not error.pgcode or error.pgcode[:2] in ("08", "40", "53", "55", "57", "58") or isinstance(error, told):
        return _read_error(error, relation, conn)
    table = relation.table
    return TableError(
        str(table),
        f"The source refused while reading table {table} (error {error.pgcode}; what it says may hold values of protected columns, and is "
        f"not shown). Read the table there to see it, correct it, then run `pgwal resnapshot '{table}'`.",
        relation.oid,
        "read",
    )


def _hidden_rows(relation: Relation, conn: Connection) -> TableError:
    table, role = relation.table, conn.info.user
    return TableError(
        str(table),
        f"Row-level security of table {table} may hide rows from role {role}, though the stream has them; "
        f"run ALTER ROLE {quote_ident(role)} BYPASSRLS, then `pgwal resnapshot '{table}'`.",
        relation.oid,
        "access",
    )

"""Reading a table's rows: in ranges of its key, each in a short transaction of its own that says which transactions it sees.

A table without a key is read in ranges of its blocks, all of them under one exported snapshot.

Values leave Postgres as the text of their types' output functions, which is what the stream carries too: both are decoded alike.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.errors import PgwalError, SourceRefused, SourceUnavailable, TableError, row_too_large
from pgwal_pipeline.postgres.catalog import Connection, insert_lsn, resolve_types
from pgwal_pipeline.postgres.dsn import BYTES_AS_THEY_ARE, connect, copying_connection, translate
from pgwal_pipeline.postgres.key_order import BORROWED_SQL, KeyOrder, key_order
from pgwal_pipeline.postgres.transactions import begin_snapshot, wait_for_transactions
from pgwal_pipeline.values.relation import PgType, Relation, quote_ident

__all__ = [
    "ChunkBounds",
    "ChunkRead",
    "TableChanged",
    "estimated_size",
    "exported_snapshot",
    "plan_chunks",
    "read_chunk",
    "wait_for_transactions",
]

_BLOCK_BYTES = 4 << 20
_TEXTUAL = frozenset({25, 114, 1042, 1043})  # text, json, char(n), varchar: their binary form is their text

# Rows that a policy hides would be missing without a word: off, such a read is an error. A lock that does not come leaves an open
# transaction behind on the source, which holds back its vacuum.
_SETTINGS = "SET row_security = off; SET jit = off; SET lock_timeout = '60s'"
# The next bound is the end of a walk along the index; where statistics are off, a sort of the whole table may look cheaper.
_ALONG_THE_INDEX = "SET LOCAL row_security = off; SET LOCAL jit = off; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """A range of the key, `lower < key <= upper`, None where it is open; two equal bounds are that key alone.

    Each bound has a text for each column of the relation's key, in the key's order, as Postgres writes the value. Of a relation without a
    key it is a range of row addresses, `lower <= ctid < upper`.
    """

    lower: tuple[str, ...] | None
    upper: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """What a read was of: the transactions that it saw (`xmin:xmax:xid,…`), its rows and bytes, and the insert LSN after its last row."""

    snapshot: str
    rows: int
    bytes: int
    insert_lsn: int


class TableChanged(TableError):
    """The table is not what it was when its columns were looked up: to be read again from the start, as it is now."""

    transient = True


def plan_chunks(conn: Connection, relation: Relation, rows_per_chunk: int) -> Iterator[ChunkBounds]:
    """Cut a table into ranges of its key with about `rows_per_chunk` rows each, in the key's order; together they hold every key.

    The first has no lower bound, the last no upper one. A table that seems smaller than a chunk, or has no index in its key's order, is one
    chunk. Each bound costs a walk along the index over one chunk, and is looked up when it is asked for. A table without a key is cut into
    ranges of blocks, to be read under one snapshot (`exported_snapshot`); on a standby, which exports none, it is one chunk. `conn` must
    not be inside a transaction. Raises TableError where the role may not read the table, TableChanged where it is not as `relation` says,
    and what `dsn.translate` makes of other errors.
    """
    lower = None
    if not relation.key:
        for block in _block_bounds(conn, relation, rows_per_chunk):
            upper = (f"({block},0)",)
            yield ChunkBounds(lower, upper)
            lower = upper
    else:
        try:
            source = _source(conn, relation)
            order = key_order(conn, relation) if _estimated_rows(conn, source) >= rows_per_chunk else None
            if order is not None:
                bound = _next_bound(conn, source, order, None, rows_per_chunk)
                while bound is not None:
                    following = _next_bound(conn, source, order, bound, rows_per_chunk)
                    if following is None:
                        break
                    yield ChunkBounds(lower, bound)
                    lower, bound = bound, following
        except errors.CharacterNotInRepertoire:
            pass  # a key in a database in SQL_ASCII that is not UTF-8 cannot be a bound: all from the last one on is one chunk
        except psycopg2.Error as error:
            raise _read_error(error, relation, conn) from error
    yield ChunkBounds(lower, None)


@contextmanager
def exported_snapshot(dsn: str) -> Iterator[str | None]:
    """A snapshot for several reads to see the same rows, which lives as long as the context; None on a standby, which exports none."""
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


def estimated_size(conn: Connection, relation: Relation) -> tuple[int, int]:
    """About how many rows a table has, as the planner guesses, and its bytes on disk, its partitions' too.

    Raises TableError, TableChanged as `plan_chunks` does.
    """
    try:
        size = conn.execute(
            """SELECT coalesce(sum(pg_catalog.pg_table_size(relid)), pg_catalog.pg_table_size(%(oid)s::oid::regclass))::int8
               FROM pg_catalog.pg_partition_tree(%(oid)s::oid::regclass)""",
            {"oid": relation.oid},
        ).fetchall()[0][0]
        return round(_estimated_rows(conn, _source(conn, relation))), size or 0
    except psycopg2.Error as error:
        raise _read_error(error, relation, conn) from error


def read_chunk(
    dsn: str,
    relation: Relation,
    bounds: ChunkBounds,
    on_rows: Callable[[bytearray, list[int]], None],
    *,
    binary: Collection[int] = (),
    row_filter: str | None = None,
    exported_snapshot: str | None = None,
    largest_row: int = 1 << 30,
) -> ChunkRead:
    """Read the rows of a range, in a transaction of its own, and hand them on as the messages of a COPY in binary format, some at a time.

    Each field is the text of its type's output function, but those of the types whose OIDs are in `binary`: these are as their types' send
    functions write them. A message is a row, the first with the 19 bytes of the header before it; the last is the trailer. `on_rows` gets
    about 4 MiB of them end to end, to keep, and the length of each. `row_filter` is the publication's condition for this table
    (`catalog.published_tables`), so that rows which are not in the stream are not in the snapshot. `exported_snapshot` names one that the
    read is to see instead of its own.

    Raises TableError where rows cannot be read (no SELECT, row-level security that would hide some, a row of more than `largest_row` bytes,
    anything that the source says against this table), TableChanged where the table is not as
    `relation` says any more, SourceUnavailable where the read broke off.
    """
    conn = copying_connection(dsn, application="pgwal snapshot")
    try:
        conn.execute(_SETTINGS.encode())
        snapshot = begin_snapshot(conn) if exported_snapshot is None else _enter_snapshot(conn, exported_snapshot)
        statement = _copy_statement(conn, relation, bounds, binary, row_filter)
        if conn.info.parameter_status("server_encoding") == "SQL_ASCII":
            conn.execute(BYTES_AS_THEY_ARE.encode())
        rows, size = _copy_out(conn, statement, on_rows, largest_row, relation)
        # After the read, not at its snapshot: TRUNCATE and DDL that rewrites the table are seen by it whenever they were done.
        lsn = insert_lsn(conn)
        # Names are looked up as they are now, whatever the snapshot; until the transaction ends nothing renames what was read.
        if conn.execute("SELECT pg_catalog.to_regclass(%s)::oid::int8", [str(relation.table)]).fetchall()[0][0] != relation.oid:
            raise TableChanged(str(relation.table), f"Table {relation.table} was renamed or made anew while it was read; read it again.")
        conn.execute(b"COMMIT")
    except psycopg2.Error as error:
        raise _read_error(error, relation, conn) from error
    finally:
        # Not a rollback: on the way out of a COPY that was broken off, the connection takes no more statements.
        conn.close()
    return ChunkRead(snapshot, rows, size, lsn)


def _enter_snapshot(conn: Connection, exported: str) -> str:
    """Begin a transaction that sees what the one that exported its snapshot sees; the snapshot as text."""
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
    elif bounds.lower is not None or bounds.upper is not None:
        order = key_order(conn, relation)
        if order is None:
            raise TableChanged(
                str(relation.table), f"Table {relation.table} has lost the index of its key while it was read; read it again."
            )
        if bounds.lower is not None and bounds.lower == bounds.upper:
            conditions.append(order.equal(bounds.lower))
        else:
            conditions += [order.after(bounds.lower)] if bounds.lower is not None else []
            conditions += [order.up_to(bounds.upper)] if bounds.upper is not None else []
    if row_filter is not None:
        conditions.append(f"({row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"COPY (SELECT {', '.join(fields)} FROM {_source(conn, relation)}{where}) TO STDOUT (FORMAT binary)"


def _fields(conn: Connection, relation: Relation, binary: Collection[int]) -> list[str]:
    """The expressions whose binary forms are the columns' texts, or for the types in `binary` theirs. Raises TableChanged, TableError."""
    rows = conn.execute(
        """SELECT n.nspname::text, c.relname::text, pg_catalog.row_security_active(c.oid)
           FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s""",
        [relation.oid],
    ).fetchall()
    if not rows or (rows[0][0], rows[0][1]) != (relation.table.schema, relation.table.name):
        raise TableChanged(
            str(relation.table), f"Table {relation.table} was dropped, renamed or made anew while it was read; read it again."
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
        # Polymorphic output functions such as enum_out do not take a domain for what it stands on.
        typed = f"{value}::{type_name}" if stored[column.name][0] != column.type.oid else value
        if column.type.oid in binary or column.type.oid in _TEXTUAL:
            fields.append(typed)
            continue
        text = f"pg_catalog.textin({quote_ident(schema)}.{quote_ident(function)}({typed}))"
        if borrowed:
            text, strict = f"pg_catalog.concat({typed})", False
        fields.append(text if strict else f"CASE WHEN {value} IS DISTINCT FROM NULL THEN {text} END")
    return fields


def _same(one: PgType, other: PgType) -> bool:
    """Whether two types have the same values and texts; what a domain over one is called does not matter."""
    if one.element is None or other.element is None:
        return (one.oid, one.typmod, one.element) == (other.oid, other.typmod, other.element)
    return (one.oid, one.typmod) == (other.oid, other.typmod) and _same(one.element, other.element)


class _Rows:
    """Takes what COPY sends, row by row, and hands it on in blocks.

    As little Python a row as there can be, and nothing kept of it that the garbage collector looks after, which took three times as long
    as the copy.
    """

    def __init__(self, on_rows: Callable[[bytearray, list[int]], None], largest_row: int, relation: Relation) -> None:
        self._on_rows = on_rows
        self._largest_row = largest_row
        self._relation = relation
        self._rows, self._lengths = bytearray(), list[int]()
        self.total = 0

    def write(self, row: bytes) -> None:
        """Take a row. Raises TableError where it is too large."""
        if len(row) > self._largest_row:
            raise row_too_large(self._relation.table, len(row), self._largest_row, self._relation.oid, "read")
        self._rows += row
        self._lengths.append(len(row))
        if len(self._rows) >= _BLOCK_BYTES:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand on what has come, if anything has."""
        if self._lengths:
            rows, lengths = self._rows, self._lengths
            self._rows, self._lengths = bytearray(), []
            self.total += len(rows)
            self._on_rows(rows, lengths)


def _copy_out(
    conn: Connection, statement: str, on_rows: Callable[[bytearray, list[int]], None], largest_row: int, relation: Relation
) -> tuple[int, int]:
    """Run a COPY … TO STDOUT; the rows and bytes that came."""
    rows = _Rows(on_rows, largest_row, relation)
    with conn.cursor() as cursor:
        cursor.copy_expert(statement.encode(), rows)
        rows.hand_on()
        return max(cursor.rowcount, 0), rows.total


def _estimated_rows(conn: Connection, source: str) -> float:
    """The planner's guess, which counts the table's pages as they are now; needs no statistics."""
    plan = _set_and_ask(conn, "SET LOCAL row_security = off", f"EXPLAIN (FORMAT JSON) SELECT FROM {source}")[0][0]
    return float(plan[0]["Plan"]["Plan Rows"])


def _block_bounds(conn: Connection, relation: Relation, rows_per_chunk: int) -> range:
    """The first blocks of all chunks but the first. A partitioned table's are those of each of its partitions, side by side."""
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


def _next_bound(conn: Connection, source: str, order: KeyOrder, after: tuple[str, ...] | None, rows: int) -> tuple[str, ...] | None:
    """The key `rows` rows after the given one, or the last one of all; None when there is none after it."""
    where = f" WHERE {order.after(after)}" if after is not None else ""
    walk = f"SELECT {order.columns} FROM {source}{where} ORDER BY {order.ascending} LIMIT {rows}"
    found = _set_and_ask(conn, _ALONG_THE_INDEX, f"SELECT {order.texts} FROM ({walk}) k ORDER BY {order.descending} LIMIT 1")
    return tuple(found[0]) if found else None


def _set_and_ask(conn: Connection, settings: str, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query under `SET LOCAL` settings: statements that are sent together are one transaction."""
    return conn.execute(f"{settings}; {query}".encode()).fetchall()


def _source(conn: Connection, relation: Relation) -> str:
    """What to read the table's rows from: tables that inherit from a plain one are tables of their own."""
    kind = conn.execute("SELECT relkind::text FROM pg_catalog.pg_class WHERE oid = %s", [relation.oid]).fetchall()
    return str(relation.table) if kind and kind[0][0] == "p" else f"ONLY {relation.table}"


# What a statement meets that waited for its table while the table was altered: other names, or values of other types.
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
    found = translate(error, f"reading table {table}")
    if not isinstance(found, SourceRefused):
        return found
    # Nothing else was asked for: a block that is damaged, a row that is too large for the source itself, a function that fails.
    return TableError(str(table), f"{found} Mend it there, then run `pgwal resnapshot '{table}'`.", relation.oid, "read")


def _hidden_rows(relation: Relation, conn: Connection) -> TableError:
    table, role = relation.table, conn.info.user
    return TableError(
        str(table),
        f"Row-level security of table {table} may hide rows from role {role}, though the stream has them; "
        f"run ALTER ROLE {quote_ident(role)} BYPASSRLS, then `pgwal resnapshot '{table}'`.",
        relation.oid,
        "access",
    )

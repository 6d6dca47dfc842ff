"""The oracle: the source itself, read by psycopg2, against what readers find in the lake. Shares no code with the decoder."""

from collections import Counter
from collections.abc import Collection
from decimal import Context, Decimal
from typing import Any

import polars as pl

from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline_tests.support import Source

_ALL_DIGITS = Context(prec=1000)

# Types that the lake holds as such; every other one is Postgres's own text there.
_TYPED = {"bool", "int2", "int4", "int8", "float4", "float8", "oid", "date", "timestamp", "timestamptz", "bytea"}


def source_rows(conn: Connection, table: str) -> tuple[list[str], Counter[tuple[Any, ...]]]:
    """The columns of `table` (a quoted name), and every row with how often it stands there, as Python values."""
    with conn.transaction():
        conn.execute("SET LOCAL TimeZone = 'UTC'")
        columns = conn.execute(
            "SELECT attname, base.typname, CASE WHEN own.typtype = 'd' THEN own.typtypmod ELSE atttypmod END FROM pg_attribute"
            " JOIN pg_type own ON own.oid = atttypid JOIN pg_type base ON base.oid = CASE WHEN own.typtype = 'd' THEN own.typbasetype"
            " ELSE own.oid END WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [table],
        ).fetchall()
        wanted = ", ".join(_expression(*column) for column in columns)
        rows = Counter(_hashable(row) for row in conn.execute(f"SELECT {wanted} FROM {table}".encode()))
        return [column[0] for column in columns], rows


def _expression(name: str, type_name: str, typmod: int) -> str:
    quoted = '"' + name.replace('"', '""') + '"'
    if type_name == "float4":
        return f"{quoted}::float8"
    if type_name.startswith("_") and type_name[1:] not in _TYPED | {"numeric"}:
        return f"{quoted}::text[]"
    if type_name in _TYPED or (type_name == "numeric" and typmod >= 0) or type_name.startswith("_"):
        return quoted
    return f"CASE WHEN {quoted} IS DISTINCT FROM NULL THEN format('%s', {quoted}) END"  # as the type's output function writes it


def lake_rows(path: str, version: int | None = None, dropped: Collection[str] = ()) -> tuple[list[str], Counter[tuple[Any, ...]]]:
    """The columns and every row of a `current` table at a version, without the pipeline's own columns and those that the source dropped.

    Rows that it keeps after they were deleted are left out.
    """
    frame = pl.scan_delta(path, version=version).collect()
    if "_pgwal_deleted_lsn" in frame.columns:
        assert frame.filter(pl.col("_pgwal_deleted_lsn").is_null() != pl.col("_pgwal_deleted_at").is_null()).is_empty()
        frame = frame.filter(pl.col("_pgwal_deleted_lsn").is_null())
    columns = [name for name in frame.columns if not name.startswith("_pgwal_") and name not in dropped]
    return columns, rows_of(frame.select(columns))


def rows_of(frame: pl.DataFrame) -> Counter[tuple[Any, ...]]:
    """Every row of a frame with how often it stands there, to be compared with those of the source."""
    return Counter(_hashable(row) for row in frame.iter_rows())


def _hashable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_value(value) for value in row)


def _value(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, Decimal):
        return value.normalize(_ALL_DIGITS)
    if isinstance(value, list):
        return tuple(_value(element) for element in value)
    if isinstance(value, memoryview):
        return bytes(value)
    return value


def assert_equal(source: Source, table: str, path: str, version: int | None = None, dropped: Collection[str] = ()) -> int:
    """Fail with the first differing rows unless the lake holds just the source's columns and rows; gives the number of rows.

    `dropped` are columns that the source has no longer and the lake may still have.
    """
    with source.connect() as conn:
        wanted, expected = source_rows(conn, table)
    columns, found = lake_rows(path, version, dropped)
    assert columns == wanted, table
    missing, extra = expected - found, found - expected
    assert not missing and not extra, f"{table}: missing {list(missing)[:5]}, extra {list(extra)[:5]} of {sum(expected.values())} rows"
    return sum(expected.values())

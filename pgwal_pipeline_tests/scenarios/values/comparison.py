"""Values of every type, of the source and of `current`, made comparable one by one."""

import math
from collections.abc import Sequence
from datetime import datetime
from decimal import Context, Decimal
from typing import Any

import polars as pl

from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

_ALL_DIGITS = Context(prec=1000)


_FITS = {
    "date": "isfinite({v}) AND extract(year FROM {v}) BETWEEN 1 AND 9999",
    "timestamp": "isfinite({v}) AND extract(year FROM {v}) BETWEEN 1 AND 9999",
    "timestamptz": "isfinite({v}) AND extract(year FROM {v} AT TIME ZONE 'UTC') BETWEEN 1 AND 9999",
    "decimal": "{v} <> 'NaN'",
}


_DECIMAL = ("numeric(38,38)", "numeric(38,0)", "numeric(9,2)", "price", "dear_price")


_TYPED = {"bool", "int2", "int4", "int8", "float4", "float8", "oid", "date", "timestamp", "timestamptz", "bytea", *_DECIMAL}


def _fits(kind: str, value: str) -> str:
    """SQL that tells whether the column of the lake can hold a value."""
    return _FITS.get("decimal" if kind in _DECIMAL else kind, "true").format(v=value)


def _typed(kind: str, value: str) -> str:
    if kind in _TYPED:
        return value + {"float4": "::float8", "price": "::numeric", "dear_price": "::numeric"}.get(kind, "")
    return f"CASE WHEN {value} IS DISTINCT FROM NULL THEN format('%s', {value}) END"


def value_and_text(kind: str, column: str, *, is_list: bool) -> str:
    """Two columns: the value where it fits, Postgres's text where it does not."""
    if is_list:
        # Not unnest, which makes columns of a composite's parts.
        elements = f"(SELECT n, {column}[n] AS e FROM generate_subscripts({column}, 1) n) u"
        whole = f"(SELECT bool_and({_fits(kind, 'e')}) FROM {elements} WHERE e IS DISTINCT FROM NULL)"
        fits = f"coalesce(array_ndims({column}) = 1 AND array_lower({column}, 1) = 1, true) AND coalesce({whole}, true)"
        listed = f"(SELECT coalesce(array_agg({_typed(kind, 'e')} ORDER BY n), '{{}}') FROM {elements})"
        value = f"CASE WHEN {column} IS NOT NULL AND {fits} THEN {listed} END"
    else:
        fits = f"({_fits(kind, column)})"
        value = f"CASE WHEN {fits} THEN {_typed(kind, column)} END"
    return f"{value}, CASE WHEN NOT ({fits}) THEN format('%s', {column}) END"


def exact(value: Any) -> Any:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (value, math.copysign(1, value))
    if isinstance(value, Decimal):
        return value.normalize(_ALL_DIGITS)
    if isinstance(value, list):
        return tuple(map(exact, value))
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    return bytes(value) if isinstance(value, memoryview) else value


def lake_values(pipeline: Pipeline, table: str, columns: Sequence[str]) -> dict[int, tuple[Any, ...]]:
    """The rows of `current` by their `id`: for each column its value, then its text where it does not fit."""
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = next(pointer for name, pointer in publish.tables.items() if name.name == table)
    rows = pl.scan_delta(pointer.path, version=pointer.version).collect().to_dicts()
    texts = [dict(row["_pgwal_text"] or {}) for row in rows]
    return {
        row["id"]: tuple(part for column in columns for part in (exact(row[column]), text.get(column)))
        for row, text in zip(rows, texts, strict=True)
    }


def quoted(value: str) -> str:
    """A literal of SQL."""
    return "'" + value.replace("'", "''") + "'"


def source_values(source: Source, table: str, kinds: Sequence[str], columns: Sequence[str]) -> dict[int, tuple[Any, ...]]:
    """The rows of `table` as the lake should have them, as `lake_values` gives them; `kinds` are the columns' types."""
    wanted = ", ".join(
        value_and_text(kind.removesuffix("[]"), column, is_list=kind.endswith("[]")) for kind, column in zip(kinds, columns, strict=True)
    )
    with source.connect() as conn:
        conn.execute("SET TimeZone = 'UTC'")
        rows = conn.execute(f"SELECT id, {wanted} FROM {table}".encode()).fetchall()
    return {row[0]: tuple(map(exact, row[1:])) for row in rows}


def assert_values(pipeline: Pipeline, table: str, kinds: Sequence[str], columns: Sequence[str]) -> None:
    """`current` has just the source's rows, value by value, and the text of each value that does not fit."""
    expected, found = source_values(pipeline.source, table, kinds, columns), lake_values(pipeline, table, columns)
    assert expected.keys() == found.keys()
    parts = [f"{kind} {part}" for kind in kinds for part in ("value", "text")]
    wrong = [
        (table, key, part, wanted, got)
        for key, row in expected.items()
        for part, wanted, got in zip(parts, row, found[key], strict=True)
        if wanted != got
    ]
    assert wrong == []

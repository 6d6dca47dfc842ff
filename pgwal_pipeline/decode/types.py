"""Maps Postgres types to Arrow types, and defines the Arrow schemas of what the decoder returns."""

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from pgwal_pipeline.decode.protect import Protect, protect_with
from pgwal_pipeline.values.own_columns import COMMIT_LSN, COMMITTED_AT, OP, ORDINAL, TEXT, UNCHANGED, XID
from pgwal_pipeline.values.relation import Column, PgType, Relation

UNCHANGED_TYPE = pa.list_(pa.string())
TEXT_TYPE = pa.map_(pa.string(), pa.string())

_BOX = 603
_VECTORS = (22, 30)  # int2vector and oidvector, written `1 2 3`: not read as arrays, though the catalog gives them an element type
_NUMERIC = 1700
_PLAIN = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", "UTC"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """How a type's values are read; types that are read alike share one. `element` and `delimiter` are those of an array's elements.

    Values are text; if `binary` is a type's OID, they are in that type's binary form. `protect` is what becomes of the texts of a protected
    column.
    """

    arrow: pa.DataType
    element: "Target | None" = None
    delimiter: str = ","
    binary: int | None = None
    protect: Protect | None = None


_shared_target = lru_cache(maxsize=None)(Target)


@lru_cache(maxsize=4096)
def target_of(declared: PgType) -> Target:
    """Return how the text of values of this type is read."""
    if declared.element is not None and declared.oid not in _VECTORS:
        element = target_of(declared.element)
        delimiter = ";" if declared.element.oid == _BOX else declared.element.delimiter
        return _shared_target(pa.list_(element.arrow), element, delimiter)
    arrow = _numeric(declared.typmod) if declared.oid == _NUMERIC else _PLAIN.get(declared.oid, pa.string())
    return _shared_target(arrow)


@lru_cache(maxsize=256)
def _protected(protection: str, key: bytes) -> Target:
    return _shared_target(pa.string(), protect=protect_with(protection, key))


def target_for(column: Column, key: bytes) -> Target:
    """Return how the text of a column's values is read; `key` is the key of hashes."""
    return target_of(column.type) if column.protection is None else _protected(column.protection, key)


@lru_cache(maxsize=4096)
def binary_target_of(declared: PgType) -> Target:
    """Return how the binary form of values of this type is read."""
    return _shared_target(arrow_type(declared), binary=declared.oid)


def _numeric(typmod: int) -> pa.DataType:
    """Return decimal128 if Delta's decimal can hold the values, else string. The scale is an 11-bit signed number."""
    if typmod < 4:
        return pa.string()
    precision, scale = (typmod - 4) >> 16 & 0xFFFF, ((typmod - 4 & 0x7FF) ^ 0x400) - 0x400
    return pa.decimal128(precision, scale) if 1 <= precision <= 38 and 0 <= scale <= precision else pa.string()


def arrow_type(declared: PgType) -> pa.DataType:
    """Return the Arrow type of a column of this type: a typed one if Delta has it, else string, which holds Postgres's text."""
    return target_of(declared).arrow


def column_type(column: Column) -> pa.DataType:
    """Return the Arrow type in which a column arrives: a protected one is a string."""
    return arrow_type(column.type) if column.protection is None else pa.string()


def copy_schema(relation: Relation) -> pa.Schema:
    """Return the schema of copied rows: the source's columns, then `_pgwal_text` map<string,string>.

    It holds the text of values that their columns cannot hold; null if there are none.
    """
    return pa.schema([*_source_fields(relation), pa.field(TEXT, TEXT_TYPE)])


def change_schema(relation: Relation) -> pa.Schema:
    """Return the schema of changes: the source's columns, then our own.

    Our own say what happened and when, which columns were not sent, and the text of values that did not fit.
    """
    return pa.schema(
        [
            *_source_fields(relation),
            pa.field(OP, pa.string()),
            pa.field(COMMIT_LSN, pa.int64()),
            pa.field(ORDINAL, pa.int64()),
            pa.field(XID, pa.int64()),
            pa.field(COMMITTED_AT, pa.timestamp("us", "UTC")),
            pa.field(UNCHANGED, UNCHANGED_TYPE),
            pa.field(TEXT, TEXT_TYPE),
        ]
    )


def _source_fields(relation: Relation) -> list[pa.Field]:
    return [pa.field(column.name, column_type(column)) for column in relation.columns]

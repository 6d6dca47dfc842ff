"""Choose the columns of the lake's tables, and check that a source table's columns can be kept there."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Field, Schema
from deltalake.schema import PrimitiveType

from pgwal_pipeline.lake.delta import Clash
from pgwal_pipeline.lake.parquet import plain_schema
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.values.own_columns import OP, RESERVED, TEXT
from pgwal_pipeline.values.relation import Relation, TableName

_INNER = re.compile(
    r"__delta_internal_.*|_tmp_metadata_row_index|_condition_|_file_name_|_row_dropped_|_row_id_|_(source|target)_row_present_"
    r"|_target_row_index_",
    re.IGNORECASE | re.DOTALL,
)
"""Columns that Delta adds by itself where Spark reads a table, or merges into one: both fail on a table that has one of its own."""


def check_columns(relation: Relation) -> None:
    """Raise TableError if two columns of a table differ only in case, or one is named like a column that the lake adds."""
    seen: dict[str, str] = {}
    for name in relation.column_names:
        twin = seen.setdefault(name.lower(), name)
        if twin != name:
            raise TableError(
                str(relation.table),
                f"Table {relation.table} cannot be followed: its columns {twin!r} and {name!r} differ only in case, which Delta does not "
                f"tell apart; rename one, or leave the table out of PGWAL_TABLES.",
            )
        if name.lower().startswith(RESERVED):
            raise TableError(
                str(relation.table),
                f"Table {relation.table} cannot be followed: its column {name!r} is named like those that the lake adds ({RESERVED}…); "
                f"rename it, or leave the table out of PGWAL_TABLES.",
            )
        if _INNER.fullmatch(name):
            raise TableError(
                str(relation.table),
                f"Table {relation.table} cannot be followed: its column {name!r} is named like one that Delta adds while it reads or "
                f"merges, so that both would fail; rename it, or leave the table out of PGWAL_TABLES.",
            )


def check_old_keys(relation: Relation, rows: pa.Table) -> None:
    """Raise TableError if an old row among `rows` of raw came without its key.

    A key from a replica identity is never null, but Postgres writes a partition's old rows by the partition's own replica identity.
    """
    if relation.replica_identity not in ("d", "i") or not any(rows[name].null_count for name in relation.key):
        return
    old = rows.filter(pc.field(OP).isin(["K", "D"]))
    for name in relation.key:
        if any(name not in dict(text or ()) for text in old.filter(pc.field(name).is_null())[TEXT].to_pylist()):
            table = relation.table
            raise TableError(
                str(table),
                f"Table {table} cannot be followed: an old row came without its key ({', '.join(relation.key)}), since its partition has "
                f"another replica identity; ALTER TABLE … REPLICA IDENTITY FULL on the partition, then `pgwal resnapshot '{table}'`.",
            )


def partitioned_schema(rows: pa.Schema, partition: str) -> Schema:
    """Return the Delta schema of a table for rows of this plain schema, partitioned by the string column `partition`."""
    return Schema([*Schema.from_arrow(rows).fields, Field(partition, PrimitiveType("string"))])


def schema_json(rows: pa.Schema) -> str:
    """Return the Delta schema of `rows` as JSON, in the form of Delta's log, which Spark reads too."""
    return Schema.from_arrow(plain_schema(rows)).to_json()


def names_in_raw(name: str, kind: str | Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that raw may use for the source column `name` with type `kind` (as Delta's log writes it).

    The first is used that no other column has, neither with another type nor with a name that differs only in case. The last contains the
    name's bytes in hex, so no other column ever has it.
    """
    yield name
    yield f"{RESERVED}{_tag(kind)}_{name}"
    yield f"{RESERVED}x{name.encode().hex()}_{_tag(kind)}"


def fitted(has: Schema, rows: pa.Schema) -> pa.Schema:
    """Return the schema `rows` with new names for the columns that `has` has with another type, so that every value keeps its type."""
    known = {field.name.lower(): (field.name, _kind(field)) for field in has.fields}
    fields = []
    for number, field in enumerate(Schema.from_arrow(rows).fields):
        kind = _kind(field)
        free = (name for name in names_in_raw(field.name, kind) if known.get(name.lower(), (name, kind)) == (name, kind))
        fields.append(rows.field(number).with_name(next(free)))
    return pa.schema(fields, rows.metadata)


def fits(has: Schema, wanted: Schema) -> bool:
    """Return whether a table with the columns of `has` can take those of `wanted` without a change of their names."""
    known = {field.name.lower(): (field.name, _kind(field)) for field in has.fields}
    return all(known.get(field.name.lower(), (field.name, _kind(field))) == (field.name, _kind(field)) for field in wanted.fields)


def _kind(field: Field) -> Any:
    return json.loads(field.type.to_json())


def _tag(kind: str | Mapping[str, Any]) -> str:
    if isinstance(kind, str):
        return re.sub(r"\W+", "_", kind).strip("_")
    return f"list_{_tag(kind['elementType'])}"


def changed_type(table: TableName | str, clash: Clash) -> TableError:
    """Return the error for a table with a column whose type differs from the one in the lake."""
    return TableError(
        str(table),
        f"Table {table} cannot be followed: its column {clash.column!r} is {clash.has} in the lake and has become {clash.wanted}; "
        f"run `pgwal resnapshot '{table}'`.",
    )

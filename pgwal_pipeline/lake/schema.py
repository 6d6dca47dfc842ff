"""Which columns a table of the lake has, and whether it can have them."""

import pyarrow as pa
from deltalake import Field, Schema
from deltalake.schema import PrimitiveType

from pgwal_pipeline.errors import TableError
from pgwal_pipeline.lake.delta import Clash, missing_fields
from pgwal_pipeline.relation import Relation, TableName

RESERVED = "_pgwal_"
"""How the names of the lake's own columns begin."""


def check_columns(relation: Relation) -> None:
    """Raise TableError where a table's columns cannot stand in Delta beside each other and beside ours."""
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


def partitioned_schema(rows: pa.Schema, partition: str) -> Schema:
    """The Delta schema of a table that takes rows of this plain schema and is partitioned by the string column `partition`."""
    return Schema([*Schema.from_arrow(rows).fields, Field(partition, PrimitiveType("string"))])


def widened(table: TableName, has: Schema, wanted: Schema) -> Schema:
    """`has` and the columns of `wanted` that it lacks, behind its own.

    This is where it is decided what becomes of a column whose type has changed: such a table is refused with TableError.
    """
    try:
        return Schema([*has.fields, *missing_fields(has, wanted)])
    except Clash as clash:
        raise changed_type(table, clash) from None


def changed_type(table: TableName | str, clash: Clash) -> TableError:
    """The error of a table whose column has another type than the Delta table of its rows."""
    return TableError(
        str(table),
        f"Table {table} cannot be followed: its column {clash.column!r} is {clash.has} in the lake and has become {clash.wanted}; "
        f"give the changed column another name, or leave the table out of PGWAL_TABLES.",
    )

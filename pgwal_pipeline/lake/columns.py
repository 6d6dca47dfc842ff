"""Build Spark SQL expressions that quote columns and compare values, keys and rows.

They are SQL text, not Column objects, because a MERGE statement takes only text.
"""

from collections.abc import Sequence

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pgwal_pipeline.values.own_columns import TEXT


def quote(name: str, alias: str = "") -> str:
    """Return the column `name` (of the relation `alias`) quoted for Spark SQL."""
    quoted = "`" + name.replace("`", "``") + "`"
    return f"{alias}.{quoted}" if alias else quoted


def literal(text: str) -> str:
    """Return `text` as a string literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def null_of(kind: DataType) -> str:
    """Return a null of that type.

    It names the type in SQL: from the type object, Spark Connect makes a string type with a collation, which other readers refuse.
    """
    return f"CAST(NULL AS {kind.simpleString()})"


def has_misfits(kind: DataType) -> bool:
    """Return whether Postgres has values that a column of this type cannot hold. These are null there, with their text in `_pgwal_text`."""
    return isinstance(kind, DateType | TimestampType | TimestampNTZType | DecimalType | ArrayType)


def key_parts(schema: StructType, key: Sequence[str], alias: str = "") -> list[str]:
    """Return expressions that are equal (nulls too) for rows with the same key.

    They are each key column's value and, if the column cannot hold every value, its text. Spark groups and joins -0.0 with 0.0 and NaN with
    NaN, as Postgres's unique indexes do.
    """
    parts = []
    for name in key:
        if isinstance(schema[name].dataType, StringType):
            # Text that is not UTF-8 is null, with its bytes in `_pgwal_text`. The NUL tells them from real text, which has none.
            parts.append(f"coalesce({quote(name, alias)}, concat('\\0', {text_of(name, alias)}))")
            continue
        parts.append(quote(name, alias))
        if has_misfits(schema[name].dataType):
            parts.append(text_of(name, alias))
    return parts


def text_of(name: str, alias: str = "") -> str:
    """Return the expression of the entry for the column `name` in `_pgwal_text`, null if there is none."""
    return f"{quote(TEXT, alias)}[{literal(name)}]"


def source_text(schema: StructType, name: str) -> str | None:
    """Return an expression of a value of the column `name` as text that Postgres can read (with TimeZone UTC); None for nested types."""
    kind, value = schema[name].dataType, quote(name)
    if isinstance(kind, ArrayType | MapType | StructType):
        return None
    text = f"cast({value} AS string)"
    if isinstance(kind, BinaryType):
        text = f"concat('\\\\x', hex({value}))"
    elif isinstance(kind, TimestampType):
        text = f"concat({text}, '+00')"
    return f"coalesce({text_of(name)}, {text})"


def exact(schema: StructType, name: str, alias: str = "") -> str:
    """Return an expression that is equal only for identical values: -0.0 differs from 0.0, and maps can be compared."""
    kind = schema[name].dataType
    value = quote(name, alias)
    if isinstance(kind, MapType):
        return f"sort_array(map_entries({value}))"
    element = kind
    while isinstance(element, ArrayType):
        element = element.elementType
    return f"cast({value} AS string)" if isinstance(element, FloatType | DoubleType) else value


def exact_row(schema: StructType, names: Sequence[str], alias: str = "") -> str:
    """Return a struct of `exact` values: equal by plain `=`, nulls included, for rows that are identical in every column of `names`."""
    fields = (f"'c{number}', {exact(schema, name, alias)}" for number, name in enumerate(names))
    return f"named_struct({', '.join(fields)})"


def same_types(one: DataType, other: DataType) -> bool:
    """Return whether two types are the same apart from nullability."""
    return one.simpleString() == other.simpleString()

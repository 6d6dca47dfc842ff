"""What makes two values or two keys the same, as Spark SQL says it.

Expressions are SQL text rather than Column objects, since a MERGE statement takes nothing else.
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
    """The column `name` (of the relation `alias`) as it stands in Spark SQL, whatever is in its name."""
    quoted = "`" + name.replace("`", "``") + "`"
    return f"{alias}.{quoted}" if alias else quoted


def literal(text: str) -> str:
    """`text` as a string literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def null_of(kind: DataType) -> str:
    """A null of that type, by the type's name: of the type itself Spark Connect makes one with a collation, which other readers refuse."""
    return f"CAST(NULL AS {kind.simpleString()})"


def has_misfits(kind: DataType) -> bool:
    """Whether Postgres has values of such a column that it cannot hold: they are null there and stand in `_pgwal_text`."""
    return isinstance(kind, DateType | TimestampType | TimestampNTZType | DecimalType | ArrayType)


def key_parts(schema: StructType, key: Sequence[str], alias: str = "") -> list[str]:
    """Expressions that are equal, nulls too, for rows of one key: each key column's value, and its text where the column may not hold it.

    Spark groups and joins -0.0 with 0.0 and NaN with NaN, as Postgres's unique indexes do.
    """
    parts = []
    for name in key:
        if isinstance(schema[name].dataType, StringType):
            # Of text that is not UTF-8 the bytes are known, written as no text is: none has a NUL in it.
            parts.append(f"coalesce({quote(name, alias)}, concat('\\0', {text_of(name, alias)}))")
            continue
        parts.append(quote(name, alias))
        if has_misfits(schema[name].dataType):
            parts.append(text_of(name, alias))
    return parts


def text_of(name: str, alias: str = "") -> str:
    """The entry of `_pgwal_text` for the column `name`; null where there is none."""
    return f"{quote(TEXT, alias)}[{literal(name)}]"


def source_text(schema: StructType, name: str) -> str | None:
    """An expression of the text from which Postgres reads a value of the column `name` (under TimeZone UTC); None for a list."""
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
    """An expression that is equal for two values only if they are the same: -0.0 is not 0.0 here, and maps can be compared."""
    kind = schema[name].dataType
    value = quote(name, alias)
    if isinstance(kind, MapType):
        return f"sort_array(map_entries({value}))"
    element = kind
    while isinstance(element, ArrayType):
        element = element.elementType
    return f"cast({value} AS string)" if isinstance(element, FloatType | DoubleType) else value


def exact_row(schema: StructType, names: Sequence[str], alias: str = "") -> str:
    """A struct of `exact` values: equal, by plain `=` and with nulls in it too, for rows that are the same in every column of `names`."""
    fields = (f"'c{number}', {exact(schema, name, alias)}" for number, name in enumerate(names))
    return f"named_struct({', '.join(fields)})"


def same_types(one: DataType, other: DataType) -> bool:
    """Whether two columns hold the same values, whatever their nullability."""
    return one.simpleString() == other.simpleString()

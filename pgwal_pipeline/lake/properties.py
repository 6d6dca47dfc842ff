"""The Delta properties of a `current` table."""

from collections.abc import Mapping, Sequence

from pyspark.sql.types import (
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

HISTORY_HOURS = 30 * 24
"""How long versions of a table stay readable at least, if their files still exist: as long as Delta keeps its log by default."""
STATISTICS = "delta.dataSkippingStatsColumns"

_MAPPED = frozenset(" ,;{}()\n\t=")
_WITH_STATISTICS = 32
"""Of so many columns, the first ones, Delta keeps statistics by default."""
_BOUNDED = (
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    StringType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
"""Types of which there are statistics."""


def readable(hours: int) -> dict[str, str]:
    """Return the properties that keep versions of the last `hours` readable, as far as their files exist."""
    return dict.fromkeys(("delta.logRetentionDuration", "delta.deletedFileRetentionDuration"), f"interval {hours} hours")


def statistics(schema: StructType, key: Sequence[str]) -> dict[str, str]:
    """Return the property with which Delta keeps statistics on the key of a table; empty if it does so without one."""
    if all(name in schema.names[:_WITH_STATISTICS] for name in key):
        return {}
    return {STATISTICS: columns_with_statistics(schema, key)}


def columns_with_statistics(schema: StructType, wanted: Sequence[str]) -> str:
    """Return, as Delta's property takes them, the columns of which it is to keep statistics: the first ones, and those `wanted`."""
    bounded = [field.name for field in schema.fields if is_bounded(field)]
    kept = [name for name in bounded if name in wanted or name in bounded[:_WITH_STATISTICS]]
    return ",".join("`" + name.replace("`", "``") + "`" for name in kept)


def is_bounded(field: StructField) -> bool:
    """Return whether there are statistics of a column of that type."""
    return isinstance(field.dataType, _BOUNDED)


def delta_features(types: Mapping[str, str]) -> dict[str, str]:
    """The table properties that these columns (name to Delta type) need: Delta does not enable a table feature by itself."""
    properties = {}
    if any("timestamp_ntz" in kind for kind in types.values()):
        properties["delta.feature.timestampNtz"] = "supported"
    if any(_MAPPED.intersection(name) for name in types):
        properties["delta.columnMapping.mode"] = "name"
    return properties

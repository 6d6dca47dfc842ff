"""Keep a column's type in `current` though the source has given it another one: the option `on_schema_change: freeze`.

A value that the kept type cannot hold without loss is null in its column and stands as text in `_pgwal_text`, as any other value that its
column cannot hold.
"""

import json
from typing import TYPE_CHECKING

from pyspark.sql.types import DataType, StringType, StructField, StructType

from pgwal_pipeline.lake.columns import literal, null_of, quote, same_types
from pgwal_pipeline.lake.fold import holder_in_raw
from pgwal_pipeline.values.own_columns import TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NO_TEXT = "CAST(map() AS map<string, string>)"


def as_kept(rows: "DataFrame", has: StructType, kept: StructType, arriving_json: str | None) -> "tuple[DataFrame, StructType]":
    """Return rows of raw or of a snapshot, whose schema is `has`, with the columns' types of `kept`, and their schema.

    `arriving_json` is the schema of the same columns as they are in `rows`; with None nothing is changed.
    """
    if arriving_json is None:
        return rows, has
    arriving = StructType.fromJson(json.loads(arriving_json))
    values: dict[str, tuple[str, DataType]] = {}
    left: set[str] = set()
    texts = []
    for name in arriving.names:
        now, then = arriving[name].dataType, kept[name].dataType
        found = None if same_types(now, then) else holder_in_raw(has, name, now)
        if found is None:
            continue
        before = holder_in_raw(has, name, then)
        value = _kept(quote(found), now, then)
        values[before or name] = value if before is None else f"coalesce({quote(before)}, {value})", then
        left |= {found} - {before or name}
        text = f"CASE WHEN {quote(found)} IS NOT NULL AND {value} IS NULL THEN CAST({quote(found)} AS string) END"
        texts.append(f"struct({literal(name)} AS key, {text} AS value)")
    if not values:
        return rows, has
    entries = f"filter(array({', '.join(texts)}), e -> e.value IS NOT NULL)"
    merged = f"CASE WHEN size({entries}) = 0 THEN {TEXT} ELSE map_concat(coalesce({TEXT}, {_NO_TEXT}), map_from_entries({entries})) END"
    fields = [field for field in has.fields if field.name not in left]
    fields += [StructField(name, kind) for name, (_, kind) in values.items() if name not in has.names]
    expressions = {TEXT: merged} | {name: value for name, (value, _) in values.items()}
    chosen = [f"{expressions.get(field.name, quote(field.name))} AS {quote(field.name)}" for field in fields]
    kinds = {name: kind for name, (_, kind) in values.items()}
    return rows.selectExpr(*chosen), StructType([StructField(field.name, kinds.get(field.name, field.dataType)) for field in fields])


def _kept(value: str, now: DataType, then: DataType) -> str:
    """The value with the type `then`, null if that loses something."""
    cast = f"try_cast({value} AS {then.simpleString()})"
    if isinstance(then, StringType):
        return cast
    return f"CASE WHEN CAST({cast} AS {now.simpleString()}) = {value} THEN {cast} ELSE {null_of(then)} END"

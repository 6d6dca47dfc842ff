"""Build the SQL that changes a `current` table (`t`). The source of each MERGE (`s`) is a view of changes from `fold` or `bag`."""

from collections.abc import Mapping, Sequence

from pyspark.sql.types import StructType

from pgwal_pipeline.lake import bag, fold
from pgwal_pipeline.lake.columns import key_parts, literal, quote
from pgwal_pipeline.lake.fold import GONE, KEPT, Shape
from pgwal_pipeline.values.own_columns import COMMIT_LSN, TEXT

HERE = "_pgwal_here"
"""The column that is true in every row of a side of `merged_row`, so that a row without the other side shows."""
_NO_TEXT = "cast(map() AS map<string, string>)"


def table_at(path: str) -> str:
    """Return the Delta table at `path` as SQL names it."""
    return f"delta.{quote(path)}"


def merge_changes(path: str, target: StructType, changes: StructType, view: str, shape: Shape, within: str = "") -> str:
    """Return the MERGE of `view`, which has one change per key, into the table at `path`.

    `within` is a condition on the target that every row with a key of `view` fulfills: Delta skips the files that have no such row.
    """
    matched = ", ".join(f"{quote(name, 't')} = {_updated(name, changes, shape)}" for name in target.names)
    return (
        f"MERGE INTO {table_at(path)} t USING {quote(view)} s ON {same_key(target, changes, shape)}{' AND ' + within if within else ''} "
        f"WHEN MATCHED AND s.{GONE} THEN DELETE WHEN MATCHED THEN UPDATE SET {matched} "
        f"WHEN NOT MATCHED AND NOT s.{GONE} THEN {_insert(target, changes, shape)}"
    )


def merge_bag(path: str, target: StructType, changes: StructType, view: str, shape: Shape) -> str:
    """Return the MERGE that brings a bag of rows up to date; `view` has the rows of `bag.renewed`."""
    same = f"s.{bag.ROW} = {bag.row_identity(target, shape, 't')}"
    return (
        f"MERGE INTO {table_at(path)} t USING {quote(view)} s ON s.{bag.TAKEN} AND {same} "
        f"WHEN MATCHED THEN DELETE WHEN NOT MATCHED AND NOT s.{bag.TAKEN} THEN {_insert(target, changes, shape)}"
    )


def add_columns(path: str, types: Mapping[str, str], columns: Sequence[str]) -> str:
    """Return the statement that adds the columns of `types` (name to Delta type), each at its position in `columns`."""
    added = []
    for number, name in enumerate(columns):
        if name in types:
            place = f"AFTER {quote(columns[number - 1])}" if number else "FIRST"
            added.append(f"{quote(name)} {types[name]} {place}")
    return f"ALTER TABLE {table_at(path)} ADD COLUMNS ({', '.join(added)})"


def set_properties(path: str, properties: Mapping[str, str]) -> str:
    """Return the statement that sets table properties."""
    settings = ", ".join(f"{literal(name)} = {literal(value)}" for name, value in properties.items())
    return f"ALTER TABLE {table_at(path)} SET TBLPROPERTIES ({settings})"


def merged_row(target: StructType, changes: StructType, shape: Shape) -> list[str]:
    """Return the columns of the target after `merge_changes`, over an outer join of `t` and `s` that both have `HERE`."""
    inserted = _inserted(target, changes, shape)
    return [
        f"CASE WHEN s.{HERE} IS NULL THEN {quote(name, 't')} WHEN t.{HERE} IS NULL THEN {inserted.get(name, 'NULL')} "
        f"ELSE {_updated(name, changes, shape)} END AS {quote(name)}"
        for name in target.names
    ]


def same_key(target: StructType, changes: StructType, shape: Shape) -> str:
    """Return the condition that a row of the target and a change have the same key."""
    pairs = zip(key_parts(target, shape.key, "t"), key_parts(changes, shape.key, "s"), strict=True)
    return " AND ".join(f"{ours} <=> {theirs}" for ours, theirs in pairs)


def _updated(name: str, changes: StructType, shape: Shape) -> str:
    """The new value of the column `name` in a row that is updated; null for a column that the source has dropped."""
    if name not in changes.names:
        return "NULL"
    if KEPT not in changes.names or name == COMMIT_LSN:
        return quote(name, "s")
    if name == TEXT:
        kept = f"coalesce(map_filter(t.{TEXT}, (k, v) -> array_contains(s.{KEPT}, k)), {_NO_TEXT})"
        merged = f"map_concat({kept}, coalesce(s.{TEXT}, {_NO_TEXT}))"
        return f"CASE WHEN s.{KEPT} IS NULL THEN s.{TEXT} WHEN size({merged}) > 0 THEN {merged} END"
    if name in fold.may_be_unsent(changes, shape):
        return f"CASE WHEN array_contains(s.{KEPT}, {literal(name)}) THEN {quote(name, 't')} ELSE {quote(name, 's')} END"
    return quote(name, "s")


def _insert(target: StructType, changes: StructType, shape: Shape) -> str:
    values = _inserted(target, changes, shape)
    return f"INSERT ({', '.join(map(quote, values))}) VALUES ({', '.join(values.values())})"


def _inserted(target: StructType, changes: StructType, shape: Shape) -> dict[str, str]:
    """The value of each column in a row that is inserted."""
    values = {name: quote(name, "s") for name in target.names if name in changes.names}
    if KEPT in changes.names:
        nowhere = f"raise_error({literal(fold.unsent_marker(shape.table))})"
        values[COMMIT_LSN] = f"CASE WHEN s.{KEPT} IS NULL THEN s.{COMMIT_LSN} ELSE {nowhere} END"
    return values

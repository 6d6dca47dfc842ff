"""Build the SQL that changes a `current` table (`t`). The source of each MERGE (`s`) is a view of changes from `fold` or `bag`."""

from collections.abc import Mapping, Sequence

from pyspark.sql.types import StructType

from pgwal_pipeline.lake import bag, fold
from pgwal_pipeline.lake.columns import key_parts, literal, quote
from pgwal_pipeline.lake.fold import GONE, KEPT, KNOWN, Shape
from pgwal_pipeline.values.own_columns import COMMIT_LSN, COMMITTED_AT, DELETED_AT, DELETED_LSN, TEXT

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
    delete = "" if shape.keeps else f"WHEN MATCHED AND s.{GONE} THEN DELETE "
    return (
        f"MERGE INTO {table_at(path)} t USING {quote(view)} s ON {same_key(target, changes, shape)}{' AND ' + within if within else ''} "
        f"{delete}WHEN MATCHED{f' AND {renews(shape)}' if shape.keeps else ''} THEN UPDATE SET {matched} "
        f"WHEN NOT MATCHED AND {inserts(changes, shape)} THEN {_insert(target, changes, shape)}"
    )


def renews(shape: Shape) -> str:
    """Return the condition that the row stays which the key has in the target, with what the change says of it."""
    if not shape.keeps:
        return f"NOT s.{GONE}"
    return f"(NOT s.{GONE} OR s.{KNOWN} OR t.{DELETED_LSN} IS NULL)"


def inserts(changes: StructType, shape: Shape) -> str:
    """Return the condition that a change makes a row of a key that the target has not."""
    if not shape.keeps:
        return f"NOT s.{GONE}"
    return f"(NOT s.{GONE} OR s.{KNOWN}{f' AND s.{KEPT} IS NULL' if KEPT in changes.names else ''})"


def merge_bag(path: str, target: StructType, changes: StructType, view: str, shape: Shape) -> str:
    """Return the MERGE that brings a bag of rows up to date; `view` has the rows of `bag.renewed`."""
    same = f"s.{bag.ROW} = {bag.row_identity(target, shape, 't')}{f' AND t.{DELETED_LSN} IS NULL' if shape.keeps else ''}"
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
    stays = f"s.{HERE} IS NULL{f' OR t.{HERE} AND NOT {renews(shape)}' if shape.keeps else ''}"
    return [
        f"CASE WHEN {stays} THEN {quote(name, 't')} WHEN t.{HERE} IS NULL THEN {inserted.get(name, 'NULL')} "
        f"ELSE {_updated(name, changes, shape)} END AS {quote(name)}"
        for name in target.names
    ]


def same_key(target: StructType, changes: StructType, shape: Shape) -> str:
    """Return the condition that a row of the target and a change have the same key."""
    pairs = zip(key_parts(target, shape.key, "t"), key_parts(changes, shape.key, "s"), strict=True)
    return " AND ".join(f"{ours} <=> {theirs}" for ours, theirs in pairs)


def _updated(name: str, changes: StructType, shape: Shape) -> str:
    """The new value of the column `name` in a row that is updated; null for a column that the source has dropped."""
    if not shape.keeps:
        return _sent(name, changes, shape)
    if name in (DELETED_AT, DELETED_LSN):
        return _deleted(name)
    if name == COMMIT_LSN:
        # A row that comes back is sent whole; one that is not would take values of the deleted one.
        wrong = f"NOT s.{GONE} AND t.{DELETED_LSN} IS NOT NULL AND s.{KEPT} IS NOT NULL" if KEPT in changes.names else "false"
        return f"CASE WHEN {wrong} THEN {_nowhere(shape)} ELSE s.{COMMIT_LSN} END"
    return f"CASE WHEN s.{GONE} AND NOT s.{KNOWN} THEN {quote(name, 't')} ELSE {_sent(name, changes, shape)} END"


def _deleted(name: str) -> str:
    """The value of DELETED_AT or DELETED_LSN after a change."""
    return f"CASE WHEN s.{GONE} THEN s.{COMMITTED_AT if name == DELETED_AT else COMMIT_LSN} END"


def _nowhere(shape: Shape) -> str:
    return f"raise_error({literal(fold.unsent_marker(shape.table))})"


def _sent(name: str, changes: StructType, shape: Shape) -> str:
    """The value of the column `name` that a change has for a row of the target."""
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
        values[COMMIT_LSN] = f"CASE WHEN s.{KEPT} IS NULL THEN s.{COMMIT_LSN} ELSE {_nowhere(shape)} END"
    if shape.keeps and shape.key:
        values |= {name: _deleted(name) for name in (DELETED_AT, DELETED_LSN)}
    return values

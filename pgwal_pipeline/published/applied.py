"""The merge of changes into a Delta table: what `apply_changes` does, and what that loads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgwal_pipeline.lake.columns import key_parts, null_of, quote
from pgwal_pipeline.lake.current import widen
from pgwal_pipeline.lake.isolation import failures, isolated, set_write_options
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.properties import delta_features
from pgwal_pipeline.lake.standing import open_current, version
from pgwal_pipeline.lake.statements import table_at
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.published.changes import Changes
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.own_columns import CHANGE, FIRST_LSN, LAST_LSN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_VIEW = "pgwal_changes"
_OWN = (CHANGE, FIRST_LSN, LAST_LSN)


def bring(session: "SparkSession", target_path: str, changes: Changes, key: Sequence[str] | None = None) -> int:
    """Do what `apply_changes` says."""
    if changes.history:
        raise PgwalError(f"The history of {changes.table} cannot be applied; take its net changes, without history=True.")
    table = open_current(target_path)
    # By where the table is in the lake, which stays when it is renamed.
    marker = f"pgwal/{Lake(changes.settings.lake).relative(changes.newer.path)}"
    stands_at = None if table is None else table.transaction_version(marker)
    if table is not None and stands_at is not None and stands_at >= changes.until_lsn:
        return table.version()
    fence = {"txnAppId": marker, "txnVersion": str(changes.until_lsn)}
    if changes.complete:
        _replace(session, target_path, changes, fence)
    else:
        _require_joined(target_path, changes, stands_at)
        by = tuple(key or changes.key)
        if not by:
            raise PgwalError(f"Table {changes.table} has no key to apply its changes by; name the columns of one.")
        _merge(session, target_path, changes, by, fence)
    return version(target_path)


def _require_joined(path: str, changes: Changes, stands_at: int | None) -> None:
    """Raise PgwalError if there is a hole between what the target has and where the changes begin."""
    assert changes.since_lsn is not None
    if stands_at is None:
        raise PgwalError(
            f"{path} has no rows of {changes.table} yet, and the changes begin at {changes.since}; apply complete ones first, those of "
            f"`state.changes({changes.table!r})` before anything was read."
        )
    if changes.since_lsn > stands_at:
        raise PgwalError(
            f"{path} has the changes of {changes.table} up to {format_lsn(stands_at)}, and these begin at {changes.since}; take those "
            f"since {format_lsn(stands_at)}."
        )


def _replace(session: "SparkSession", path: str, changes: Changes, fence: dict[str, str]) -> None:
    with failures(path):
        rows = changes.spark(session).drop(*_OWN)
        writer = rows.writeTo(table_at(path)).using("delta").options(**fence)
        for name, value in delta_features({field.name: field.dataType.simpleString() for field in rows.schema.fields}).items():
            writer = writer.tableProperty(name, value)
        writer.createOrReplace()


def _merge(session: "SparkSession", path: str, changes: Changes, key: Sequence[str], fence: dict[str, str]) -> None:
    with isolated(session, {}) as own, failures(path):
        rows = changes.spark(own)
        target = _widened(own, path, rows)
        rows.createOrReplaceTempView(_VIEW)
        set_write_options(own, fence)
        own.sql(_statement(path, target, rows.schema, key)).collect()


def _widened(session: "SparkSession", path: str, rows: "DataFrame") -> "StructType":
    """The target's columns, after those were added that only the changes have."""
    target = session.read.format("delta").load(path).schema
    columns = [name for name in rows.columns if name not in _OWN]
    return session.read.format("delta").load(path).schema if widen(session, path, columns, rows.schema, target) else target


def _statement(path: str, target: "StructType", changes: "StructType", key: Sequence[str]) -> str:
    pairs = zip(key_parts(target, key, "t"), key_parts(changes, key, "s"), strict=True)
    same = " AND ".join(f"{ours} <=> {theirs}" for ours, theirs in pairs)
    values = {field.name: quote(field.name, "s") if field.name in changes.names else null_of(field.dataType) for field in target.fields}
    updated = ", ".join(f"{quote(name, 't')} = {value}" for name, value in values.items())
    return (
        f"MERGE INTO {table_at(path)} t USING {_VIEW} s ON {same} WHEN MATCHED AND s.{CHANGE} = 'delete' THEN DELETE "
        f"WHEN MATCHED THEN UPDATE SET {updated} WHEN NOT MATCHED AND s.{CHANGE} <> 'delete' THEN "
        f"INSERT ({', '.join(map(quote, values))}) VALUES ({', '.join(values.values())})"
    )

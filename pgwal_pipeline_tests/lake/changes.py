"""Decoded changes for tests that have no stream: rows as raw takes them, of a table made up by its columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pgwal_pipeline.lake.delta import open_table
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName


@dataclass(frozen=True)
class FakeChanges:
    relation: Relation
    rows: pa.Table
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    key_changes: int = 0
    unchanged: bool = False


def relation(name: str, *columns: str, schema: str = "shop") -> Relation:
    """A table with these columns, the first of them its key; their types do not matter to the lake."""
    made = tuple(Column(column, PgType(25, -1, "text"), identity=number == 0) for number, column in enumerate(columns))
    return Relation(16384, TableName(schema, name), "d", made, columns[:1])


def inserts(name: str, columns: Mapping[str, Any], lsn: int = 100, schema: str = "shop") -> FakeChanges:
    """Inserts of one transaction into `name`, one for each value of the columns."""
    source = pa.table(dict(columns))
    count = source.num_rows
    ours = {
        "_pgwal_op": pa.array(["I"] * count),
        "_pgwal_commit_lsn": pa.array(np.full(count, lsn), pa.int64()),
        "_pgwal_ordinal": pa.array(np.arange(count), pa.int64()),
        "_pgwal_xid": pa.array(np.full(count, 700), pa.int64()),
        "_pgwal_committed_at": pa.array(np.zeros(count, "i8"), pa.timestamp("us", "UTC")),
        "_pgwal_unchanged": pa.nulls(count, pa.list_(pa.string())),
        "_pgwal_text": pa.nulls(count, pa.map_(pa.string(), pa.string())),
    }
    rows = pa.table({name: source[name] for name in source.column_names} | ours)
    return FakeChanges(relation(name, *source.column_names, schema=schema), rows, inserts=count)


def read(lake: Lake, uri: str) -> list[dict[str, Any]]:
    """The rows of a Delta table, in no order; none where there is no table."""
    table = open_table(lake, uri)
    return [] if table is None else pa.table(table.scan().read_all()).to_pylist()

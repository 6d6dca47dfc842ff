"""What the tests of `current` have in common: requests for the tables of a folder, and what is read back, by delta-rs and not by Spark."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from pgwal_pipeline.lake.current import ChunkSnapshot, MergeRequest, ReplaceRequest, Traits
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName

Values = tuple[Any, ...]
TABLE = TableName("public", "things")
GENERATION = "g1"
_TEXT = ("_pgwal_text", pa.map_(pa.string(), pa.string()))


def merge_request(
    folder: Path,
    from_lsn: int,
    to_lsn: int,
    traits: Traits,
    *,
    key: Sequence[str],
    columns: Sequence[str],
    current: str = "current",
    keeps: bool = False,
) -> MergeRequest:
    paths = str(folder / "raw"), str(folder / current)
    return MergeRequest(TABLE, *paths, tuple(key), tuple(columns), from_lsn, to_lsn, traits, keeps=keeps)


def replace_request(
    folder: Path,
    to_lsn: int,
    traits: Traits,
    chunks: Sequence[ChunkSnapshot],
    *,
    key: Sequence[str],
    columns: Sequence[str],
    current: str = "current",
    generation: str = GENERATION,
    snapshot_lsn: int = 1,
) -> ReplaceRequest:
    return ReplaceRequest(
        TABLE,
        str(folder / "raw"),
        str(folder / current),
        str(folder / "snapshot"),
        generation,
        tuple(chunks),
        snapshot_lsn,
        tuple(key),
        tuple(columns),
        0,
        to_lsn,
        traits,
    )


def rows_of(path: Path, version: int | None = None) -> list[dict[str, Any]]:
    """The rows of a Delta table as Python values, `_pgwal_text` as a dict."""
    table = QueryBuilder().register("t", DeltaTable(path, version=version)).execute("SELECT * FROM t").read_all()
    rows = pa.table(table).to_pylist()
    for row in rows:
        if row.get("_pgwal_text") is not None:
            row["_pgwal_text"] = dict(row["_pgwal_text"])
    return rows


def write_rows(
    path: Path, columns: Mapping[str, pa.DataType], rows: Sequence[Values], *, chunk: str = "c1", generation: str = GENERATION
) -> None:
    """Add rows of one chunk to a snapshot table. A value {"text": …} is one that its column cannot hold."""
    plain = [{**_plain(columns, row), "_pgwal_chunk": chunk, "_pgwal_generation": generation} for row in rows]
    fields = [*columns.items(), _TEXT, ("_pgwal_chunk", pa.string()), ("_pgwal_generation", pa.string())]
    _append(path, plain, fields, "_pgwal_generation")


def write_events(path: Path, columns: Mapping[str, pa.DataType], events: Sequence[tuple[Any, ...]]) -> None:
    """Add events (op, commit LSN, ordinal, values, columns that were not sent, xid) to raw, in windows of 1000."""
    plain = []
    for op, lsn, ordinal, values, *more in events:
        unsent, xid = [*more, *([], 200)[len(more) :]]
        own = {"op": op, "commit_lsn": lsn, "ordinal": ordinal, "xid": xid, "unchanged": unsent or None}
        own["window"] = window_key((lsn // 1000 + 1) * 1000)
        own["committed_at"] = datetime.fromtimestamp(lsn, UTC)
        plain.append({**_plain(columns, values), **{f"_pgwal_{name}": value for name, value in own.items()}})
    own_fields = [
        ("_pgwal_op", pa.string()),
        ("_pgwal_commit_lsn", pa.int64()),
        ("_pgwal_ordinal", pa.int64()),
        ("_pgwal_xid", pa.int64()),
        ("_pgwal_committed_at", pa.timestamp("us", "UTC")),
        ("_pgwal_unchanged", pa.list_(pa.string())),
        ("_pgwal_window", pa.string()),
    ]
    _append(path, plain, [*columns.items(), _TEXT, *own_fields], "_pgwal_window")


def _plain(columns: Mapping[str, pa.DataType], values: Values | None) -> dict[str, Any]:
    pairs = dict(zip(columns, values or [None] * len(columns), strict=True))
    text = [(name, value["text"]) for name, value in pairs.items() if isinstance(value, dict)]
    row = {name: None if isinstance(value, dict) else _exact(columns[name], value) for name, value in pairs.items()}
    return {**row, "_pgwal_text": text or None}


def _exact(kind: pa.DataType, value: Any) -> Any:
    if isinstance(value, list) and pa.types.is_decimal(kind.value_type):
        return [None if item is None else Decimal(item) for item in value]
    return value


def _append(path: Path, rows: list[dict[str, Any]], fields: list[Any], partition: str) -> None:
    table = pa.Table.from_pylist(rows, pa.schema(fields))
    write_deltalake(path, table, mode="append", schema_mode="merge", partition_by=[partition])

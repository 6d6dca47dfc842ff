"""What the tests of `current` have in common: requests for the tables of a folder, and what is read back, by delta-rs and not by Spark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from pgwal_pipeline.lake.current import ChunkSnapshot, MergeRequest, ReplaceRequest, Traits
from pgwal_pipeline.relation import TableName

TABLE = TableName("public", "things")
GENERATION = "g1"


def merge_request(
    folder: Path, from_lsn: int, to_lsn: int, traits: Traits, *, key: Sequence[str], columns: Sequence[str], current: str = "current"
) -> MergeRequest:
    return MergeRequest(TABLE, str(folder / "raw"), str(folder / current), tuple(key), tuple(columns), from_lsn, to_lsn, traits)


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

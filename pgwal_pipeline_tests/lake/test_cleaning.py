"""What is removed of a table's Delta tables, and that the rest can still be read."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pgwal_pipeline.lake import cleaning, undecodable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.standing import FENCE, watermark
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.relation import TableName

TABLE = TableName("shop", "people")
OID = 7


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path))


def write(path: str, value: str, mode: Any = "overwrite", lsn: int = 1) -> None:
    fence = CommitProperties(app_transactions=[Transaction(FENCE, lsn)])
    write_deltalake(path, pa.table({"id": [1, 2], "v": [value, value]}), mode=mode, commit_properties=fence)


def holding(lake: Lake, value: bytes) -> list[str]:
    found = [path for path in Path(lake.uri).rglob("*") if path.is_file()]
    return [
        path.name
        for path in found
        if value in path.read_bytes() or (path.suffix == ".parquet" and value in repr(pl.read_parquet(path).rows()).encode())
    ]


@pytest.mark.parametrize("versions", [1, 3, 14])
def test_current_keeps_its_newest_version_alone(lake: Lake, versions: int) -> None:
    path = lake.current(TABLE)
    for number in range(versions):
        write(path, "planted", "append" if number % 2 else "overwrite")
    write(path, "clean", lsn=99)
    write(lake.current(TableName("shop", "other")), "planted")
    before = DeltaTable(path).version()
    cleaning.clean_current(lake, TABLE)
    assert pl.read_delta(path).rows() == [(1, "clean"), (2, "clean")]
    assert (DeltaTable(path).version(), watermark(path)) == (before, 99)
    assert len(holding(lake, b"planted")) == 2  # the other table's file, and its log
    cleaning.clean_current(lake, TABLE)
    write(path, "after", "append")
    assert len(pl.read_delta(path)) == 4


def test_a_current_table_that_lacks_files_is_left_as_it_is(lake: Lake) -> None:
    path = lake.current(TABLE)
    write(path, "planted")
    write(path, "clean")
    Path(DeltaTable(path).file_uris()[0]).unlink()
    files = sorted(Path(path).rglob("*"))
    with pytest.raises(LakeError, match="lacks files"):
        cleaning.clean_current(lake, TABLE)
    assert set(files) <= set(Path(path).rglob("*"))


def test_raw_goes_with_what_was_set_aside_and_a_neighbour_stays(lake: Lake) -> None:
    other = TableName("shop", "people_2")
    for path in (
        lake.raw(TABLE),
        lake.absolute(f"_pgwal/damaged/{lake.layer_path('current', TABLE)}/20250101T000000"),
        lake.absolute("_pgwal/verify/x"),
    ):
        write(path, "planted")
    write(lake.raw(other), "sound")
    kept = undecodable.keep(lake, 5, b"I" + (OID + 1).to_bytes(4) + b"sound")
    undecodable.keep(lake, 6, b"U" + OID.to_bytes(4) + b"planted")
    cleaning.clean_raw(lake, TABLE, OID)
    assert holding(lake, b"planted") == []
    assert not Path(lake.raw(TABLE)).exists()
    assert Path(kept).exists()
    assert len(pl.read_delta(lake.raw(other))) == 2
    cleaning.clean_raw(lake, TABLE, OID)
    cleaning.clean_snapshots(lake, TABLE)
    cleaning.clean_current(lake, TABLE)

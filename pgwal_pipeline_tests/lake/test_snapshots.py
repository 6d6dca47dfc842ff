from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.snapshots import SnapshotWriter, generations, remove_generations
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline_tests.lake.changes import read, relation

_ORDERS = relation("orders", "id", "name")
_TEXT = pa.map_(pa.string(), pa.string())


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def _piece(*ids: int, **more: pa.Array) -> pa.Table:
    names = pa.array([f"name of {number}, quite long" for number in ids], pa.string()).cast(pa.string_view())
    text = pa.array([[("id", "infinity")] if number == 0 else None for number in ids], _TEXT)
    return pa.table({"id": pa.array(ids, pa.int64()), "name": names, **more, "_pgwal_text": text})


def _rows(lake: Lake) -> list[tuple[str, str, int]]:
    return sorted((row["_pgwal_generation"], row["_pgwal_chunk"], row["id"]) for row in read(lake, lake.snapshot(_ORDERS.table)))


def test_a_chunk_is_one_commit_and_names_its_attempt(lake: Lake) -> None:
    writer = SnapshotWriter(lake, _ORDERS, "g1")
    written = writer.write("a1", iter([_piece(0, 1), _piece(2)]))
    assert written.rows == 3
    assert written.bytes == sum(file.stat().st_size for file in Path(lake.snapshot(_ORDERS.table)).rglob("part-*"))
    writer.write("a2", [_piece(3)])
    assert _rows(lake) == [("g1", "a1", 0), ("g1", "a1", 1), ("g1", "a1", 2), ("g1", "a2", 3)]
    table = DeltaTable(lake.snapshot(_ORDERS.table))
    assert table.version() == 2
    assert table.metadata().partition_columns == ["_pgwal_generation"]
    assert pl.scan_delta(lake.snapshot(_ORDERS.table)).filter(pl.col("id") == 0).select("_pgwal_generation", "name").collect().rows() == [
        ("g1", "name of 0, quite long")
    ]


def test_an_empty_table_still_has_its_columns(lake: Lake) -> None:
    assert SnapshotWriter(lake, _ORDERS, "g1").write("a1", [_piece()]).rows == 0
    assert [field.name for field in DeltaTable(lake.snapshot(_ORDERS.table)).schema().fields] == [
        "id",
        "name",
        "_pgwal_text",
        "_pgwal_chunk",
        "_pgwal_generation",
    ]
    assert _rows(lake) == []


def test_a_read_that_fails_leaves_nothing(lake: Lake) -> None:
    def breaks() -> Iterator[pa.Table]:
        yield _piece(1)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        SnapshotWriter(lake, _ORDERS, "g1").write("a1", breaks())
    assert _rows(lake) == []
    assert list(Path(lake.uri).rglob("*.parquet")) == []


def test_large_chunks_are_cut_into_groups_and_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgwal_pipeline.lake.snapshots._GROUP_BYTES", 10_000)
    monkeypatch.setattr("pgwal_pipeline.lake.snapshots._FILE_BYTES", 1_000)
    written = SnapshotWriter(lake, _ORDERS, "g1").write("a1", (_piece(*range(start, start + 100)) for start in range(0, 2000, 100)))
    assert written.rows == 2000
    assert [row[2] for row in _rows(lake)] == list(range(2000))
    assert len(list(Path(lake.uri).rglob("part-*"))) > 2


def test_chunks_are_written_side_by_side(lake: Lake) -> None:
    writer = SnapshotWriter(lake, _ORDERS, "g1")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: writer.write(f"a{number}", [_piece(number)]), range(12)))
    assert sorted(row[2] for row in _rows(lake)) == list(range(12))


def test_generations_are_taken_out(lake: Lake) -> None:
    remove_generations(lake, _ORDERS.table, ["g1"])  # of a table that is not there yet
    for generation in ("g1", "g2", "g3"):
        SnapshotWriter(lake, _ORDERS, generation).write("a1", [_piece(1)])
    assert generations(lake, _ORDERS.table) == {"g1", "g2", "g3"}
    remove_generations(lake, _ORDERS.table, ["g1", "g3"])
    remove_generations(lake, _ORDERS.table, ["g1"])
    assert _rows(lake) == [("g2", "a1", 1)]
    assert generations(lake, _ORDERS.table) == {"g2"}


def test_columns_may_join_from_one_generation_to_the_next_but_not_change_type(lake: Lake) -> None:
    SnapshotWriter(lake, _ORDERS, "g1").write("a1", [_piece(1)])
    SnapshotWriter(lake, _ORDERS, "g2").write("a2", [_piece(1, at=pa.array([5], pa.timestamp("us")))])
    assert sorted((row["_pgwal_generation"], row["at"] is None) for row in read(lake, lake.snapshot(_ORDERS.table))) == [
        ("g1", True),
        ("g2", False),
    ]
    with pytest.raises(TableError, match="'at' is timestamp_ntz in the lake and has become string"):
        SnapshotWriter(lake, _ORDERS, "g3").write("a3", [_piece(1, at=pa.array(["x"]))])
    assert len(_rows(lake)) == 2
    assert len(list(Path(lake.uri).rglob("part-*"))) == 2


def test_a_snapshot_of_a_table_with_other_types_begins_with_an_empty_one(lake: Lake) -> None:
    writer = SnapshotWriter(lake, _ORDERS, "g1")
    writer.begin(_piece().schema)
    writer.write("a1", [_piece(1, at=pa.array([5], pa.timestamp("us")))])
    SnapshotWriter(lake, _ORDERS, "g2").begin(_piece().schema)
    assert len(_rows(lake)) == 1
    other = _piece(1, at=pa.array(["x"]))
    writer = SnapshotWriter(lake, _ORDERS, "g3")
    writer.begin(other.schema)
    assert _rows(lake) == []
    writer.write("a3", [other])
    assert [(row["_pgwal_generation"], row["at"]) for row in read(lake, lake.snapshot(_ORDERS.table))] == [("g3", "x")]


def test_what_cannot_be_written_is_refused_at_once(lake: Lake) -> None:
    with pytest.raises(TableError, match="differ only in case"):
        SnapshotWriter(lake, relation("orders", "id", "ID"), "g1")
    with pytest.raises(ValueError, match="no id of a snapshot"):
        SnapshotWriter(lake, _ORDERS, "g'1")

"""Large tables read by DuckDB's own reader of files. `test_state` has those whose rows are deleted by vectors, and mapped columns."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pgwal_pipeline.published import native
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.published.readers import duckdb
from pgwal_pipeline.values.relation import TableName

_NAME = TableName("shop", 'Order "Lines"')


def _rows(path: Path) -> list[dict[str, object]]:
    return duckdb({_NAME: (str(path), DeltaTable(path).version())}).sql('FROM shop."Order ""Lines"""').to_arrow_table().to_pylist()


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Read all tables as large ones are; whether that is possible for the one at a path."""
    monkeypatch.setattr(native, "_LARGE", 0)
    return lambda path: native.is_for(TableDataset(str(path)))


def test_values_and_columns_are_those_that_arrow_reads(natively: Callable[[Path], bool], tmp_path: Path) -> None:
    path = tmp_path / "it's {b}"
    first = {
        "id": pa.array([1, 2], pa.int32()),
        'a "b" {c}': ["x", None],
        "at": pa.array([datetime(2026, 1, 1, tzinfo=UTC), None]),
        "local": pa.array([datetime(2026, 1, 1, 12), None]),
        "day": pa.array([date(1, 1, 1), date(9999, 12, 31)]),
        "price": pa.array([Decimal("1.50"), None], pa.decimal128(38, 2)),
        "score": pa.array([float("inf"), None]),
        "octets": pa.array([b"\x00\xff", None]),
        "list": pa.array([["a", None], None]),
        "_pgwal_text": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
    }
    write_deltalake(path, pa.table(first))
    write_deltalake(path, pa.table({"id": pa.array([3], pa.int32()), "added": [7]}), mode="append", schema_mode="merge")
    assert natively(path)
    expected = TableDataset(str(path)).to_table()
    found = _rows(path)
    assert sorted(map(str, found)) == sorted(map(str, expected.to_pylist()))
    assert [row["added"] for row in sorted(found, key=lambda row: str(row["id"]))] == [None, None, 7]
    assert list(found[0]) == expected.column_names


def test_a_column_that_no_file_has_and_a_table_without_files(natively: Callable[[Path], bool], tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, pa.table({"id": [1]}))
    write_deltalake(path, pa.table({"id": pa.array([], pa.int64()), "new": pa.array([], pa.string())}), mode="append", schema_mode="merge")
    assert natively(path)
    assert _rows(path) == [{"id": 1, "new": None}]
    write_deltalake(path, pa.table({"id": pa.array([], pa.int64()), "new": pa.array([], pa.string())}), mode="overwrite")
    assert _rows(path) == []


def test_small_and_partitioned_tables_and_those_of_a_store_are_read_by_arrow(natively: Callable[[Path], bool], tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1], "part": ["a"]}), partition_by=["part"])
    assert not natively(tmp_path / "t")
    assert _rows(tmp_path / "t") == [{"id": 1, "part": "a"}]


def test_only_large_tables_are_read_natively(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1]}))
    assert not native.is_for(TableDataset(str(tmp_path / "t")))

"""One version of a Delta table by Arrow: rows that were deleted are not there, and what a query does not need is not read."""

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow.dataset as pads
import pytest

from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.published.dataset import TableDataset

_KINDS = {"plain": ("id", "v"), "mapped": ("a b,c", 'x"(y)')}


@pytest.fixture(scope="module")
def made(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables of 3,000 rows in three files, each third row deleted by a vector, and one with no row deleted."""
    folder = tmp_path_factory.mktemp("tables")
    for kind, (key, value) in {**_KINDS, "whole": _KINDS["plain"]}.items():
        place, mapped = f"delta.`{folder}/{kind}`", "'delta.columnMapping.mode' = 'name', " if kind == "mapped" else ""
        properties = f"TBLPROPERTIES ({mapped}'delta.enableDeletionVectors' = 'true')"
        spark.sql(f"CREATE TABLE {place} (`{key}` int, `{value}` string, `_pgwal_text` map<string, string>) USING delta {properties}")
        for start in (0, 1000, 2000):
            columns = [f"CAST(id AS int) AS `{key}`", f"concat('v', id) AS `{value}`", "map('k', 'w') AS _pgwal_text"]
            rows = spark.range(start, start + 1000, 1, 1).selectExpr(*columns)
            rows.write.format("delta").mode("append").save(f"{folder}/{kind}")
        if kind != "whole":
            spark.sql(f"DELETE FROM {place} WHERE `{key}` % 3 = 0")
    return folder


@pytest.mark.parametrize("kind", _KINDS)
def test_rows_that_were_deleted_are_not_there(kind: str, made: Path) -> None:
    key, value = _KINDS[kind]
    dataset = TableDataset(str(made / kind))
    rows = dataset.to_table().to_pylist()
    assert sorted(row[key] for row in rows) == [number for number in range(3000) if number % 3]
    assert all(row[value] == f"v{row[key]}" and row["_pgwal_text"] == [("k", "w")] for row in rows)
    assert (dataset.count_rows(), dataset.head(5).num_rows) == (2000, 5)
    assert TableDataset(str(made / kind), 3).count_rows() == 3000


@pytest.mark.parametrize("kind", [*_KINDS, "whole"])
def test_what_is_not_asked_for_is_not_read(kind: str, made: Path) -> None:
    key, value = _KINDS.get(kind, _KINDS["plain"])
    dataset = TableDataset(str(made / kind))
    late = (pads.field(key) > 2990) & (pads.field(value) != "v2992")
    assert len(dataset.files()) == 3
    assert len(dataset.files(late)) == 1
    assert dataset.files(pads.field(key) > 3000) == []
    found = dataset.to_table(columns=[value], filter=late)
    assert found.column_names == [value]
    wanted = [f"v{number}" for number in range(2991, 3000) if number != 2992 and (number % 3 or kind == "whole")]
    assert sorted(found[value].to_pylist()) == wanted
    assert dataset.to_table(columns={"next": pads.field(key) + 1}, filter=late)["next"].to_pylist()[-1] == 3000
    assert dataset.to_table(columns=[], filter=late).num_rows == len(wanted)


@pytest.mark.parametrize("kind", _KINDS)
def test_duckdb_and_polars_ask_for_what_they_need(kind: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = _KINDS[kind]
    asked: list[tuple[Any, str]] = []
    scanner = TableDataset.scanner

    def listening(self: TableDataset, columns: Any = None, filter: Any = None, **options: Any) -> Any:  # noqa: A002
        asked.append((columns, str(filter)))
        return scanner(self, columns, filter, **options)

    monkeypatch.setattr(TableDataset, "scanner", listening)
    dataset = TableDataset(str(made / kind))
    connection = duckdb.connect(":memory:").register("t", dataset)
    quoted = '"' + value.replace('"', '""') + '"'
    assert connection.sql(f'SELECT {quoted} FROM t WHERE "{key}" = 2000').fetchall() == [("v2000",)]
    assert connection.sql(f'SELECT count(*) FROM t WHERE "{key}" % 2 = 0').fetchall() == [(1000,)]
    frame = pl.scan_pyarrow_dataset(dataset).filter(pl.col(key) == 2000).select(value)
    assert frame.collect().to_series().to_list() == ["v2000"]
    (first, filtered), *_, (last, pushed) = asked
    assert set(first) <= {key, value}
    assert "_pgwal_text" not in last
    assert "2000" in filtered
    assert "2000" in pushed


def test_what_cannot_be_read_is_said(made: Path) -> None:
    with pytest.raises(LakeError, match="There is no Delta table at"):
        TableDataset(str(made / "nowhere"))
    with pytest.raises(LakeError, match=str(made)):
        TableDataset(str(made / "whole"), 99)
    with pytest.raises(NotImplementedError):
        TableDataset(str(made / "plain")).get_fragments()

"""The files that a merge reads, by their logs; what is gone is not taken for what never was."""

from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from pgwal_pipeline.lake.files import Files, changes, require
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.raw import WindowWriter, commit_window
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.lake.changes import inserts

ORDERS = TableName("shop", "orders")


def found(rows: int | None) -> Files:
    return Files("/raw", StructType([]), "_pgwal_window", (), (), rows, 0)


def test_windows_end_after_the_first_lsn_and_up_to_the_last(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    path = lake.raw(ORDERS)
    assert changes(path, 0, 1000) is None
    for number, end in enumerate((100, 200, 300), 1):
        with WindowWriter(lake, 1 << 20, window_key(end)) as writer:
            writer.add(inserts("orders", {"id": [*range(number)]}, lsn=end - 1))
            commit_window(lake, window_key(end), writer.finish())

    def rows(first: int, last: int) -> int | None:
        files = changes(path, first, last)
        assert files is not None
        return files.rows

    assert [rows(0, 300), rows(100, 300), rows(99, 300), rows(100, 299), rows(300, 400)] == [6, 5, 6, 2, 0]


@pytest.mark.parametrize("files", [[found(5)], [found(2), found(3)], [found(9)], [found(None)], [found(1), found(None)]])
def test_as_many_rows_as_the_ledger_counts(files: list[Files]) -> None:
    require(ORDERS, 5, {f"/{number}": one for number, one in enumerate(files)})


@pytest.mark.parametrize(
    ("files", "said"),
    [([found(4)], "/0 has 4 of the 5 rows"), ([None], "/0 has 0 of the 5 rows"), ([found(4), None], "/0 and /1 have 4 of the 5 rows")],
)
def test_fewer_rows_than_the_ledger_counts(files: list[Files | None], said: str) -> None:
    with pytest.raises(LakeError, match=said) as caught:
        require(ORDERS, 5, {f"/{number}": one for number, one in enumerate(files)})
    assert "pgwal resnapshot 'shop.orders'" in str(caught.value)

"""Comparing two tables value by value."""

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake.compare import Comparison, Example, compare, remove, write
from pgwal_pipeline.messages.errors import LakeError

pytestmark = pytest.mark.timeout(900)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAN = float("nan")
SCHEMA = pa.schema(
    [
        ("id", pa.date32()),
        ("f", pa.float64()),
        ("fs", pa.list_(pa.float32())),
        ("d", pa.decimal128(10, 2)),
        ("b", pa.binary()),
        ("t", pa.string()),
        ("_pgwal_text", pa.map_(pa.string(), pa.string())),
    ]
)
FIRST: dict[str, Any] = {
    "id": date(2020, 1, 1),
    "f": NAN,
    "fs": [1.5, None, -0.0],
    "d": Decimal("1.10"),
    "b": b"\0x",
    "t": "",
    "_pgwal_text": None,
}
SECOND: dict[str, Any] = {**dict.fromkeys(SCHEMA.names), "_pgwal_text": [("id", "infinity"), ("f", "odd")]}
THIRD: dict[str, Any] = {**dict.fromkeys(SCHEMA.names), "f": 0.0, "_pgwal_text": [("id", "-infinity")]}
ROWS = [FIRST, SECOND, THIRD]


@pytest.mark.parametrize(
    ("actual", "keyed", "as_bags"),
    [
        (ROWS[::-1], (0, 0, 0), (0, 0)),
        ([SECOND, THIRD], (1, 0, 0), (1, 0)),
        ([*ROWS, {**FIRST, "id": date(2021, 1, 1)}], (0, 1, 0), (0, 1)),
        ([*ROWS, FIRST], (0, 1, 0), (0, 1)),
        ([{**FIRST, "f": None}, {**SECOND, "_pgwal_text": [("f", "odd"), ("id", "infinity")]}, THIRD], (0, 0, 1), (1, 1)),
        ([{**FIRST, "fs": [1.5, None, 0.0]}, {**SECOND, "t": ""}, {**THIRD, "f": -0.0}], (0, 0, 3), (3, 3)),
        (
            [{**FIRST, "d": Decimal("1.11")}, {**SECOND, "_pgwal_text": [("id", "infinity"), ("f", "")]}, {**THIRD, "b": b""}],
            (0, 0, 3),
            (3, 3),
        ),
    ],
    ids=["equal", "missing", "extra", "twice", "a null, and a map in another order", "signs of zero and null", "values and texts"],
)
def test_comparison(
    spark: "SparkSession", tmp_path: Path, actual: list[dict[str, Any]], keyed: tuple[int, int, int], as_bags: tuple[int, int]
) -> None:
    for name, rows in (("expected", ROWS), ("actual", actual)):
        write(str(tmp_path / name), pa.Table.from_pylist(rows, SCHEMA))
    found = compare(spark, str(tmp_path / "expected"), str(tmp_path / "actual"), 0, key=["id"])
    assert replace(found, examples=()) == Comparison(3, *keyed)
    assert found.equal == (keyed == (0, 0, 0))
    assert compare(spark, str(tmp_path / "expected"), str(tmp_path / "actual"), key=[]) == Comparison(3, *as_bags, 0)


def test_rows_that_differ_are_named(spark: "SparkSession", tmp_path: Path) -> None:
    changed = {**FIRST, "d": Decimal("1.11"), "b": b""}
    actual = [changed, {**SECOND, "_pgwal_text": [("id", "infinity"), ("f", "")]}, {**FIRST, "id": date(2021, 1, 1)}]
    for name, rows in (("expected", ROWS), ("actual", actual)):
        write(str(tmp_path / name), pa.Table.from_pylist(rows, SCHEMA))
    found = compare(spark, str(tmp_path / "expected"), str(tmp_path / "actual"), key=["id"])
    assert found.examples == (
        Example(("-infinity",), "missing"),
        Example(("2020-01-01",), "different", ("d", "b")),
        Example(("2021-01-01",), "extra"),
        Example(("infinity",), "different", ("f",)),
    )


def test_what_cannot_be_compared(spark: "SparkSession", tmp_path: Path) -> None:
    write(str(tmp_path / "expected"), pa.table({"id": [1], "n": pa.array([1], pa.int32())}))
    write(str(tmp_path / "actual"), pa.table({"id": [1], "n": ["1"]}))
    with pytest.raises(LakeError, match="'n' is string in the table to be verified and int in the source"):
        compare(spark, str(tmp_path / "expected"), str(tmp_path / "actual"), key=["id"])
    with pytest.raises(LakeError, match="has no column 'more'"):
        compare(spark, str(tmp_path / "expected"), str(tmp_path / "actual"), key=["id"], columns=["id", "more"])
    remove(str(tmp_path / "expected"))
    remove(str(tmp_path / "expected"))
    assert not DeltaTable.is_deltatable(str(tmp_path / "expected"))

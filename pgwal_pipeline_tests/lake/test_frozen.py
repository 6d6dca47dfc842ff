"""Types that are kept though the source has others."""

from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import (
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from pgwal_pipeline.lake.frozen import as_kept

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TEXT = StructField("_pgwal_text", MapType(StringType(), StringType()))


@pytest.mark.parametrize(
    ("now", "then", "values"),
    [
        (LongType(), IntegerType(), {1: 1, -(2**31): -(2**31), 2**31: "2147483648", None: None}),
        (IntegerType(), ShortType(), {7: 7, 40000: "40000"}),
        (ShortType(), LongType(), {7: 7}),
        (LongType(), DoubleType(), {7: 7.0, 2**53 + 1: "9007199254740993"}),
        (LongType(), StringType(), {7: "7"}),
        (LongType(), DecimalType(4, 2), {7: Decimal("7.00"), 100: "100"}),
        (DecimalType(10, 2), DecimalType(4, 1), {Decimal("1.50"): Decimal("1.5"), Decimal("1.55"): "1.55", Decimal("1234.00"): "1234.00"}),
        (DecimalType(10, 2), IntegerType(), {Decimal("3.00"): 3, Decimal("3.10"): "3.10"}),
        (FloatType(), DoubleType(), {0.5: 0.5}),
        (StringType(), IntegerType(), {"12": 12, "012": "012", "x": "x", "": ""}),
        (StringType(), DateType(), {"2024-02-29": date(2024, 2, 29), "2024-2-9": "2024-2-9"}),
        (DateType(), StringType(), {date(2024, 2, 29): "2024-02-29"}),
    ],
)
def test_a_value_is_kept_or_its_text_is(now: DataType, then: DataType, values: dict[Any, Any], spark: "SparkSession") -> None:
    kept_as_text = isinstance(then, StringType)
    has = StructType([StructField("id", IntegerType()), StructField("v", now), _TEXT])
    rows = spark.createDataFrame([(number, value, {"o": "x"}) for number, value in enumerate(values)], has)
    kept, arriving = StructType([StructField("v", then), _TEXT]), StructType([StructField("v", now), _TEXT])
    found, schema = as_kept(rows, has, kept, arriving.json())
    assert schema["v"].dataType == then
    assert found.columns == ["id", "v", "_pgwal_text"]
    for row, (value, expected) in zip(sorted(found.collect()), values.items(), strict=True):
        lost = isinstance(expected, str) and not kept_as_text
        assert row["v"] == (None if lost else expected), value
        assert row["_pgwal_text"] == ({"o": "x", "v": expected} if lost else {"o": "x"}), value


def test_raw_has_both_types_side_by_side(spark: "SparkSession") -> None:
    has = StructType([StructField("v", IntegerType()), StructField("_pgwal_long_v", LongType()), _TEXT])
    rows = spark.createDataFrame([(1, None, None), (None, 2, None), (None, 2**40, None), (None, None, None)], has)
    kept, arriving = StructType([StructField("v", IntegerType())]), StructType([StructField("v", LongType())])
    found, schema = as_kept(rows, has, kept, arriving.json())
    assert schema.names == ["v", "_pgwal_text"]
    assert [tuple(row) for row in found.collect()] == [(1, None), (2, None), (None, {"v": str(2**40)}), (None, None)]
    assert as_kept(rows, has, kept, None) == (rows, has)

import pyarrow as pa
import pytest

from pgwal_pipeline.decode.types import arrow_type, change_schema, copy_schema
from pgwal_pipeline.values.relation import PgType
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.wire import array_of, numeric, table


@pytest.mark.parametrize(
    ("declared", "arrow"),
    [
        (wire.BOOL, pa.bool_()),
        (wire.INT2, pa.int16()),
        (wire.INT4, pa.int32()),
        (wire.INT8, pa.int64()),
        (wire.FLOAT4, pa.float32()),
        (wire.FLOAT8, pa.float64()),
        (wire.OID, pa.int64()),
        (wire.DATE, pa.date32()),
        (wire.TIMESTAMP, pa.timestamp("us")),
        (wire.TIMESTAMPTZ, pa.timestamp("us", "UTC")),
        (wire.BYTEA, pa.binary()),
        (wire.MONEY, pa.string()),
        (wire.UUID, pa.string()),
        (wire.CHAR, pa.string()),
        (PgType(123_456, 7, "some extension's"), pa.string()),
        (numeric(1, 0), pa.decimal128(1, 0)),
        (numeric(12, 2), pa.decimal128(12, 2)),
        (numeric(38, 38), pa.decimal128(38, 38)),
        (numeric(), pa.string()),
        (numeric(39, 0), pa.string()),
        (numeric(5, -2), pa.string()),
        (numeric(3, 5), pa.string()),
        (numeric(1000, -1000), pa.string()),
        (array_of(wire.INT4), pa.list_(pa.int32())),
        (array_of(numeric(12, 2)), pa.list_(pa.decimal128(12, 2))),
        (array_of(numeric()), pa.list_(pa.string())),
        (array_of(array_of(wire.TEXT)), pa.list_(pa.list_(pa.string()))),  # elements of a domain over an array
        (PgType(22, -1, "int2vector", wire.INT2), pa.string()),
    ],
    ids=str,
)
def test_arrow_type(declared: PgType, arrow: pa.DataType) -> None:
    assert arrow_type(declared) == arrow


def test_schemas_put_our_columns_behind_the_sources() -> None:
    items = table("items", {"id": wire.INT4, "Name": wire.TEXT})
    assert copy_schema(items) == pa.schema([("id", pa.int32()), ("Name", pa.string()), ("_pgwal_text", pa.map_(pa.string(), pa.string()))])
    assert change_schema(items) == pa.schema(
        [
            ("id", pa.int32()),
            ("Name", pa.string()),
            ("_pgwal_op", pa.string()),
            ("_pgwal_commit_lsn", pa.int64()),
            ("_pgwal_ordinal", pa.int64()),
            ("_pgwal_xid", pa.int64()),
            ("_pgwal_committed_at", pa.timestamp("us", "UTC")),
            ("_pgwal_unchanged", pa.list_(pa.string())),
            ("_pgwal_text", pa.map_(pa.string(), pa.string())),
        ]
    )

"""The columns of raw: a name for each that no other column has, and none that cannot be kept."""

import pyarrow as pa
import pytest
from deltalake import Schema

from pgwal_pipeline.lake.schema import check_columns, check_old_keys, fits, fitted, names_in_raw
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline_tests.lake.changes import relation


def columns(**kinds: pa.DataType) -> pa.Schema:
    return pa.schema(list(kinds.items()))


def delta(**kinds: pa.DataType) -> Schema:
    return Schema.from_arrow(columns(**kinds))


LIST = pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("has", "rows", "names"),
    [
        (delta(), columns(a=pa.int32()), ["a"]),
        (delta(a=pa.int32()), columns(a=pa.int32(), b=pa.string()), ["a", "b"]),
        (delta(a=pa.int32()), columns(a=pa.int64()), ["_pgwal_long_a"]),
        (delta(a=pa.int32()), columns(a=LIST), ["_pgwal_list_integer_a"]),
        (delta(a=pa.int32()), columns(a=pa.decimal128(10, 2)), ["_pgwal_decimal_10_2_a"]),
        (delta(a=pa.int32(), _pgwal_long_a=pa.int64()), columns(a=pa.int64()), ["_pgwal_long_a"]),
        (delta(a=pa.int32(), _pgwal_long_a=pa.string()), columns(a=pa.int64()), ["_pgwal_x61_long"]),
    ],
)
def test_a_column_of_another_type_gets_a_name_of_its_own(has: Schema, rows: pa.Schema, names: list[str]) -> None:
    assert fitted(has, rows).names == names
    assert fits(has, Schema.from_arrow(rows)) is (names == rows.names)


def test_names_that_differ_in_case_alone_are_told_apart() -> None:
    has = Schema.from_arrow(pa.schema([("Ab", pa.int32())]))
    names = fitted(has, pa.schema([("aB", pa.int32())])).names
    assert [name.lower() for name in names] != ["ab"]
    assert not fits(has, Schema.from_arrow(pa.schema([("aB", pa.int32())])))


def test_the_last_name_is_nobody_elses() -> None:
    last = {[*names_in_raw(name, kind)][-1].lower() for name in ("a", "A", "a_b", "é", "É") for kind in ("long", "string")}
    assert len(last) == 10


@pytest.mark.parametrize("names", [("id", "ID"), ("id", "_pgwal_op"), ("id", "_PGWAL_x"), ("id", "_row_id_"), ("id", "__delta_internal_x")])
def test_columns_that_cannot_be_kept(names: tuple[str, ...]) -> None:
    with pytest.raises(TableError, match=r"^Table shop.t cannot be followed: its columns? .*; rename"):
        check_columns(relation("t", *names))


def test_columns_that_only_look_like_ours() -> None:
    check_columns(relation("t", "id", "pgwal_op", "__pgwal", "row_id", "_row_id_2", "é", "Ê"))


def old_rows(*rows: tuple[str, str | None, dict[str, str] | None]) -> pa.Table:
    ops, keys, texts = zip(*rows, strict=True)
    text = pa.array([None if one is None else list(one.items()) for one in texts], pa.map_(pa.string(), pa.string()))
    return pa.table({"id": pa.array(keys, pa.string()), "_pgwal_op": pa.array(ops), "_pgwal_text": text})


def test_an_old_row_without_its_key() -> None:
    table = relation("t", "id")
    check_old_keys(table, old_rows(("I", "1", None), ("D", "1", None)))
    check_old_keys(table, old_rows(("T", None, None)))  # no row
    check_old_keys(table, old_rows(("D", None, {"id": "infinity"})))  # no value of the column's type
    for op in ("K", "D"):
        with pytest.raises(TableError, match="an old row came without its key"):
            check_old_keys(table, old_rows(("I", "1", None), (op, None, {"v": "x"})))
        with pytest.raises(TableError, match="an old row came without its key"):
            check_old_keys(table, old_rows((op, None, None)))

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Window
from pgwal_pipeline.lake.raw import TableWrite, WindowWriter, commit_window, ensure_raw_table
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.lake.changes import FakeChanges, inserts, read

_KEY = window_key(200)
_ORDERS = TableName("shop", "orders")


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def _written(lake: Lake, *changes: FakeChanges, key: str | None = _KEY, budget: int = 1 << 20) -> tuple[TableWrite, ...]:
    with WindowWriter(lake, budget, key) as writer:
        for change in changes:
            writer.add(change)
        return writer.finish()


def _ids(lake: Lake, table: TableName = _ORDERS) -> list[int]:
    return sorted(row["id"] for row in read(lake, lake.raw(table)))


def test_nothing_is_seen_before_the_commit_and_each_row_once_after_it(lake: Lake) -> None:
    writes = _written(lake, inserts("orders", {"id": [1, 2]}), inserts("orders", {"id": [3]}, lsn=150))
    assert not Path(lake.raw(_ORDERS), "_delta_log").exists()
    commit_window(lake, _KEY, writes)
    commit_window(lake, _KEY, writes)
    rows = sorted(read(lake, lake.raw(_ORDERS)), key=lambda row: row["id"])
    assert [(row["id"], row["_pgwal_window"], row["_pgwal_commit_lsn"]) for row in rows] == [(1, _KEY, 100), (2, _KEY, 100), (3, _KEY, 150)]
    assert DeltaTable(lake.raw(_ORDERS)).metadata().partition_columns == ["_pgwal_window"]


def test_a_write_says_what_it_holds(lake: Lake) -> None:
    (write,) = _written(
        lake,
        replace(inserts("orders", {"id": [1, 2]}), inserts=1, updates=1),
        replace(inserts("orders", {"id": [3]}, lsn=150), inserts=0, deletes=1, truncates=2, key_changes=3, unchanged=True),
    )
    assert (write.table, write.path, write.rows) == ("shop.orders", lake.raw(_ORDERS), 3)
    assert (write.inserts, write.updates, write.deletes, write.truncates, write.key_changes, write.unchanged) == (1, 1, 1, 2, 3, True)
    (file,) = write.files
    assert file.rows == 3
    assert file.size == Path(write.path, file.path).stat().st_size
    assert json.loads(file.stats) == {
        "numRecords": 3,
        "minValues": {"_pgwal_commit_lsn": 100},
        "maxValues": {"_pgwal_commit_lsn": 150},
        "nullCount": {"_pgwal_commit_lsn": 0},
    }


@pytest.mark.parametrize("key", [_KEY, None, window_key(999)])
def test_every_reader_sees_the_partition_whatever_was_known_when_the_files_were_begun(lake: Lake, key: str | None) -> None:
    writes = _written(lake, inserts("orders", {"id": [1, 2]}), key=key)
    commit_window(lake, _KEY, writes)
    commit_window(lake, _KEY, writes)
    assert {row["_pgwal_window"] for row in read(lake, lake.raw(_ORDERS))} == {_KEY}
    assert pl.scan_delta(lake.raw(_ORDERS)).select("id", "_pgwal_window").collect().sort("id").rows() == [(1, _KEY), (2, _KEY)]


def test_types_come_out_as_delta_has_them(lake: Lake) -> None:
    change = inserts(
        "orders",
        {
            "id": pa.array([1], pa.int16()),
            "name": pa.array(["a name that is longer than a view holds in itself"]).cast(pa.string_view()),
            "raw": pa.array([b"\x00\xff"]).cast(pa.binary_view()),
            "tags": pa.array([["x", None]], pa.list_(pa.string())),
            "large": pa.array(["l"], pa.large_string()),
            "kind": pa.array(["k"]).dictionary_encode(),
            "at": pa.array([1], pa.timestamp("us")),
            "zoned": pa.array([-62135596800000000], pa.timestamp("us", "UTC")),
            "price": pa.array(["12.50"]).cast(pa.decimal128(38, 2)),
            "day": pa.array([0], pa.date32()),
        },
    )
    commit_window(lake, _KEY, _written(lake, change))
    table = DeltaTable(lake.raw(_ORDERS))
    types = {field.name: field.type.to_json().strip('"') for field in table.schema().fields}
    assert {name: types[name] for name in ("id", "name", "raw", "large", "kind", "at", "zoned", "price", "day", "_pgwal_committed_at")} == {
        "id": "short",
        "name": "string",
        "raw": "binary",
        "large": "string",
        "kind": "string",
        "at": "timestamp_ntz",
        "zoned": "timestamp",
        "price": "decimal(38,2)",
        "day": "date",
        "_pgwal_committed_at": "timestamp",
    }
    (row,) = read(lake, lake.raw(_ORDERS))
    (polars,) = pl.scan_delta(lake.raw(_ORDERS)).collect().to_dicts()
    for name in ("id", "name", "raw", "tags", "large", "kind", "at", "price", "day"):
        assert polars[name] == row[name] == change.rows[name][0].as_py()
    assert row["zoned"].year == polars["zoned"].year == 1
    (uri,) = table.file_uris()
    assert "INT96" not in str(pq.ParquetFile(uri).schema)
    assert pq.read_schema(uri).metadata is None


def test_the_largest_table_is_written_first_and_memory_stays_within_the_budget(lake: Lake) -> None:
    budget = 1 << 20
    big = inserts("big", {"id": list(range(2000)), "text": ["x" * 100] * 2000})
    with WindowWriter(lake, budget, _KEY) as writer:
        writer.add(inserts("small", {"id": [1]}))
        for _ in range(40):
            writer.add(big)
            assert writer.held <= budget
        writes = {write.table: write for write in writer.finish()}
    assert len(writes["shop.small"].files) == 1
    assert 10 <= len(writes["shop.big"].files) <= 41
    assert sum(file.rows for file in writes["shop.big"].files) == writes["shop.big"].rows == 80_000
    commit_window(lake, _KEY, list(writes.values()))
    assert DeltaTable(lake.raw(TableName("shop", "big"))).count() == 80_000


def test_many_small_additions_make_one_file(lake: Lake) -> None:
    (write,) = _written(lake, *(inserts("orders", {"id": [number]}) for number in range(200)), budget=64 << 20)
    assert len(write.files) == 1
    commit_window(lake, _KEY, [write])
    assert _ids(lake) == list(range(200))


def test_a_new_column_widens_raw_and_an_old_one_stays(lake: Lake) -> None:
    commit_window(lake, _KEY, _written(lake, inserts("orders", {"id": [1], "old": ["o"]})))
    later = window_key(300)
    within = [inserts("orders", {"id": [2], "old": ["p"]}), inserts("orders", {"id": [3], "at": pa.array([1], pa.timestamp("us"))})]
    commit_window(lake, later, _written(lake, *within, key=later))
    rows = sorted(read(lake, lake.raw(_ORDERS)), key=lambda row: row["id"])
    assert [(row["old"], row["at"] is None, row["_pgwal_window"]) for row in rows] == [
        ("o", True, _KEY),
        ("p", True, later),
        (None, False, later),
    ]
    assert "timestampNtz" in (DeltaTable(lake.raw(_ORDERS)).protocol().reader_features or [])
    assert pl.scan_delta(lake.raw(_ORDERS)).select("id", "old").collect().sort("id").rows() == [(1, "o"), (2, "p"), (3, None)]


def test_values_of_another_type_get_a_column_beside(lake: Lake) -> None:
    """Between windows and within one: what was there stays readable as it was written."""
    commit_window(lake, _KEY, _written(lake, inserts("orders", {"id": [1], "qty": [5]})))
    later = window_key(300)
    with WindowWriter(lake, 1 << 20, later) as writer:
        writer.add(inserts("orders", {"id": [2], "qty": ["five"]}))
        writer.add(inserts("orders", {"id": [3], "qty": [7]}))
        writer.add(inserts("orders", {"id": [4], "qty": [[1.5, None]]}))
        writer.add(inserts("orders", {"id": [5], "Qty": [8]}))
        writer.add(inserts("orders", {"id": [6], "QTY": ["six"]}))
        writes = writer.finish()
    commit_window(lake, later, writes)
    names = ["id", "qty", "_pgwal_string_qty", "_pgwal_list_double_qty", "_pgwal_long_Qty", "_pgwal_x515459_string"]
    assert pl.scan_delta(lake.raw(_ORDERS)).select(names).collect().sort("id").rows() == [
        (1, 5, None, None, None, None),
        (2, None, "five", None, None, None),
        (3, 7, None, None, None, None),
        (4, None, None, [1.5, None], None, None),
        (5, None, None, None, 8, None),
        (6, None, None, None, None, "six"),
    ]


@pytest.mark.parametrize(("columns", "why"), [(["id", "Name", "name"], "differ only in case"), (["id", "_PGWAL_op"], "named like those")])
def test_columns_that_cannot_stand_in_delta_are_refused(lake: Lake, columns: list[str], why: str) -> None:
    with WindowWriter(lake, 1 << 20, _KEY) as writer:
        writer.add(inserts("orders", {column: [1] for column in columns}))
        writer.add(inserts("customers", {"id": [1]}))
        (write,) = writer.finish()
    assert write.table == "shop.customers"
    (refusal,) = writer.refused.values()
    assert re.match(f"Table shop.orders .*{why}", str(refusal))


def test_column_and_table_names_may_be_odd(lake: Lake) -> None:
    odd = {"id": [1], "a b": [2], 'q"x': [3], "😀": [4], "é.`": [5], "comma, {}()=;\n\t": [6]}
    table = TableName("Schema é", "Order Lines/..")
    commit_window(lake, _KEY, _written(lake, inserts(table.name, odd, schema=table.schema)))
    (row,) = read(lake, lake.raw(table))
    assert [row[name] for name in odd] == [1, 2, 3, 4, 5, 6]
    assert pl.scan_delta(lake.raw(table)).select(list(odd)).collect().row(0) == (1, 2, 3, 4, 5, 6)


def test_a_failed_window_takes_its_files_away(lake: Lake) -> None:
    with pytest.raises(RuntimeError), WindowWriter(lake, 1 << 20, _KEY) as writer:
        for _ in range(40):
            writer.add(inserts("orders", {"id": list(range(2000)), "text": ["x" * 100] * 2000}))
        raise RuntimeError
    assert list(Path(lake.uri).rglob("*.parquet")) == []


def test_files_are_the_callers_once_they_are_finished(lake: Lake) -> None:
    writes: list[TableWrite] = []
    with pytest.raises(RuntimeError), WindowWriter(lake, 1 << 20, _KEY) as writer:
        writer.add(inserts("orders", {"id": [1]}))
        writes += writer.finish()
        raise RuntimeError  # the ledger may name them by now
    commit_window(lake, _KEY, writes)
    assert _ids(lake) == [1]


def test_a_table_without_rows_gets_no_file(lake: Lake) -> None:
    (write,) = _written(lake, inserts("orders", {"id": pa.array([], pa.int64())}))
    assert write.files == ()
    commit_window(lake, _KEY, [write])
    assert read(lake, lake.raw(_ORDERS)) == []
    assert DeltaTable(lake.raw(_ORDERS)).version() == 0


def test_a_lake_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("")
    with pytest.raises(LakeError, match="The lake cannot be used at"):
        _written(Lake(str(tmp_path / "lake")), inserts("orders", {"id": [1]}))


def test_a_file_that_is_gone_before_its_commit_stops_the_window(lake: Lake) -> None:
    (write,) = _written(lake, inserts("orders", {"id": [1]}))
    Path(write.path, write.files[0].path).unlink()
    with pytest.raises(LakeError, match=r"is missing from .* and was not committed to raw"):
        commit_window(lake, _KEY, [write])
    assert read(lake, lake.raw(_ORDERS)) == []


def test_tables_without_changes_are_made_with_their_columns(lake: Lake) -> None:
    rows = inserts("orders", {"id": [1], "name": ["n"]}).rows.schema
    assert ensure_raw_table(lake, _ORDERS, rows) == lake.raw(_ORDERS)
    ensure_raw_table(lake, _ORDERS, rows)
    assert read(lake, lake.raw(_ORDERS)) == []
    assert DeltaTable(lake.raw(_ORDERS)).version() == 0
    ensure_raw_table(lake, _ORDERS, inserts("orders", {"id": ["a"]}).rows.schema)
    assert "_pgwal_string_id" in [field.name for field in DeltaTable(lake.raw(_ORDERS)).schema().fields]
    commit_window(lake, _KEY, _written(lake, inserts("orders", {"id": [1], "name": ["n"]})))
    assert _ids(lake) == [1]


def test_two_that_recover_one_window_at_once_commit_it_once(lake: Lake) -> None:
    writes = _written(lake, *(inserts(f"t{number}", {"id": [number]}) for number in range(6)))
    threads = [threading.Thread(target=commit_window, args=(lake, _KEY, writes)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        table = DeltaTable(lake.raw(TableName("shop", f"t{number}")))
        assert table.count() == 1
        assert sum(entry["operation"] == "WRITE" for entry in table.history()) == 1


def test_windows_of_one_table_may_be_committed_side_by_side(lake: Lake) -> None:
    keys = [window_key(number) for number in range(300, 308)]
    writes = {key: _written(lake, inserts("orders", {"id": [int(key, 16)]}), key=key) for key in keys}
    threads = [threading.Thread(target=commit_window, args=(lake, key, writes[key])) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _ids(lake) == list(range(300, 308))


_DIES = """
import sys
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.raw import commit_window
lake = Lake(sys.argv[1])
(window,) = Ledger(lake).prepared()
commit_window(lake, window.key, window.tables)
"""


def test_a_window_whose_commits_were_cut_off_is_completed_from_the_ledger_alone(lake: Lake) -> None:
    tables = [TableName("shop", f"t{number}") for number in range(20)]
    commit_window(lake, _KEY, _written(lake, inserts("t0", {"id": [1]})))
    later = window_key(300)
    writes = _written(lake, *(inserts(table.name, {"id": [2], "new": ["n"]}, lsn=250) for table in tables), key=later)
    Ledger(lake).append_window(Window(later, "pgwal", 200, 300, "prepared", tables=writes))

    environment = os.environ | {"PGWAL_FAILPOINTS": "raw.between_tables=kill@3"}
    died = subprocess.run([sys.executable, "-c", _DIES, lake.uri], env=environment, check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    done = [table for table in tables if 2 in _ids(lake, table)]
    assert 3 <= len(done) < len(tables)

    (window,) = Ledger(lake).prepared()
    assert window.tables == writes
    commit_window(lake, window.key, window.tables)
    for table in tables:
        assert _ids(lake, table) == ([1, 2] if table == tables[0] else [2])

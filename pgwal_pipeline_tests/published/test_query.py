"""`pgwal query`: SQL over the published tables, and over nothing else."""

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import write_deltalake

from pgwal_pipeline.cli import query
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Publish, TablePointer
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.published.query import rows_of
from pgwal_pipeline.published.state import PublishedState, open_state
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

_SECRET = "postgresql://me:sesame@127.0.0.1:1/nowhere"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishedState]:
    """Two tables, published at 0/100 with one row and at 0/200 with 25,000."""
    lake = Lake(str(tmp_path / "lake"))
    orders, lines = TableName("public", "orders"), TableName("shop", "Order Lines")
    for number, rows in enumerate((1, 25_000)):
        ids = pa.array(range(rows), pa.int64())
        values = {"id": ids, "paid": pa.array([None] * rows, pa.timestamp("us", "UTC")), "odd": pa.array([float("nan")] * rows)}
        write_deltalake(lake.current(orders), pa.table(values), mode="overwrite")
        write_deltalake(lake.current(lines), pa.table({"id": ids, "a b": pa.array([b"\x01"] * rows)}), mode="overwrite")
        pointers = {orders: TablePointer(lake.current(orders), number), lines: TablePointer(lake.current(lines), number)}
        Ledger(lake).record_publish(Publish(0x100 * (number + 1), datetime(2026, 1, 31, 12, number, tzinfo=UTC), pointers))
    monkeypatch.setenv("PGWAL_LAKE", lake.uri)
    monkeypatch.setenv("PGWAL_SOURCE_DSN", _SECRET)
    yield open_state(Settings.from_environment())


def _typed(*words: str) -> str:
    done = CliRunner().invoke(query, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_rows_of_the_newest_publish_and_of_an_older_one(state: PublishedState) -> None:
    answer = json.loads(_typed('SELECT count(*) AS n, max(o.id) AS id FROM orders o JOIN shop."Order Lines" l USING (id)', "--json"))
    assert answer == {"lsn": "0/200", "columns": ["n", "id"], "rows": [{"n": 25_000, "id": 24_999}]}
    older = json.loads(_typed("SELECT count(*) AS n FROM public.orders", "--json", "--as-of", "2026-01-31T12:00:30Z"))
    assert older == {"lsn": "0/100", "columns": ["n"], "rows": [{"n": 1}]}


def test_many_rows_come_whole_in_each_style(state: PublishedState) -> None:
    sql = "SELECT * FROM orders ORDER BY id"
    rows = json.loads(_typed(sql, "--json"))["rows"]
    assert [row["id"] for row in rows] == list(range(25_000))
    assert rows[7] == {"id": 7, "paid": None, "odd": "NaN"}
    lines = list(csv.reader(_typed(sql, "--csv").splitlines()))
    assert (lines[0], lines[8], len(lines)) == (["id", "paid", "odd"], ["7", "", "nan"], 25_001)
    table = _typed(sql).splitlines()
    assert (table[0].split(), table[2].split(), table[-1], len(table)) == (
        ["id", "paid", "odd"],
        ["0", "nan"],
        "(25,000 rows at 0/200)",
        25_003,
    )
    assert json.loads(_typed("SELECT * FROM orders WHERE id < 0", "--json"))["rows"] == []
    assert _typed("SELECT 1 AS one WHERE false").splitlines() == ["one", "---", "(0 rows at 0/200)"]


def test_rows_come_before_all_are_read(state: PublishedState) -> None:
    with rows_of(state, "SELECT id FROM orders") as reader:
        assert reader.read_next_batch().num_rows < 25_000


def test_the_tables_are_listed(state: PublishedState) -> None:
    listed = json.loads(_typed("--tables", "--json"))
    assert listed["lsn"] == "0/200"
    assert listed["tables"]["public.orders"]["columns"][1] == {"name": "paid", "type": "timestamp"}
    assert 'shop."Order Lines"' in _typed("--tables")
    assert _typed("--tables", "--csv").splitlines()[1] == "public.orders,id,long"
    assert "orders" in _typed("SHOW TABLES")
    for words in (["SELECT 1", "--tables"], [], ["SELECT 1", "--json", "--csv"]):
        assert CliRunner().invoke(query, words).exit_code == 2


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM read_blob('{file}')",
        "SELECT * FROM read_parquet('{lake}/current/public/orders/*.parquet')",
        "SELECT * FROM glob('{lake}/*')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM read_csv('http://127.0.0.1:1/x')",
        "COPY (SELECT 1) TO '{lake}/out.csv'",
        "COPY orders TO '{lake}/out.parquet'",
        "EXPORT DATABASE '{lake}/out'",
        "ATTACH '{lake}/out.db'",
        "ATTACH '{dsn}' AS source (TYPE postgres)",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET python_enable_replacements = true",
        "CREATE TABLE x AS SELECT 1",
        "DROP VIEW orders",
        "DELETE FROM orders",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "SELECT 1; SELECT 2",
        "SELECT getenv('PGWAL_SOURCE_DSN')",
        "SELECT * FROM settings",
        "SELECT * FROM state",
        "SELEC 1",
        "",
    ],
)
def test_nothing_else_is_reached(sql: str, state: PublishedState, tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("a\n1\n")
    before = sorted(tmp_path.rglob("*"))
    settings = pa.table({"dsn": [_SECRET]})  # a variable of that name must not be a table
    with pytest.raises(PgwalError) as told, rows_of(state, sql.format(file=file, lake=tmp_path / "lake", dsn=_SECRET)) as reader:
        reader.read_all()
    assert "sesame" not in str(told.value).replace(sql.format(file=file, lake=tmp_path / "lake", dsn=_SECRET), "")
    assert sorted(tmp_path.rglob("*")) == before
    assert settings.num_rows == 1


def test_no_setting_of_the_engine_shows_a_secret(state: PublishedState) -> None:
    for sql in ("SELECT * FROM duckdb_settings()", "SELECT * FROM duckdb_variables()", "SHOW ALL TABLES", "SELECT sql FROM duckdb_views()"):
        with rows_of(state, sql) as reader:
            assert "sesame" not in str(reader.read_all().to_pylist())


def test_a_value_is_written_as_postgres_does(state: PublishedState) -> None:
    from pgwal_pipeline.published.written import rows

    table: Any = pa.table(
        {
            "at": pa.array([datetime(2026, 1, 31, 12, tzinfo=UTC)]),
            "plain": pa.array([datetime(2026, 1, 31, 12, 0, 0, 5)]),
            "flag": [True],
            "bytes": [b"\x01\xff"],
            "list": [[1, None]],
            "map": pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string())),
            "sneaky": ["a\x1b[2J,\nb"],
        }
    )
    assert "".join(rows(table.to_reader(), "0/1", "csv")).split("\n", 1)[1] == (
        '2026-01-31 12:00:00+00,2026-01-31 12:00:00.000005,t,\\x01ff,"[1, null]","{""k"": ""v""}","a\x1b[2J,\nb"\n'
    )
    (found,) = json.loads("".join(rows(table.to_reader(), "0/1", "json")))["rows"]
    assert (found["at"], found["flag"], found["list"], found["map"]) == ("2026-01-31 12:00:00+00", True, [1, None], {"k": "v"})
    assert "\x1b" not in "".join(rows(table.to_reader(), "0/1", "table"))

"""Read a version of a `current` table with Spark, Polars, Arrow or DuckDB."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pgwal_pipeline.lake.delta import lake_errors, side_by_side
from pgwal_pipeline.lake.layout import storage_options
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.published import native, quoting
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.own_columns import RESERVED, TEXT
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    import polars as pl
    from duckdb import DuckDBPyConnection
    from pyspark.sql import DataFrame, SparkSession

Show = Callable[["DuckDBPyConnection", TableName, TableDataset, int], None]
"""Makes a table a view of a connection."""

TEXT_OF = f"{TEXT}_"
"""What the name of a column begins with that has the texts of another one's values."""


def _hold_less(schema: pa.Schema) -> list[str]:
    """The columns that cannot hold every value of Postgres: `_pgwal_text` may have their values' text."""
    from pyarrow import types as kinds

    def holds_less(kind: Any) -> bool:
        return kinds.is_date(kind) or kinds.is_timestamp(kind) or kinds.is_decimal(kind) or kinds.is_list(kind) or kinds.is_string(kind)

    return [field.name for field in schema if holds_less(field.type) and not field.name.startswith(RESERVED)]


def spark(session: "SparkSession", path: str, version: int, text: bool) -> "DataFrame":
    """Return the table at `path` as a DataFrame of `session`."""
    from pgwal_pipeline.lake.columns import quote, text_of

    frame = session.read.format("delta").option("versionAsOf", version).load(path)
    if not text:
        return frame
    names = _hold_less(TableDataset(path, version).schema)
    return frame.selectExpr("*", *(f"{text_of(name)} AS {quote(TEXT_OF + name)}" for name in names))


def own_session(settings: Settings) -> "SparkSession":
    """Return the session that the PGWAL_SPARK_* settings describe."""
    from pgwal_pipeline.spark.session import spark_session

    return spark_session(settings)


def polars(path: str, version: int, text: bool) -> "pl.LazyFrame":
    """Return the table at `path` as a LazyFrame: by Polars' own reader, unless columns are mapped, which that one refuses."""
    import polars as pl

    dataset = TableDataset(path, version)
    if dataset.is_mapped:
        frame = pl.scan_pyarrow_dataset(dataset)
    else:
        with lake_errors(path):
            frame = pl.scan_delta(path, version=version, storage_options=storage_options(path))
    if not text:
        return frame
    return frame.with_columns(pl.col(TEXT).map.get(name).alias(TEXT_OF + name) for name in _hold_less(dataset.schema))


def arrow(dataset: TableDataset, columns: Sequence[str] | None, text: bool) -> pa.Table:
    """Return the rows of `dataset` with `columns` or all of them. Raises LakeError for a column that the table lacks."""
    unknown = [name for name in columns or () if name not in dataset.schema.names]
    if unknown:
        raise LakeError(f"The table has no column {unknown[0]!r}; it has {', '.join(dataset.schema.names)}.")
    wanted = list(dataset.schema.names if columns is None else columns)
    texts = [name for name in _hold_less(dataset.schema) if name in wanted] if text else []
    rows = dataset.to_table(columns=[*wanted, *([TEXT] if texts and TEXT not in wanted else [])])
    for name in texts:
        rows = rows.append_column(
            TEXT_OF + name, pc.call_function("map_lookup", [rows[TEXT]], pc.MapLookupOptions(pa.scalar(name), "first"))
        )
    return rows.select([*wanted, *(TEXT_OF + name for name in texts)])


def duckdb(tables: Mapping[TableName, tuple[str, int]]) -> "DuckDBPyConnection":
    """Return a connection with a view of each table. DuckDB asks for the columns and rows that a query needs, and for no others.

    DuckDB ignores case: of several tables whose names differ only in that, the first in the order of names has a view.
    """
    datasets = side_by_side(lambda at: TableDataset(*at), list(tables.values()))
    connection = empty_duckdb()
    show_all(connection, dict(zip(tables, datasets, strict=True)), _show_fast)
    return connection


def _show_fast(connection: "DuckDBPyConnection", name: TableName, dataset: TableDataset, number: int) -> None:
    """Do as `show`; DuckDB reads the files of a large table itself."""
    if not native.is_for(dataset):
        show(connection, name, dataset, number)
        return
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoting.name(name.schema)}")
    with lake_errors(dataset.path):
        connection.execute(f"CREATE VIEW {view_of(name)} AS {native.select(connection, dataset, number)}")


def empty_duckdb() -> "DuckDBPyConnection":
    """Return a connection to an empty database in memory, where a name is a table, never a variable of the caller's."""
    import duckdb as engine

    connection = engine.connect(":memory:", config={"autoinstall_known_extensions": "false"})
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET python_enable_replacements = false")
    return connection


def show_all(connection: "DuckDBPyConnection", datasets: Mapping[TableName, TableDataset], make: "Show | None" = None) -> None:
    """Make each dataset a view `"schema"."table"` by `make` (`show`); of names that differ only in case the first has one."""
    shown: set[tuple[str, str]] = set()
    for number, (name, dataset) in enumerate(datasets.items()):
        if (folded := (name.schema.lower(), name.name.lower())) not in shown:
            shown.add(folded)
            (make or show)(connection, name, dataset, number)


def show(connection: "DuckDBPyConnection", name: TableName, dataset: Any, number: int, columns: str = "*", condition: str = "true") -> None:
    """Make `dataset` a view `"schema"."table"` of the connection; `number` is its own there.

    The view has those `columns` of the rows that meet the `condition`, both as SQL.
    """
    hidden = f"{RESERVED}{number}"
    connection.register(hidden, dataset)
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoting.name(name.schema)}")
    connection.execute(f"CREATE VIEW {view_of(name)} AS SELECT {columns} FROM {quoting.name(hidden)} WHERE {condition}")


def view_of(name: TableName) -> str:
    """Return the name of a table's view in SQL."""
    return f"{quoting.name(name.schema)}.{quoting.name(name.name)}"

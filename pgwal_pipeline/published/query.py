"""Answer SQL from the published tables, and from nothing else.

The query runs in DuckDB, which may open no file and no address, load no extension and read no variable of the process: what it reaches is
the tables that were put in front of it.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pgwal_pipeline.lake.delta import side_by_side
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.published import quoting, readers
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.published.past import PastState, past_columns
from pgwal_pipeline.published.state import PublishedState
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

_BATCH_ROWS = 10_000
_LISTS = re.compile(r"\bshow\b|information_schema|\b(duckdb|pg)_\w+")
_SCHEMA = "public"  # where a name without a schema is searched first, as in Postgres


@contextmanager
def rows_of(state: PublishedState | PastState, sql: str) -> "Iterator[pa.RecordBatchReader]":
    """Run one SELECT on the tables of `state`, and give its rows as they come. Raises PgwalError if the query is wrong, or no SELECT."""
    with tempfile.TemporaryDirectory(prefix="pgwal-query-") as folder, readers.empty_duckdb() as connection, _errors():
        _require_select(connection, sql)
        _show_named(connection, state, sql)
        _shut(connection, folder)
        yield connection.sql(sql).to_arrow_reader(_BATCH_ROWS)


def table_columns(state: PublishedState | PastState) -> dict[str, dict[str, Any]]:
    """Return the published tables by name, each with its columns and their types, as `pgwal query --tables` prints them."""
    datasets = side_by_side(lambda at: TableDataset(at.path, at.version), list(state.tables.values()))
    found = {}
    for name, dataset in zip(state.tables, datasets, strict=True):
        names = past_columns(dataset) if isinstance(state, PastState) else dataset.schema.names
        columns = [{"name": name, "type": _shown(dataset.delta_types[name])} for name in names]
        found[name] = {"columns": columns}
    return found


def _shown(kind: Any) -> str:
    """A type of Delta's as the guides write it."""
    if isinstance(kind, str):
        return kind
    if kind["type"] == "map":
        return f"map<{_shown(kind['keyType'])},{_shown(kind['valueType'])}>"
    return f"array<{_shown(kind['elementType'])}>"


def _require_select(connection: "DuckDBPyConnection", sql: str) -> None:
    import duckdb

    statements = connection.extract_statements(sql)
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise PgwalError("The published tables are only read: write one SELECT.")


def _show_named(connection: "DuckDBPyConnection", state: PublishedState | PastState, sql: str) -> None:
    """Make views of those tables whose name is in the query's text; opening all would take long where there are many.

    A query that asks which tables there are gets all of them.
    """
    published = {TableName.parse(name): at for name, at in state.tables.items()}
    text = sql.lower()
    every = _LISTS.search(text) is not None
    wanted = [table for table in published if every or table.name.lower().replace('"', '""') in text]
    datasets = side_by_side(lambda table: TableDataset(*published[table]), wanted)
    make = state.show if isinstance(state, PastState) else readers.show
    readers.show_all(connection, dict(zip(wanted, datasets, strict=True)), make)
    schemas = sorted({table.schema for table in published}, key=lambda schema: (schema != _SCHEMA, schema))
    for schema in schemas:
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoting.name(schema)}")
    if schemas:
        connection.execute(f"SET search_path = {quoting.text(','.join(map(quoting.name, schemas)))}")


def _shut(connection: "DuckDBPyConnection", folder: str) -> None:
    """Let the connection reach nothing but what it has, and a folder of its own for what does not fit into memory."""
    connection.execute(f"SET temp_directory = {quoting.text(folder)}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextmanager
def _errors() -> Iterator[None]:
    """Turn DuckDB's errors into one sentence."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        said = re.sub(r"\s+", " ", str(error).split("\n\nLINE")[0]).strip().rstrip(".")
        raise PgwalError(f"The query failed: {said}.") from error

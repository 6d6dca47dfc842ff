"""Let DuckDB read a large published table by its own reader of Parquet files, several times faster than through Arrow.

The view does what Delta's protocol asks for: it names the version's files, leaves out the rows that deletion vectors delete, gives columns
their names in the table, and nulls to files from before a column was added.
"""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pgwal_pipeline.published import quoting
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.values.own_columns import RESERVED

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_LARGE = 32 << 20  # bytes of files: below, reading each file's footer to make the view costs more than it saves
_ROWS_OF_A_FILE = 40  # bits for a row's number in its file
_AT = f"{RESERVED}at"


def is_for(dataset: TableDataset) -> bool:
    """Return whether the table is one for this reader: it is large, in local files, and has no column whose values are not in them."""
    return "://" not in dataset.path and not dataset.is_partitioned and dataset.bytes >= _LARGE


def select(connection: "DuckDBPyConnection", dataset: TableDataset, number: int) -> str:
    """Return a SELECT of the table's rows. Its tables in `connection` are marked with `number`."""
    whole = [f"{dataset.path}/{path}" for path, kept in dataset.parts if kept is None]
    cut = [(f"{dataset.path}/{path}", kept) for path, kept in dataset.parts if kept is not None]
    empty = f"{RESERVED}columns_{number}"
    connection.register(empty, dataset.schema.empty_table())
    kinds = [str(kind) for kind in connection.sql(f"FROM {quoting.name(empty)}").types]
    connection.unregister(empty)
    names = list(zip(dataset.schema.names, [dataset.stored_names[name] for name in dataset.schema.names], kinds, strict=True))
    parts = [_of_files(connection, whole, names)] if whole else []
    if cut:
        deleted = f"{RESERVED}deleted_{number}"
        rows = [np.flatnonzero(~kept) + (file << _ROWS_OF_A_FILE) for file, (_, kept) in enumerate(cut)]
        connection.register(f"{deleted}_", pa.table({_AT: pa.array(np.concatenate(rows).astype(np.int64))}))
        connection.execute(f"CREATE TABLE {quoting.name(deleted)} AS FROM {quoting.name(deleted + '_')}")
        connection.unregister(f"{deleted}_")
        place = f"(p.file_index::BIGINT << {_ROWS_OF_A_FILE}) + p.file_row_number"
        without = f"p ANTI JOIN {quoting.name(deleted)} d ON d.{_AT} = {place}"
        parts.append(_of_files(connection, [path for path, _ in cut], names, without))
    if not parts:
        parts = [f"SELECT {', '.join(f'NULL::{kind} AS {quoting.name(name)}' for name, _, kind in names)} WHERE false"]
    return " UNION ALL ".join(parts)


def _of_files(connection: "DuckDBPyConnection", paths: list[str], names: list[tuple[str, str, str]], without: str = "p") -> str:
    files = f"read_parquet([{', '.join(map(quoting.text, paths))}], union_by_name = true, hive_partitioning = false)"
    there = set(connection.sql(f"FROM {files} LIMIT 0").columns)
    columns = ", ".join(
        f"{f'p.{quoting.name(stored)}' if stored in there else 'NULL'}::{kind} AS {quoting.name(name)}" for name, stored, kind in names
    )
    return f"SELECT {columns} FROM {files} {without}"

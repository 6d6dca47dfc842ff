"""Where a `current` table stands: read from its Delta log, without Spark."""

from dataclasses import dataclass

from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.layout import storage_options

FENCE = "pgwal"
"""The application id under which each commit notes the LSN that it brings the table to."""

GENERATION = "pgwal.generation"
"""The table property that names the snapshot on which the table is built."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a table stands: its newest Delta version, the LSN up to which it holds every transaction, and the columns that it has."""

    version: int
    watermark: int
    columns: frozenset[str]


def standing(path: str) -> Standing | None:
    """Where the table at `path` stands; None where there is none that this pipeline made. Raises LakeError when it cannot be read."""
    with lake_errors(path):
        try:
            table = DeltaTable(path, storage_options=storage_options(path))
        except TableNotFoundError:
            return None
        mark = table.transaction_version(FENCE)
        return None if mark is None else Standing(table.version(), mark, frozenset(field.name for field in table.schema().fields))


def open_current(path: str, version: int | None = None) -> DeltaTable | None:
    """The Delta table at `path`, None where there is none. Raises LakeError when it cannot be read."""
    with lake_errors(path):
        try:
            return DeltaTable(path, version=version, storage_options=storage_options(path))
        except TableNotFoundError:
            return None


def watermark(path: str) -> int | None:
    """The LSN up to which the table at `path` holds every transaction; None where there is no table."""
    table = open_current(path)
    return None if table is None else table.transaction_version(FENCE)


def version(path: str) -> int:
    """The newest Delta version of the table at `path`. Raises LakeError where there is none."""
    with lake_errors(path):
        return DeltaTable(path, storage_options=storage_options(path)).version()


def generation(path: str) -> str | None:
    """The snapshot on which the table at `path` is built; None where there is no table, or it does not say."""
    table = open_current(path)
    return None if table is None else table.metadata().configuration.get(GENERATION)


def row_count(path: str, version: int | None = None) -> int:
    """How many rows the table at `path` has, at a version of it or now. Raises LakeError where there is none."""
    with lake_errors(path):
        table = DeltaTable(path, version=version, storage_options=storage_options(path))
        return QueryBuilder().register("t", table).execute("SELECT count(*) AS n FROM t").read_all()["n"][0].as_py()


def written_rows(path: str) -> int:
    """About how many rows the table at `path` has: deleted ones still count until they are written out. Costs a look at the log."""
    table = open_current(path)
    if table is None:
        return 0
    return sum(rows or 0 for rows in table.get_add_actions()["num_records"].to_pylist())


def last_output_rows(path: str) -> int:
    """The rows that the newest commit wrote; 0 where it does not say."""
    with lake_errors(path):
        commits = DeltaTable(path, storage_options=storage_options(path)).history(1)
    return int(commits[0].get("operationMetrics", {}).get("numOutputRows", 0)) if commits else 0

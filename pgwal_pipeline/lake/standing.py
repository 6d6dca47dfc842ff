"""Read the state of a `current` table from its Delta log, without Spark: version, watermark, generation, rows."""

import json
import time
from dataclasses import dataclass

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, Schema
from deltalake.exceptions import TableNotFoundError

from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.layout import filesystem, storage_options
from pgwal_pipeline.values.own_columns import DELETED_LSN

FENCE = "pgwal"
"""The Delta application id under which each commit records the LSN that it brings the table to."""

GENERATION = "pgwal.generation"
"""The table property that names the snapshot on which the table is built."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a `current` table: its newest Delta version, its watermark (the LSN it stands at), and its columns."""

    version: int
    watermark: int
    columns: frozenset[str]


def standing(path: str) -> Standing | None:
    """Return the state of the table at `path`, None if there is none that this pipeline made. Raises LakeError if it cannot be read."""
    with lake_errors(path):
        try:
            table = DeltaTable(path, storage_options=storage_options(path))
        except TableNotFoundError:
            return None
        mark = table.transaction_version(FENCE)
        return None if mark is None else Standing(table.version(), mark, frozenset(field.name for field in table.schema().fields))


def open_current(path: str, version: int | None = None) -> DeltaTable | None:
    """Return the Delta table at `path`, None if there is none. Raises LakeError if it cannot be read."""
    with lake_errors(path):
        try:
            return DeltaTable(path, version=version, storage_options=storage_options(path))
        except TableNotFoundError:
            return None


def watermark(path: str, version: int | None = None) -> int | None:
    """Return the watermark of the table at `path`, the LSN it stands at, now or in a version; None if there is no table."""
    table = open_current(path, version)
    return None if table is None else table.transaction_version(FENCE)


def version(path: str) -> int:
    """Return the newest Delta version of the table at `path`. Raises LakeError if there is none."""
    with lake_errors(path):
        return DeltaTable(path, storage_options=storage_options(path)).version()


def hours_since(path: str, version: int) -> float:
    """Return the age of a version of the table at `path` in hours; if the log no longer has its commit, that of the oldest it has."""
    with lake_errors(path):
        table = DeltaTable(path, storage_options=storage_options(path))
        commits = {commit["version"]: commit["timestamp"] / 1000 for commit in table.history() if "timestamp" in commit}
    made_at = commits.get(version, min(commits.values(), default=time.time()))
    return max(0.0, time.time() - made_at) / 3600


def generation(path: str) -> str | None:
    """Return the snapshot generation on which the table at `path` is built; None if there is no table or it does not record one."""
    table = open_current(path)
    return None if table is None else table.metadata().configuration.get(GENERATION)


def row_count(path: str, version: int | None = None) -> int:
    """Return how many rows the table at `path` has, at a version of it or now; deleted rows that it keeps do not count.

    Raises LakeError if there is none.
    """
    with lake_errors(path):
        table = DeltaTable(path, version=version, storage_options=storage_options(path))
        if any(field.name == DELETED_LSN for field in table.schema().fields):
            living = f"SELECT count(*) AS n FROM t WHERE {DELETED_LSN} IS NULL"
            return QueryBuilder().register("t", table).execute(living).read_all()["n"][0].as_py()
        counts = table.get_add_actions()["num_records"].to_pylist()
        if None not in counts and not pa.table(table.deletion_vectors()).num_rows:
            return sum(counts)
        return QueryBuilder().register("t", table).execute("SELECT count(*) AS n FROM t").read_all()["n"][0].as_py()


def physical_names(table: DeltaTable) -> dict[str, str]:
    """Return the names that a table's columns have in the files and in the log's statistics, by their names in the table."""
    return {field.name: str(field.metadata.get("delta.columnMapping.physicalName", field.name)) for field in table.schema().fields}


def written_rows(path: str) -> int:
    """Return about how many rows the table at `path` has, see `rows_in`; 0 if there is no table."""
    table = open_current(path)
    return 0 if table is None else rows_in(table)


def rows_in(table: DeltaTable) -> int:
    """Return about how many rows a table has, from its log: deleted rows count until their files are rewritten."""
    return sum(rows or 0 for rows in table.get_add_actions()["num_records"].to_pylist())


def last_output_rows(path: str) -> int:
    """Return how many rows the newest commit wrote, 0 if it does not record that."""
    with lake_errors(path):
        commits = DeltaTable(path, storage_options=storage_options(path)).history(1)
    return int(commits[0].get("operationMetrics", {}).get("numOutputRows", 0)) if commits else 0


def content_version(path: str, version: int) -> str:
    """Return what tells the content of the table at `path`, in a version of it, from any other content that it had or will have.

    It is the newest version up to `version` that changed rows or columns, with the table's id. Versions in which files were joined,
    properties set, or nothing but the LSN moved on do not count. Raises LakeError if the table cannot be read.
    """
    with lake_errors(path):
        identity = DeltaTable(path, version=version, storage_options=storage_options(path)).metadata().id
        while version > 0 and not _changes_content(path, version):
            version -= 1
    return f"{identity}-{version}"


def _changes_content(path: str, version: int) -> bool:
    """Return whether a commit changed rows or columns; True if the log does not have it any more."""
    root, folder = _split(path)
    try:
        with filesystem(root).open_input_stream(f"{folder}/_delta_log/{version:020}.json") as stream:
            actions = [json.loads(line) for line in stream.read().splitlines() if line.strip()]
    except FileNotFoundError:
        return True
    if any(action[kind].get("dataChange", True) for action in actions for kind in ("add", "remove") if kind in action):
        return True
    columns = [action["metaData"]["schemaString"] for action in actions if "metaData" in action]
    if not columns:
        return False
    before = open_current(path, version - 1)
    return before is None or _columns(Schema.from_json(columns[-1])) != _columns(before.schema())


def _columns(schema: Schema) -> list[dict[str, object]]:
    """The columns without their comments, which are no content."""
    fields = [json.loads(field.to_json()) for field in schema.fields]
    return [field | {"metadata": {name: value for name, value in field["metadata"].items() if name != "comment"}} for field in fields]


def _split(path: str) -> tuple[str, str]:
    """Return the bucket of `path`, or the root of the file system, and the rest: one client serves all tables."""
    scheme, separator, rest = path.rpartition("://")
    if not separator:
        return "/", path.lstrip("/")
    bucket, _, folder = rest.partition("/")
    return f"{scheme}://{bucket}", folder

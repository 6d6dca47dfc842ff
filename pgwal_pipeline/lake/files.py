"""Find the files of raw and of snapshots that a merge reads, from their Delta logs.

If the files are few, Spark reads them directly and not as a Delta table. Both kinds of table are only appended to, so the files are all
that is needed. Delta's planning of a read runs queries over the whole log, which costs more than the read itself on a small table (a third
of a merge, measured). If the files are many, Spark would ask the store about each, while the log lists them all.

Lost data must not be taken for data that never existed. A read fails if a file is gone, but not if the log's commit is gone too, or the
whole table. So the rows that the log names are compared with those that the ledger counts.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import DataType, StructType

from pgwal_pipeline.lake.columns import literal, null_of, quote
from pgwal_pipeline.lake.standing import open_current
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.own_columns import GENERATION, WINDOW
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FEW = 32
"""Up to this many files Spark lists them on the driver; for more it starts a job."""


@dataclass(frozen=True)
class Files:
    """All files of the table at `table` in a range of its partitions.

    `partition` is the partition column, `keys` are its values. `paths` are relative to the table. `rows` is how many rows the files have,
    None if the log does not say. `bytes` is their size.
    """

    table: str
    schema: StructType
    partition: str
    keys: tuple[str, ...]
    paths: tuple[str, ...]
    rows: int | None
    bytes: int

    def read(self, session: "SparkSession") -> "DataFrame":
        """Return the rows of the files, with the table's schema."""
        if not self.paths:
            return no_rows(session, {field.name: field.dataType for field in self.schema.fields})
        if len(self.paths) > _FEW:
            whole = session.read.format("delta").load(self.table)
            return whole.where(f"{self.partition} BETWEEN {literal(min(self.keys))} AND {literal(max(self.keys))}")
        reader = session.read.schema(self.schema).option("basePath", self.table).option("__globPaths__", "false")
        return reader.parquet(*(f"{self.table}/{path}" for path in self.paths))


def no_rows(session: "SparkSession", kinds: Mapping[str, DataType]) -> "DataFrame":
    """Return a DataFrame without rows, with these columns (name to type)."""
    return session.range(0).selectExpr(*(f"{null_of(kind)} AS {quote(name)}" for name, kind in kinds.items()))


def changes(raw_path: str, from_lsn: int, to_lsn: int) -> Files | None:
    """Return the files of raw for the windows that end after `from_lsn` and up to `to_lsn`; None if there is no table."""
    first, last = window_key(from_lsn), window_key(to_lsn)
    return _files(raw_path, WINDOW, lambda key: first < key <= last)


def snapshot(snapshot_path: str, generation: str) -> Files | None:
    """Return the files of a snapshot's generation; None if there is no table."""
    return _files(snapshot_path, GENERATION, lambda name: name == generation)


def require(table: TableName, expected: int, found: Mapping[str, Files | None]) -> None:
    """Raise LakeError if the files found at these paths have fewer rows together than the `expected` number, which is the ledger's.

    A snapshot may have more rows, from attempts that died.
    """
    rows = [0 if files is None else files.rows for files in found.values()]
    there = sum(filter(None, rows))
    if None not in rows and there < expected:
        raise LakeError(
            f"{table}: {' and '.join(found)} {'has' if len(found) == 1 else 'have'} {there} of the {expected} rows that the ledger counts "
            f"there, so files are missing: restore them from a copy of the lake, or run `pgwal resnapshot '{table}'`."
        )


def _files(path: str, partition: str, wanted: Callable[[str], bool]) -> Files | None:
    table = open_current(path)
    if table is None:
        return None
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    named = pa.table(table.get_add_actions(flatten=True))
    if not named.num_rows:
        return Files(path, schema, partition, (), (), 0, 0)
    columns = (named[name].to_pylist() for name in (f"partition.{partition}", "path", "num_records", "size_bytes"))
    found = [(str(key), *file) for key, *file in zip(*columns, strict=True) if wanted(str(key))]
    keys, paths, counts, sizes = zip(*found, strict=True) if found else ((), (), (), ())
    return Files(path, schema, partition, keys, paths, None if None in counts else sum(counts), sum(sizes))

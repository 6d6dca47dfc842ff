"""The files of raw and of snapshots that a merge reads, as their Delta logs name them.

Spark is given a few files as they are rather than the table: both kinds of table are only ever appended to, so a file is all there is to
know, while Delta's own planning of a read runs queries over the whole log, which on a table of some rows cost more than the read itself (a
third of a merge, measured). About many files Spark would ask the store one by one, and the log knows them all.

What is gone must not be taken for what never was: a file that is gone fails whoever reads it, while a commit of the log that is gone with
it, or the whole table, fails nobody. So the rows that the log names are compared with those that the ledger counts.
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
"""Up to so many files Spark looks for them from where it plans; a job of its own would be started for more."""


@dataclass(frozen=True)
class Files:
    """Files of the table at `table`: all of those with some keys of its partition column, which follow one another.

    `paths` are theirs in the table; `rows` is how many rows they have, None where the log does not say.
    """

    table: str
    schema: StructType
    partition: str
    keys: tuple[str, ...]
    paths: tuple[str, ...]
    rows: int | None

    def read(self, session: "SparkSession") -> "DataFrame":
        """Their rows, of the table's schema."""
        if not self.paths:
            return no_rows(session, {field.name: field.dataType for field in self.schema.fields})
        if len(self.paths) > _FEW:
            whole = session.read.format("delta").load(self.table)
            return whole.where(f"{self.partition} BETWEEN {literal(min(self.keys))} AND {literal(max(self.keys))}")
        reader = session.read.schema(self.schema).option("basePath", self.table).option("__globPaths__", "false")
        return reader.parquet(*(f"{self.table}/{path}" for path in self.paths))


def no_rows(session: "SparkSession", kinds: Mapping[str, DataType]) -> "DataFrame":
    """No row of such columns."""
    return session.range(0).selectExpr(*(f"{null_of(kind)} AS {quote(name)}" for name, kind in kinds.items()))


def changes(raw_path: str, from_lsn: int, to_lsn: int) -> Files | None:
    """The files of raw with the windows after `from_lsn` up to that of `to_lsn`; None where there is no table."""
    first, last = window_key(from_lsn), window_key(to_lsn)
    return _files(raw_path, WINDOW, lambda key: first < key <= last)


def snapshot(snapshot_path: str, generation: str) -> Files | None:
    """The files of a snapshot's generation; None where there is no table."""
    return _files(snapshot_path, GENERATION, lambda name: name == generation)


def require(table: TableName, counted: int, found: Mapping[str, Files | None]) -> None:
    """Raises LakeError where the files found at these places have less rows together than the `counted` ones of the ledger.

    A snapshot may have more: of attempts that died.
    """
    rows = [0 if files is None else files.rows for files in found.values()]
    there = sum(filter(None, rows))
    if None not in rows and there < counted:
        raise LakeError(
            f"{table}: {' and '.join(found)} {'has' if len(found) == 1 else 'have'} {there} of the {counted} rows that the ledger counts "
            f"there, so that files of it are gone: restore them from a copy of the lake, or run `pgwal resnapshot '{table}'`."
        )


def _files(path: str, partition: str, wanted: Callable[[str], bool]) -> Files | None:
    table = open_current(path)
    if table is None:
        return None
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    named = pa.table(table.get_add_actions(flatten=True))
    if not named.num_rows:
        return Files(path, schema, partition, (), (), 0)
    columns = (named[name].to_pylist() for name in (f"partition.{partition}", "path", "num_records"))
    found = [(str(key), file, rows) for key, file, rows in zip(*columns, strict=True) if wanted(str(key))]
    keys, paths, counts = zip(*found, strict=True) if found else ((), (), ())
    return Files(path, schema, partition, keys, paths, None if None in counts else sum(counts))

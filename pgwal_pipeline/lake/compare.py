"""Compare the rows of two tables, value by value.

NaN equals NaN, -0.0 does not equal 0.0, and the texts in `_pgwal_text` of the compared columns count. Only counts leave the executors.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import write_deltalake
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from pgwal_pipeline.lake import frozen
from pgwal_pipeline.lake.bag import with_texts
from pgwal_pipeline.lake.columns import exact_row, key_parts, same_types
from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.isolation import conf_for, failures, isolated
from pgwal_pipeline.lake.layout import filesystem, storage_options
from pgwal_pipeline.lake.standing import written_rows
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.own_columns import TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison, in rows: expected, missing, extra, and `different` (same key, other values).

    Without a key `different` is 0: such a row counts as one missing and one extra.
    """

    rows: int
    missing: int
    extra: int
    different: int

    @property
    def equal(self) -> bool:
        """Whether both tables hold the same rows."""
        return not (self.missing or self.extra or self.different)


def compare(
    spark: "SparkSession",
    expected: str,
    actual: str,
    version: int | None = None,
    *,
    key: Sequence[str],
    columns: Sequence[str] | None = None,
    kept_json: str | None = None,
    arriving_json: str | None = None,
) -> Comparison:
    """Compare `actual` with `expected`, the paths of two Delta tables, by `key`, or as bags of rows if it is empty.

    `version` is that of `actual`, by default the newest. `columns` are the columns to compare, by default all of the expected ones; their
    texts in `_pgwal_text` are compared if both tables have it. `arriving_json` is the schema of those columns in `expected`, if `actual`
    keeps other types, which `kept_json` has. Raises LakeError for a column that `actual` lacks or has with another type, or if Spark fails.
    """
    with isolated(spark, conf_for(written_rows(expected) + written_rows(actual))) as session:
        ours = _read(session, expected, None)
        if kept_json is not None:
            ours = frozen.as_kept(ours, ours.schema, StructType.fromJson(json.loads(kept_json)), arriving_json)[0]
        theirs = _read(session, actual, version)
        names = [name for name in (ours.columns if columns is None else columns) if name != TEXT]
        identity = with_texts if TEXT in ours.columns and TEXT in theirs.columns else exact_row
        _check(ours.schema, theirs.schema, names)
        with failures("comparing"):
            sides = _side(ours, identity(ours.schema, names), key, 1).unionByName(_side(theirs, identity(theirs.schema, names), key, 0))
            groups = sides.groupBy("row_key").agg(
                F.sum("expected").alias("wanted"),
                F.sum(1 - F.col("expected")).alias("found"),
                F.min("row").alias("least"),
                F.max("row").alias("most"),
            )
            short, over = F.greatest(F.col("wanted") - F.col("found"), F.lit(0)), F.greatest(F.col("found") - F.col("wanted"), F.lit(0))
            differs = (F.col("wanted") > 0) & (F.col("found") > 0) & (F.col("least") != F.col("most"))
            counts = groups.agg(F.sum("wanted"), F.sum(short), F.sum(over), F.sum(differs.cast("int"))).collect()[0]
    return Comparison(*(count or 0 for count in counts))


def write(path: str, rows: pa.Table) -> None:
    """Append rows to the Delta table at `path`, which is created if needed. Raises LakeError if the lake cannot be written."""
    with lake_errors(path):
        write_deltalake(path, rows, mode="append", storage_options=storage_options(path))


def remove(path: str) -> None:
    """Remove the Delta table at `path` with its files, if there is one. Raises LakeError if the lake cannot be written."""
    with lake_errors(path):
        found = filesystem(path)
        if found.get_file_info("").type == pafs.FileType.Directory:
            found.delete_dir_contents("", accept_root_dir=True, missing_dir_ok=True)


def _read(spark: "SparkSession", table: str, version: int | None) -> "DataFrame":
    reader = spark.read.format("delta")
    with failures(table):
        return (reader if version is None else reader.option("versionAsOf", version)).load(table)


def _side(rows: "DataFrame", identity: str, key: Sequence[str], expected: int) -> "DataFrame":
    row = F.expr(identity).alias("row")
    if not key:
        return rows.select(row.alias("row_key"), F.lit(None).cast("string").alias("row"), F.lit(expected).alias("expected"))
    parts = ", ".join(f"'k{number}', {part}" for number, part in enumerate(key_parts(rows.schema, key)))
    return rows.select(F.expr(f"named_struct({parts})").alias("row_key"), row, F.lit(expected).alias("expected"))


def _check(ours: StructType, theirs: StructType, names: Sequence[str]) -> None:
    for name in names:
        if name not in theirs.names:
            raise LakeError(
                f"The table to be verified has no column {name!r}, which the source has; publish first, or read the table again."
            )
        if not same_types(ours[name].dataType, theirs[name].dataType):
            raise LakeError(
                f"The column {name!r} is {theirs[name].dataType.simpleString()} in the table to be verified and "
                f"{ours[name].dataType.simpleString()} in the source; read the table again with `pgwal resnapshot`."
            )

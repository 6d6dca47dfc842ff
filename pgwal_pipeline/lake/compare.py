"""Compare the rows of two tables, value by value.

NaN equals NaN, -0.0 does not equal 0.0, and the texts in `_pgwal_text` of the compared columns count. Only counts leave the executors, and
the keys of some rows that differ.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import write_deltalake
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from pgwal_pipeline.lake import fold, frozen, kept
from pgwal_pipeline.lake.bag import with_texts
from pgwal_pipeline.lake.columns import exact, exact_row, key_parts, literal, quote, same_types, text_of
from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.isolation import conf_for, failures, isolated
from pgwal_pipeline.lake.layout import filesystem, storage_options
from pgwal_pipeline.lake.standing import written_rows
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.own_columns import TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_EXAMPLES = 10
_HERE = "_pgwal_here"


@dataclass(frozen=True, slots=True)
class Example:
    """A row that differs: its key as texts, what is wrong with it, and the columns whose values differ."""

    key: tuple[str | None, ...]
    kind: Literal["missing", "extra", "different"]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison, in rows: expected, missing, extra, and `different` (same key, other values).

    Without a key `different` is 0: such a row counts as one missing and one extra. `examples` are some of the rows, by key.
    """

    rows: int
    missing: int
    extra: int
    different: int
    examples: tuple[Example, ...] = ()

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
    keys: str | None = None,
    kept_json: str | None = None,
    arriving_json: str | None = None,
) -> Comparison:
    """Compare `actual` with `expected`, the paths of two Delta tables, by `key`, or as bags of rows if it is empty.

    Deleted rows that `actual` keeps do not count. `version` is that of `actual`, by default the newest. `columns` are the columns to
    compare, by default all of the expected ones; their texts in `_pgwal_text` are compared if both tables have it. `arriving_json` is the
    schema of the columns in `expected`, if `actual` keeps other types, which `kept_json` has. Raises LakeError for a column that `actual`
    lacks or has with another type, or if Spark fails. With `keys`, the path of a Delta table with the key's columns and `_pgwal_text`, only
    rows of `actual` with such keys are compared.
    """
    with isolated(spark, conf_for(written_rows(expected) + written_rows(actual))) as session:
        ours = _read(session, expected, None)
        if kept_json is not None:
            ours = frozen.as_kept(ours, ours.schema, StructType.fromJson(json.loads(kept_json)), arriving_json)[0]
        whole = _read(session, actual, version)
        theirs = kept.living(whole, whole.columns)
        if keys is not None:
            theirs = fold.matching(theirs, _read(session, keys, None), key)
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
            rows, missing, extra, different = (count or 0 for count in counts)
            found = Comparison(rows, missing, extra, different)
            return found if found.equal or not key else replace(found, examples=_examples(ours, theirs, key, names))


def _examples(ours: "DataFrame", theirs: "DataFrame", key: Sequence[str], names: Sequence[str]) -> tuple[Example, ...]:
    """Some of the rows that differ, in the order of their keys."""
    schema = ours.schema
    pairs = zip(key_parts(schema, key, "o"), key_parts(theirs.schema, key, "t"), strict=True)
    same = F.expr(" AND ".join(f"{one} <=> {other}" for one, other in pairs))
    both = ours.withColumn(_HERE, F.lit(True)).alias("o").join(theirs.withColumn(_HERE, F.lit(True)).alias("t"), same, "full_outer")
    texts = TEXT in schema.names and TEXT in theirs.schema.names

    def differs(name: str) -> str:
        found = f"NOT ({exact(schema, name, 'o')} <=> {exact(theirs.schema, name, 't')})"
        return f"{found} OR NOT ({text_of(name, 'o')} <=> {text_of(name, 't')})" if texts else found

    columns = ", ".join(f"CASE WHEN {differs(name)} THEN {literal(name)} END" for name in names)
    kind = f"CASE WHEN t.{_HERE} IS NULL THEN 'missing' WHEN o.{_HERE} IS NULL THEN 'extra' ELSE 'different' END AS kind"
    parts = [f"coalesce({_as_text(name, 'o', texts)}, {_as_text(name, 't', texts)})" for name in key]
    judged = both.selectExpr(f"array({', '.join(parts)}) AS key", kind, f"array_compact(array({columns})) AS columns")
    rows = judged.where("kind <> 'different' OR size(columns) > 0").orderBy("key").limit(_EXAMPLES).collect()
    return tuple(Example(tuple(row["key"]), row["kind"], tuple(row["columns"]) if row["kind"] == "different" else ()) for row in rows)


def _as_text(name: str, alias: str, texts: bool) -> str:
    value = f"cast({quote(name, alias)} AS string)"
    return f"coalesce({text_of(name, alias)}, {value})" if texts else value


def count(spark: "SparkSession", path: str, version: int, key: Sequence[str]) -> int:
    """Return how many living rows a version of the Delta table at `path` has, by reading its key and not only what its log says."""
    with isolated(spark, conf_for(written_rows(path))) as session, failures(path):
        whole = _read(session, path, version)
        one = f"sum(CASE WHEN {quote(key[0])} IS NULL THEN 1 ELSE 1L END) AS rows"
        return kept.living(whole, whole.columns).selectExpr(one).collect()[0]["rows"] or 0


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

"""A snapshot's rows brought up to date: an event counts unless its transaction was visible to the read of the row's chunk.

Where the snapshot has no row of a key, the events that all of its chunks saw came to none: they may be of another table, which had the name
before. Of a key's events those that its chunk saw come first, since a row is changed by one
transaction after the other: so the snapshot row is one more step, right behind the last event that it has seen, and the fold does the
rest. Events before it still serve, as the only place of values that a row took along to another key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DataType, IntegerType, LongType, MapType, StringType, StructField, StructType

from pgwal_pipeline.errors import TableError
from pgwal_pipeline.lake import bag, fold
from pgwal_pipeline.lake.columns import CHUNK, COMMIT_LSN, OP, ORDINAL, TEXT, UNCHANGED, XID, key_parts, null_of, quote
from pgwal_pipeline.lake.files import no_rows
from pgwal_pipeline.lake.fold import AT_LSN, AT_ORDINAL, BEFORE_ALL, ChunkSnapshot, Shape, Traits, Truncate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_NUMBER = "_pgwal_chunk_number"
_CHUNK_SCHEMA = pa.schema(
    [
        (_NUMBER, pa.int32()),
        (CHUNK, pa.string()),
        ("_pgwal_low", pa.int64()),
        ("_pgwal_high", pa.int64()),
        ("_pgwal_running", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True)
class Source:
    """A snapshot: what each chunk saw, and the LSN that its rows get. DataFrames are made in `spark`."""

    spark: "SparkSession"
    chunks: tuple[ChunkSnapshot, ...]
    lsn: int

    def chunk_table(self) -> "DataFrame":
        """The chunks, numbered, as a small DataFrame."""
        snapshots = [chunk.snapshot for chunk in self.chunks]
        columns = [
            range(len(self.chunks)),
            [chunk.attempt for chunk in self.chunks],
            [snapshot.low for snapshot in snapshots],
            [snapshot.high for snapshot in snapshots],
            [sorted(snapshot.running) for snapshot in snapshots],
        ]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, _CHUNK_SCHEMA.types, strict=True)]
        # As Arrow: of Python rows Spark would make an RDD that needs Python on the executors.
        return self.spark.createDataFrame(pa.table(arrays, _CHUNK_SCHEMA))


def column_types(shape: Shape, snapshot: "DataFrame | None", raw: "DataFrame | None") -> StructType:
    """The type of each column: the snapshot's, or raw's for one that the snapshot lacks. Raises TableError for one that neither has."""
    found = []
    for name in shape.columns:
        holder = next((frame.schema for frame in (snapshot, raw) if frame is not None and name in frame.columns), None)
        if holder is None:
            raise TableError(
                str(shape.table),
                f"{shape.table}: neither its snapshot nor raw has the column {name!r}; run `pgwal resnapshot '{shape.table}'`.",
            )
        found.append(StructField(name, holder[name].dataType))
    return StructType(found)


def no_events(spark: "SparkSession", types: StructType) -> "DataFrame":
    """Raw, of a table of which no event has ever come."""
    text, number = StringType(), LongType()
    own = {OP: text, COMMIT_LSN: number, ORDINAL: number, XID: number, UNCHANGED: ArrayType(text), TEXT: MapType(text, text)}
    return _none_of(spark, types, own)


def _none_of(spark: "SparkSession", types: StructType, own: Mapping[str, DataType]) -> "DataFrame":
    return no_rows(spark, {field.name: field.dataType for field in types.fields} | dict(own))


def snapshot_rows(source: Source, snapshot: "DataFrame | None", shape: Shape, types: StructType, truncate: Truncate | None) -> "DataFrame":
    """The rows that the chunks of `source` read and `truncate` left, with the chunk's number and `_pgwal_commit_lsn`.

    A TRUNCATE took the rows of the chunks that did not see it. What attempts that died left behind is not among the rows, nor is the row of
    a key that was read again by itself.
    """
    if snapshot is None:
        own = {COMMIT_LSN: LongType(), TEXT: MapType(StringType(), StringType()), _NUMBER: IntegerType()}
        return _none_of(source.spark, types, own)
    standing = [number for number, chunk in enumerate(source.chunks) if truncate is None or chunk.snapshot.sees(truncate.xid)]
    known = source.chunk_table().where(F.col(_NUMBER).isin(standing)).select(_NUMBER, F.col(CHUNK).alias("_pgwal_attempt"))
    read = snapshot.join(F.broadcast(known), F.col(CHUNK) == F.col("_pgwal_attempt"))
    values = [
        F.col(quote(name)) if name in snapshot.columns else F.expr(null_of(types[name].dataType)).alias(name) for name in shape.columns
    ]
    rows = read.select(*values, F.lit(source.lsn).cast("long").alias(COMMIT_LSN), TEXT, _NUMBER)
    if not any(chunk.single for chunk in source.chunks):
        return rows
    newest_first = Window.partitionBy(*(F.expr(part) for part in key_parts(rows.schema, shape.key))).orderBy(F.col(_NUMBER).desc())
    return rows.withColumn("_pgwal_nth", F.row_number().over(newest_first)).where("_pgwal_nth = 1").drop("_pgwal_nth")


def rows_of_keys(
    source: Source, rows: "DataFrame", steps: "DataFrame", shape: Shape, traits: Traits
) -> "tuple[DataFrame, DataFrame | None]":
    """The table's rows as of the end of the steps, on top of the snapshot's `rows`; and the changes that lack values, None where none can.

    Reading the rows fails with `fold.unsent_marker` if any value is nowhere.
    """
    touched = fold.matching(rows, steps, shape.key)
    placed = _placed(source, touched, steps, shape)
    if source.chunks:
        placed = placed.unionByName(_absences(source, touched, steps, shape))
    renewed, lacking = fold.rows_alone(fold.net(placed, shape, traits), shape)
    untouched = fold.matching(rows, steps, shape.key, "left_anti").select(*(F.col(quote(name)) for name in renewed.columns))
    return untouched.unionByName(renewed), lacking


def rows_of_bag(source: Source, rows: "DataFrame", steps: "DataFrame", shape: Shape) -> "DataFrame":
    """The rows of a table without a key as of the end of the steps, some of which the one snapshot of all its chunks has seen.

    Reading the rows fails with `bag.missing_marker` if a row that was deleted is not there.
    """
    if len({chunk.snapshot_text for chunk in source.chunks}) > 1:
        raise ValueError(f"{shape.table} has no key and was not read under one snapshot")
    snapshot = F.broadcast(source.chunk_table().limit(1).drop(CHUNK, _NUMBER))
    unseen = (
        steps.join(snapshot, how="cross").where(~visible()).select(*(F.col(quote(name)) for name in steps.columns))
        if source.chunks
        else steps
    )
    return bag.applied(bag.counted(unseen, shape), rows, shape)


def _placed(source: Source, touched: "DataFrame", steps: "DataFrame", shape: Shape) -> "DataFrame":
    """Events and snapshot rows as the steps of their keys."""
    whole = fold.whole_rows(touched, shape, F.col(_NUMBER))
    both = steps.withColumn(_NUMBER, F.lit(None).cast("int")).unionByName(whole)
    of_key = Window.partitionBy(*(F.expr(part) for part in key_parts(both.schema, shape.key)))
    known = F.broadcast(source.chunk_table().drop(CHUNK).withColumnRenamed(_NUMBER, "_pgwal_seen_by"))
    numbered = both.withColumn(_NUMBER, F.max(_NUMBER).over(of_key))
    judged = numbered.join(known, F.col(_NUMBER) == F.col("_pgwal_seen_by"), "left")
    place = F.struct(F.col(AT_LSN).alias("lsn"), F.col(AT_ORDINAL).alias("ordinal"))
    seen = F.max(F.when((F.col(OP) != "S") & visible(), place)).over(of_key)
    is_whole = F.col(OP) == "S"
    return (
        judged.withColumn("_pgwal_seen", seen)
        .withColumn(AT_LSN, F.when(is_whole, F.coalesce("_pgwal_seen.lsn", F.lit(BEFORE_ALL).cast("long"))).otherwise(F.col(AT_LSN)))
        .withColumn(
            AT_ORDINAL, F.when(is_whole, F.coalesce("_pgwal_seen.ordinal", F.lit(BEFORE_ALL).cast("long"))).otherwise(F.col(AT_ORDINAL))
        )
        .select(*(F.col(quote(name)) for name in steps.columns))
    )


def _absences(source: Source, touched: "DataFrame", steps: "DataFrame", shape: Shape) -> "DataFrame":
    """That there is no row of a key behind the last of its events which all chunks saw, for keys without a snapshot row, as steps.

    What the first of the snapshots saw the others have seen as well.
    """
    numbers = range(len(source.chunks))
    snapshots = [chunk.snapshot for chunk in source.chunks]
    first = min(numbers, key=lambda number: (snapshots[number].high, -len(snapshots[number].running)))
    known = F.broadcast(source.chunk_table().where(F.col(_NUMBER) == first).drop(CHUNK, _NUMBER))
    seen = steps.join(known, how="cross").where(visible())
    of_key = (F.expr(part).alias(f"_pgwal_k{number}") for number, part in enumerate(key_parts(steps.schema, shape.key)))
    place = F.max(F.struct(F.col(AT_LSN).alias("lsn"), F.col(AT_ORDINAL).alias("ordinal"))).alias("_pgwal_place")
    newest = F.max_by(F.struct(*(F.col(quote(name)) for name in (*shape.key, TEXT))), F.struct(AT_LSN, AT_ORDINAL)).alias("_pgwal_newest")
    found = seen.groupBy(*of_key).agg(place, newest)
    values = [
        (F.col(f"_pgwal_newest.{quote(name)}") if name in shape.key else F.expr(null_of(steps.schema[name].dataType))).alias(name)
        for name in shape.columns
    ]
    absent = found.select(
        *values,
        F.lit("A").alias(OP),
        F.col("_pgwal_place.lsn").alias(COMMIT_LSN),
        F.lit(None).cast("long").alias(XID),
        F.col(f"_pgwal_newest.{TEXT}").alias(TEXT),
        F.lit(None).cast("array<string>").alias(UNCHANGED),
        F.col("_pgwal_place.lsn").alias(AT_LSN),
        F.col("_pgwal_place.ordinal").alias(AT_ORDINAL),
    )
    return fold.matching(absent, touched, shape.key, "left_anti")


def visible() -> "Column":
    """Whether the transaction of an event, of which 32 bits are known, is visible in the snapshot beside it; null without one."""
    distance = F.pmod(F.col(XID) - F.col("_pgwal_high"), F.lit(1 << 32))
    full = F.col("_pgwal_high") + F.when(distance >= 1 << 31, distance - (1 << 32)).otherwise(distance)
    return (full < F.col("_pgwal_low")) | ((full < F.col("_pgwal_high")) & ~F.array_contains("_pgwal_running", full))

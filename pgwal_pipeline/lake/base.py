"""Apply events on top of a snapshot's rows: an event counts unless its transaction was visible when the row's chunk was read.

A chunk saw a key's events up to some point and none after it, because transactions change a row one after the other. So the snapshot row
becomes one more step, right after the last event that it includes, and the fold does the rest. The events before it are still needed: they
may be the only source of values that a row took to another key.

If the snapshot has no row of a key, the events that all of its chunks saw left no row: they may belong to another table, which had the name
before.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import IntegerType, LongType, MapType, StringType, StructField, StructType

from pgwal_pipeline.lake import bag, fold, kept
from pgwal_pipeline.lake.columns import key_parts, null_of, quote
from pgwal_pipeline.lake.files import no_rows
from pgwal_pipeline.lake.fold import AT_LSN, AT_ORDINAL, BEFORE_ALL, NO_NAMES, PLACE, ChunkSnapshot, Shape, Traits, Truncate
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.values.own_columns import CHUNK, COMMIT_LSN, COMMITTED_AT, OP, TEXT, UNCHANGED, XID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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

_DISTANCE = f"pmod({XID} - _pgwal_high, {1 << 32}L)"
_FULL = f"(_pgwal_high + CASE WHEN {_DISTANCE} >= {1 << 31}L THEN {_DISTANCE} - {1 << 32}L ELSE {_DISTANCE} END)"
_VISIBLE = f"({_FULL} < _pgwal_low OR {_FULL} < _pgwal_high AND NOT array_contains(_pgwal_running, {_FULL}))"
"""Whether the transaction of an event (32-bit xid) is visible in the snapshot joined to it; null where no snapshot is joined."""


@dataclass(frozen=True)
class Source:
    """A table's snapshot: what each chunk saw, and the LSN that its rows get. `spark` is the session for its DataFrames."""

    spark: "SparkSession"
    chunks: tuple[ChunkSnapshot, ...]
    lsn: int

    @cached_property
    def chunk_table(self) -> "DataFrame":
        """The chunks as a small DataFrame, numbered from 0."""
        snapshots = [chunk.snapshot for chunk in self.chunks]
        columns = [
            range(len(self.chunks)),
            [chunk.attempt for chunk in self.chunks],
            [snapshot.low for snapshot in snapshots],
            [snapshot.high for snapshot in snapshots],
            [sorted(snapshot.running) for snapshot in snapshots],
        ]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, _CHUNK_SCHEMA.types, strict=True)]
        # Arrow, because Spark would turn Python rows into an RDD that needs Python on the executors.
        return self.spark.createDataFrame(pa.table(arrays, _CHUNK_SCHEMA))


def column_types(shape: Shape, snapshot: "DataFrame | None", raw: "DataFrame | None") -> StructType:
    """Return the type of each column: the snapshot's, or raw's if the snapshot lacks it. Raises TableError if both lack a column."""
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


def snapshot_rows(source: Source, snapshot: "DataFrame | None", shape: Shape, types: StructType, truncate: Truncate | None) -> "DataFrame":
    """Return the rows that the chunks of `source` read, with the chunk's number and `_pgwal_commit_lsn`.

    Left out are rows that `truncate` removed (those of chunks that did not see it), rows of attempts that died, and the earlier row of a
    key that was read again by itself.
    """
    if snapshot is None:
        own = {COMMIT_LSN: LongType(), TEXT: MapType(StringType(), StringType()), _NUMBER: IntegerType()}
        return no_rows(source.spark, {field.name: field.dataType for field in types.fields} | own)
    known = source.chunk_table.selectExpr(_NUMBER, f"{CHUNK} AS _pgwal_attempt")
    if truncate is not None:
        standing = [str(number) for number, chunk in enumerate(source.chunks) if chunk.snapshot.sees(truncate.xid)]
        known = known.where(f"{_NUMBER} IN ({', '.join(standing)})" if standing else "false")
    read = snapshot.join(F.broadcast(known), F.expr(f"{CHUNK} = _pgwal_attempt"))
    held = snapshot.columns
    values = [quote(name) if name in held else f"{null_of(types[name].dataType)} AS {quote(name)}" for name in shape.columns]
    rows = read.selectExpr(*values, f"{source.lsn}L AS {COMMIT_LSN}", TEXT, _NUMBER)
    if not any(chunk.single for chunk in source.chunks):
        return rows
    of_key = ", ".join(key_parts(rows.schema, shape.key))
    nth = f"row_number() OVER (PARTITION BY {of_key} ORDER BY {_NUMBER} DESC) AS _pgwal_nth"
    return rows.selectExpr("*", nth).where("_pgwal_nth = 1").drop("_pgwal_nth")


def rows_as_read(source: Source, snapshot: "DataFrame | None", shape: Shape, types: StructType) -> "DataFrame":
    """Return the table's rows for a snapshot without any events to apply."""
    return snapshot_rows(source, snapshot, shape, types, None).selectExpr(*map(quote, shape.columns), COMMIT_LSN, TEXT)


def rows_of_keys(
    source: Source, rows: "DataFrame", steps: "DataFrame", types: StructType, shape: Shape, traits: Traits
) -> "tuple[DataFrame, DataFrame | None, DataFrame | None]":
    """Return the snapshot's `rows` with the steps applied, and the changes that lack a value (None if no change can lack one).

    The third part is the changes of keys that have no row any more, if deleted rows stay, else None.

    Reading the rows fails with `fold.unsent_marker` if any change lacks a value.
    """
    touched = fold.matching(rows, steps, shape.key)
    placed = _placed(source, touched, steps, shape)
    if source.chunks:
        placed = placed.unionByName(_absences(source, touched, steps, shape))
    gone = None
    if shape.keeps:
        changes = kept.net(placed, types, shape, traits)
        gone = changes.where(fold.GONE)
        changes = changes.where(f"NOT {fold.GONE}").drop(fold.KNOWN, COMMITTED_AT)
    else:
        changes = fold.net(placed, types, shape, traits)
    renewed, lacking = fold.rows_alone(changes, shape, traits)
    untouched = fold.matching(rows, steps, shape.key, "left_anti").selectExpr(*map(quote, renewed.columns))
    return untouched.unionByName(renewed), lacking, gone


def rows_of_bag(source: Source, rows: "DataFrame", steps: "DataFrame", shape: Shape) -> "DataFrame":
    """Return the snapshot's `rows` of a table without a key, with the steps applied that the snapshot does not include.

    Reading the rows fails with `bag.missing_marker` if a row to be deleted is missing. Raises ValueError if the chunks were read under
    different snapshots.
    """
    if len({chunk.snapshot_text for chunk in source.chunks}) > 1:
        raise ValueError(f"{shape.table} has no key and was not read under one snapshot")
    unseen = steps
    if source.chunks:
        snapshot = F.broadcast(source.chunk_table.limit(1).drop(CHUNK, _NUMBER))
        unseen = steps.join(snapshot, how="cross").where(f"NOT {_VISIBLE}").selectExpr(*map(quote, steps.columns))
    return bag.applied(bag.counted(unseen, shape), rows, shape)


def _placed(source: Source, touched: "DataFrame", steps: "DataFrame", shape: Shape) -> "DataFrame":
    """The events and the snapshot rows as steps; each row right after the last event that its chunk saw."""
    both = steps.selectExpr("*", f"CAST(NULL AS int) AS {_NUMBER}").unionByName(fold.whole_rows(touched, shape, _NUMBER))
    of_key = f"OVER (PARTITION BY {', '.join(key_parts(both.schema, shape.key))})"
    known = F.broadcast(source.chunk_table.drop(CHUNK).withColumnRenamed(_NUMBER, "_pgwal_seen_by"))
    numbered = both.withColumn(_NUMBER, F.expr(f"max({_NUMBER}) {of_key}"))
    judged = numbered.join(known, F.expr(f"{_NUMBER} = _pgwal_seen_by"), "left")
    seen = f"max(CASE WHEN {OP} != 'S' AND {_VISIBLE} THEN {PLACE} END) {of_key} AS _pgwal_seen"
    moved = {
        AT_LSN: f"CASE WHEN {OP} = 'S' THEN coalesce(_pgwal_seen.lsn, {BEFORE_ALL}L) ELSE {AT_LSN} END AS {AT_LSN}",
        AT_ORDINAL: f"CASE WHEN {OP} = 'S' THEN coalesce(_pgwal_seen.ordinal, {BEFORE_ALL}L) ELSE {AT_ORDINAL} END AS {AT_ORDINAL}",
    }
    return judged.selectExpr("*", seen).selectExpr(*(moved.get(name, quote(name)) for name in steps.columns))


def _absences(source: Source, touched: "DataFrame", steps: "DataFrame", shape: Shape) -> "DataFrame":
    """For each key without a snapshot row a step `A`, right after the last of its events that all chunks saw.

    All chunks saw what the earliest of the snapshots sees.
    """
    numbers = range(len(source.chunks))
    snapshots = [chunk.snapshot for chunk in source.chunks]
    first = min(numbers, key=lambda number: (snapshots[number].high, -len(snapshots[number].running)))
    known = F.broadcast(source.chunk_table.where(f"{_NUMBER} = {first}").drop(CHUNK, _NUMBER))
    seen = steps.join(known, how="cross").where(_VISIBLE)
    of_key = map(F.expr, fold.numbered(key_parts(steps.schema, shape.key)))
    known = [TEXT, f"CASE WHEN {OP} IN ('D', 'K') THEN {COMMITTED_AT} END AS at"] if shape.keeps else [TEXT]
    newest = f"max_by(struct({', '.join([*map(quote, shape.key), *known])}), struct({AT_LSN}, {AT_ORDINAL})) AS _pgwal_newest"
    found = seen.groupBy(*of_key).agg(F.expr(f"max({PLACE}) AS _pgwal_place"), F.expr(newest))
    kinds = {name: steps.schema[name].dataType for name in shape.columns}
    values = {name: f"_pgwal_newest.{quote(name)}" if name in shape.key else null_of(kind) for name, kind in kinds.items()}
    absent = found.selectExpr(
        *(f"{value} AS {quote(name)}" for name, value in values.items()),
        f"'A' AS {OP}",
        f"_pgwal_place.lsn AS {COMMIT_LSN}",
        f"CAST(NULL AS bigint) AS {XID}",
        f"_pgwal_newest.{TEXT} AS {TEXT}",
        f"{NO_NAMES} AS {UNCHANGED}",
        f"_pgwal_place.lsn AS {AT_LSN}",
        f"_pgwal_place.ordinal AS {AT_ORDINAL}",
        *([f"_pgwal_newest.at AS {COMMITTED_AT}"] if shape.keeps else []),
    )
    return fold.matching(absent, touched, shape.key, "left_anti")

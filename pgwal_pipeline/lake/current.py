"""Merge events into `current`: each table as of a publish.

All work is DataFrames and SQL: it runs on a Spark Connect server too. Rows stay on the executors, but for small tables (`rewrite`) and the
keys of the changes (`key_ranges`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as altered
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from pyspark.sql.types import StructType

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import bag, files, fold, frozen, kept, key_ranges, rewrite, statements
from pgwal_pipeline.lake.columns import null_of, quote, same_types
from pgwal_pipeline.lake.files import Files
from pgwal_pipeline.lake.fold import ChunkSnapshot, Shape, Traits, Unresolved
from pgwal_pipeline.lake.isolation import conf_for, failures, isolated, set_write_options, table_failures
from pgwal_pipeline.lake.key_ranges import KeyRanges
from pgwal_pipeline.lake.properties import delta_features
from pgwal_pipeline.lake.replacing import replace, without_deleted
from pgwal_pipeline.lake.standing import FENCE, generation, last_output_rows, open_current, row_count, rows_in, standing, version, watermark
from pgwal_pipeline.lake.work import MergeRequest, MergeResult, ReplaceRequest, fence, reached
from pgwal_pipeline.messages.errors import LakeError, TableError
from pgwal_pipeline.spark.internals import active
from pgwal_pipeline.values.lsn import format_lsn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "ChunkSnapshot",
    "MergeRequest",
    "MergeResult",
    "ReplaceRequest",
    "Traits",
    "Unresolved",
    "generation",
    "merge",
    "replace",
    "row_count",
    "standing",
    "version",
    "watermark",
]

VIEW = "pgwal_changes"
"""The view that a MERGE reads."""
MERGE_CONF = {
    # Delta reads the source of a MERGE three times, and would fold it each time.
    "spark.databricks.delta.merge.materializeSource": "all",
}


@contextmanager
def for_small_tables(spark: "SparkSession") -> "Iterator[SparkSession]":
    """Open a session in which `merge` writes small tables anew. Several threads may share it."""
    with isolated(spark, rewrite.CONF | conf_for(0)) as session:
        yield session


def merge(spark: "SparkSession", request: MergeRequest, shared: "SparkSession | None" = None) -> MergeResult:
    """Merge the events of `request`, in one commit; change nothing if the table stands at `to_lsn` or past it.

    Several threads may merge several tables. `shared` is a session `for_small_tables`: opening one costs as much as a small merge.

    Raises Unresolved if a value was not sent and the lake does not have it, TableError if the table cannot be followed, LakeError if it
    does not stand at `from_lsn` or Spark fails.
    """
    table = open_current(request.current_path)
    mark = None if table is None else table.transaction_version(FENCE)
    if table is not None and mark is not None and mark >= request.to_lsn:
        return MergeResult(_prepared(spark, request, table).version(), 0)
    if table is None or mark != request.from_lsn:
        stands = "does not exist or was not made by this pipeline" if mark is None else f"stands at {format_lsn(mark)}"
        moved = LakeError(
            f"{request.table}: its current table {stands}, not at {format_lsn(request.from_lsn)}; is another publish at work? Try again."
        )
        moved.transient = mark is not None
        raise moved
    changes = files.changes(request.raw_path, request.from_lsn, request.to_lsn)
    files.require(request.table, request.rows, {request.raw_path: changes})
    if changes is None:
        raise LakeError(f"{request.table}: its raw table at {request.raw_path} is gone; restore it from a copy of the lake.")
    table = _prepared(spark, request, table)
    small = _small(request, table, changes)
    if small is not None:
        with for_small_tables(spark) if shared is None else active(shared) as session:
            return _rewrite(session, request, changes, small)
    ranges = ranges_of(request, table, changes)
    rows = request.rows + (rows_in(table) if ranges is None else ranges.rows)
    with isolated(spark, MERGE_CONF | conf_for(rows)) as session:
        return _merge(session, request, changes, ranges)


def _prepared(spark: "SparkSession", request: MergeRequest, table: DeltaTable) -> DeltaTable:
    """Return the table with the columns that say when a row was deleted if it is to keep deleted rows, else without them and the rows."""
    names = [field.name for field in table.schema().fields]
    if request.keeps == (kept.DELETED_LSN in names):
        return table
    if request.keeps:
        with isolated(spark, conf_for(0)) as session, failures(str(request.table)):
            session.sql(statements.add_columns(request.current_path, kept.COLUMNS, [*names, *kept.COLUMNS])).collect()
    else:
        without_deleted(spark, request)
    changed = open_current(request.current_path)
    assert changed is not None
    return changed


def ranges_of(request: MergeRequest, table: DeltaTable, changes: Files) -> KeyRanges | None:
    """Return the ranges of the changed keys, if they spare the MERGE a file; None if there is no MERGE by key."""
    if not request.key or request.traits.truncated:
        return None
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    return key_ranges.find(table, schema, changes, request.key)


def _merge(session: "SparkSession", request: MergeRequest, changes: Files, ranges: KeyRanges | None) -> MergeResult:
    with failures(str(request.table)):
        target = session.read.format("delta").load(request.current_path)
        types = _source_types(request, changes)
        raw, has = frozen.as_kept(changes.read(session), changes.schema, types, request.arriving_json)
        shape = _known_columns(request.shape, types, target.schema)
        _check_types(shape, types, target.schema)
        if widen(session, request.current_path, shape.columns, types, target.schema):
            target = session.read.format("delta").load(request.current_path)
        rows = fold.between(raw, request.from_lsn, request.to_lsn)
        truncate = fold.last_truncate(rows) if request.traits.truncated else None
        steps = fold.steps(rows, has, shape, target.schema, after=None if shape.keeps else truncate)
    if truncate is not None and shape.keeps:
        return _empty(request, shape, rows, steps, target, truncate)
    if truncate is not None:
        return _overwrite(request, shape, steps, target)
    if not shape.key:
        return _merge_bag(session, request, shape, steps, target)
    return _merge_changes(session, request, shape, steps, target, ranges)


def _small(request: MergeRequest, table: DeltaTable, changes: Files) -> rewrite.Small | None:
    """The table if it is to be written anew: it is small, and there is no more to do than to apply changes to its rows."""
    if not request.key or request.traits.truncated:
        return None
    found = rewrite.small(request.current_path, table, changes)
    if found is None:
        return None
    types = _source_types(request, changes)
    shape = _known_columns(request.shape, types, found.schema)
    return found if set(shape.columns) <= set(found.schema.names) else None


def _rewrite(session: "SparkSession", request: MergeRequest, changes: Files, small: rewrite.Small) -> MergeResult:
    types = _source_types(request, changes)
    shape = _known_columns(request.shape, types, small.schema)
    _check_types(shape, types, small.schema)
    with failures(str(request.table)):
        target = small.read(session)
        raw, has = frozen.as_kept(changes.read(session).coalesce(1), changes.schema, types, request.arriving_json)
        steps = fold.steps(fold.between(raw, request.from_lsn, request.to_lsn), has, shape, small.schema)
        source, lacking = _folded(steps, target, small.schema, shape, request.traits)
    with table_failures(shape, lacking):
        changed = rewrite.write(
            small,
            rewrite.rows_after(target, small.schema, source, fold.checked_schema(small.schema, shape, request.traits), shape),
            request.to_lsn,
        )
    return MergeResult(reached(request), changed)


def _folded(
    steps: "DataFrame", target: "DataFrame", types: StructType, shape: Shape, traits: Traits
) -> "tuple[DataFrame, Callable[[], DataFrame | None]]":
    """The changes of a keyed table, which fail when they are read if one lacks a value, and a function that returns those that do."""
    there = kept.living(target, types.names)
    if traits.key_changes and traits.unchanged:
        steps = fold.with_left_behind(steps, there, shape)
    changes = _net(steps, types, shape, traits)

    def lacking() -> "DataFrame":
        unsent = changes.where(f"NOT {fold.GONE} AND {fold.KEPT} IS NOT NULL")
        return changes.where(f"{fold.LOST} IS NOT NULL").unionByName(fold.matching(unsent, there, shape.key, "left_anti"))

    return fold.checked(changes, shape, traits), lacking


def _net(steps: "DataFrame", types: StructType, shape: Shape, traits: Traits) -> "DataFrame":
    return kept.net(steps, types, shape, traits) if shape.keeps else fold.net(steps, types, shape, traits)


def _merge_changes(
    session: "SparkSession", request: MergeRequest, shape: Shape, steps: "DataFrame", target: "DataFrame", ranges: KeyRanges | None
) -> MergeResult:
    traits, types = request.traits, target.schema
    near = target if ranges is None else target.where(ranges.condition())
    source, lacking = _folded(steps, near, types, shape, traits)
    kinds = fold.checked_schema(types, shape, traits)
    within = "" if ranges is None else ranges.condition("t")
    statement = statements.merge_changes(request.current_path, types, kinds, VIEW, shape, within)
    return _run(session, request, shape, source, statement, lacking)


def _merge_bag(session: "SparkSession", request: MergeRequest, shape: Shape, steps: "DataFrame", target: "DataFrame") -> MergeResult:
    changes = bag.renewed(bag.counted(steps, shape), kept.living(target, target.columns), shape)
    statement = statements.merge_bag(request.current_path, target.schema, changes.schema, VIEW, shape)
    return _run(session, request, shape, changes, statement, lambda: None)


def _run(
    session: "SparkSession",
    request: MergeRequest,
    shape: Shape,
    source: "DataFrame",
    statement: str,
    lacking: "Callable[[], DataFrame | None]",
) -> MergeResult:
    """Run the MERGE `statement`, which reads `source` by the view `VIEW`."""
    with table_failures(shape, lacking):
        source.createOrReplaceTempView(VIEW)
        set_write_options(session, fence(request.to_lsn))
        failpoints.hit("publish.in_merge")
        counted = session.sql(statement).collect()
        failpoints.hit("publish.in_merge")
    return MergeResult(reached(request), counted[0]["num_affected_rows"] if counted else 0)


def _overwrite(request: MergeRequest, shape: Shape, steps: "DataFrame", target: "DataFrame") -> MergeResult:
    """Replace the table after a TRUNCATE: it has only the rows of the events since then."""
    if shape.key:
        rows, lacking = fold.rows_alone(fold.net(steps, target.schema, shape, request.traits), shape, request.traits)
    else:
        rows, lacking = bag.applied(bag.counted(steps, shape), target.limit(0), shape), None
    with table_failures(shape, lambda: lacking):
        whole = _as_target(rows, target.schema)
    return _written(request, shape, whole, lacking)


def _empty(
    request: MergeRequest, shape: Shape, events: "DataFrame", steps: "DataFrame", target: "DataFrame", truncate: fold.Truncate
) -> MergeResult:
    """Write the table anew after a TRUNCATE that its deleted rows outlive. `steps` are those of all `events`."""
    types, traits, lacking = target.schema, request.traits, None
    there = kept.living(target, types.names)
    if shape.key:
        whole = kept.emptied(fold.whole_rows(there, shape).unionByName(steps), events, types, shape)
        changes = kept.net(whole, types, shape, traits)
        lacking = changes.where(f"{fold.LOST} IS NOT NULL") if traits.unchanged else None
        kinds = fold.checked_schema(types, shape, traits)
        rows = rewrite.rows_after(target, types, fold.checked(changes, shape, traits), kinds, shape).drop(rewrite.FATE)
    else:
        rows = kept.emptied_bag(target, steps, truncate, shape)
    return _written(request, shape, rows, lacking)


def _written(request: MergeRequest, shape: Shape, rows: "DataFrame", lacking: "DataFrame | None") -> MergeResult:
    with table_failures(shape, lambda: lacking):
        failpoints.hit("publish.in_merge")
        rows.write.format("delta").mode("overwrite").options(**fence(request.to_lsn)).save(request.current_path)
        failpoints.hit("publish.in_merge")
    return MergeResult(reached(request), last_output_rows(request.current_path))


def _source_types(request: MergeRequest, changes: Files) -> StructType:
    return changes.schema if request.schema_json is None else StructType.fromJson(json.loads(request.schema_json))


def _known_columns(shape: Shape, types: StructType, target: StructType) -> Shape:
    """`shape` with only the columns whose type is known. A column just added to the source, without a row since, is in no table yet."""
    return altered(shape, columns=tuple(name for name in shape.columns if name in types.names or name in target.names))


def _check_types(shape: Shape, types: StructType, target: StructType) -> None:
    for name in shape.columns:
        if name in types.names and name in target.names and not same_types(types[name].dataType, target[name].dataType):
            raise TableError(
                str(shape.table),
                f"{shape.table}: its column {name!r} is {target[name].dataType.simpleString()} in the current table and has become "
                f"{types[name].dataType.simpleString()}; run `pgwal resnapshot '{shape.table}'` to read it again.",
            )


def widen(session: "SparkSession", path: str, columns: Sequence[str], wanted: StructType, target: StructType) -> bool:
    """Add those of `columns` that the target lacks, with the types in `wanted`, null in its rows; return whether there were any."""
    types = {name: wanted[name].dataType.simpleString() for name in columns if name not in target.names}
    if not types:
        return False
    table = open_current(path)
    has = {} if table is None else table.metadata().configuration
    lacking = {name: value for name, value in delta_features(types).items() if has.get(name) != value}
    if lacking:
        session.sql(statements.set_properties(path, lacking)).collect()
    session.sql(statements.add_columns(path, types, columns)).collect()
    return True


def _as_target(rows: "DataFrame", target: StructType) -> "DataFrame":
    """`rows` with the columns of the target; those that the source has dropped are null."""
    has = rows.columns
    values = {field.name: quote(field.name) if field.name in has else null_of(field.dataType) for field in target.fields}
    return rows.selectExpr(*(f"{value} AS {quote(name)}" for name, value in values.items()))

"""Write `current`: each table as of a publish. Events are merged into it, or it is replaced by a snapshot and the events on top of it.

Every commit carries the LSN that it brings the table to (Delta's `txnAppId` and `txnVersion`), so the same work done again changes nothing.
All work is DataFrames and SQL: it runs on a Spark Connect server too. Rows stay on the executors, but for small tables (`rewrite`).
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as altered
from typing import TYPE_CHECKING

from pyspark.sql.types import IntegerType, LongType, ShortType, StructType

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import bag, base, files, fold, rewrite, statements
from pgwal_pipeline.lake.columns import null_of, quote, same_types
from pgwal_pipeline.lake.files import Files
from pgwal_pipeline.lake.fold import ANYTHING, ChunkSnapshot, Shape, Traits, Unresolved
from pgwal_pipeline.lake.isolation import conf_for, failures, few, isolated, set_write_options, table_failures
from pgwal_pipeline.lake.standing import (
    FENCE,
    GENERATION,
    generation,
    hours_since,
    last_output_rows,
    open_current,
    row_count,
    standing,
    version,
    watermark,
    written_rows,
)
from pgwal_pipeline.messages.errors import LakeError, TableError
from pgwal_pipeline.spark.internals import active
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.own_columns import COMMIT_LSN, TEXT
from pgwal_pipeline.values.relation import TableName

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
    "optimize",
    "replace",
    "row_count",
    "standing",
    "vacuum",
    "version",
    "watermark",
]

_SPAN_ROWS = 2_000_000
"""In rows of the target. From here on, finding the changes' smallest and largest key costs less than reading all keys of the target."""
_VIEW = "pgwal_changes"
_MERGE_CONF = {
    # Delta reads the source of a MERGE three times, and would fold it each time.
    "spark.databricks.delta.merge.materializeSource": "all",
}
_HISTORY_HOURS = 30 * 24
"""How long versions of a table stay readable at least, if their files still exist: as long as Delta keeps its log by default."""
_UNTIL_THE_NEXT = 48
"""How many hours may pass until the next maintenance of a table."""
_MAPPED = frozenset(" ,;{}()\n\t=")


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """Events of raw with `from_lsn <= commit LSN < to_lsn`, to be merged into a `current` table that stands at `from_lsn`.

    `key` is empty for a bag of rows. `columns` are the source's, in its order. `schema_json` is their Delta schema; without it they have
    the types of the tables in the lake. `rows` is how many events the ledger counts, 0 if unknown.
    """

    table: TableName
    raw_path: str
    current_path: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    from_lsn: int
    to_lsn: int
    traits: Traits = ANYTHING
    schema_json: str | None = None
    rows: int = 0

    @property
    def shape(self) -> Shape:
        """The table that is folded."""
        return Shape(self.table, self.key, self.columns)


@dataclass(frozen=True, slots=True)
class ReplaceRequest:
    """A `current` table to be built from the snapshot `generation` and the events with `from_lsn <= commit LSN < to_lsn` on top of it.

    Only the rows of `chunks` count at `snapshot_path`; `snapshot_lsn` becomes their `_pgwal_commit_lsn`. A bag of rows has been read under
    one snapshot. The raw table may not exist yet, and the snapshot table does not exist if no chunk held a row. `keep` are columns of the
    present `current` that the source has dropped: they stay, null in every row. `rows` is how many rows and events the ledger counts, 0 if
    unknown.
    """

    table: TableName
    raw_path: str
    current_path: str
    snapshot_path: str
    generation: str
    chunks: tuple[ChunkSnapshot, ...]
    snapshot_lsn: int
    key: tuple[str, ...]
    columns: tuple[str, ...]
    from_lsn: int
    to_lsn: int
    traits: Traits = ANYTHING
    schema_json: str | None = None
    rows: int = 0
    keep: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The table that is folded."""
        return Shape(self.table, self.key, self.columns)


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The Delta version of `current` that holds the work, and how many rows were inserted, updated and deleted for it.

    After a TRUNCATE and for a replacement these are the rows that were written; 0 if the work had been done before.
    """

    version: int
    rows_changed: int


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
    mark = watermark(request.current_path)
    if mark is not None and mark >= request.to_lsn:
        return MergeResult(version(request.current_path), 0)
    if mark != request.from_lsn:
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
    small = _small(request, changes)
    if small is not None:
        with for_small_tables(spark) if shared is None else active(shared) as session:
            return _rewrite(session, request, changes, small)
    with isolated(spark, _MERGE_CONF | conf_for(request.rows + written_rows(request.current_path))) as session:
        return _merge(session, request, changes)


def replace(spark: "SparkSession", request: ReplaceRequest) -> MergeResult:
    """Replace `current` by a snapshot and the events on top of it, in one commit; change nothing if that has been done already.

    Raises Unresolved if a value was not sent and the lake does not have it, TableError if the table cannot be followed, LakeError if it
    stands past `to_lsn` or Spark fails.
    """
    mark = watermark(request.current_path)
    if mark is not None and mark > request.to_lsn:
        raise LakeError(
            f"{request.table}: its current table stands at {format_lsn(mark)}, past {format_lsn(request.to_lsn)}, the LSN of this publish; "
            f"remove {request.current_path} if it belongs to another source."
        )
    if mark == request.to_lsn and generation(request.current_path) == request.generation:
        return MergeResult(version(request.current_path), 0)
    changes = files.changes(request.raw_path, request.from_lsn, request.to_lsn)
    snapshot = files.snapshot(request.snapshot_path, request.generation)
    files.require(request.table, request.rows, {request.snapshot_path: snapshot, request.raw_path: changes})
    with isolated(spark, conf_for(request.rows)) as session:
        return _replace(session, request, snapshot, changes, {} if mark == request.to_lsn else _fence(request.to_lsn))


def optimize(spark: "SparkSession", path: str) -> int:
    """Join small files, rewrite files with many deleted rows, and return the version then. Must not run during a merge of the table."""
    with isolated(spark, conf_for(written_rows(path))) as session, failures(path):
        session.sql(f"OPTIMIZE {statements.table_at(path)}").collect()
    return version(path)


def vacuum(spark: "SparkSession", path: str, retention_hours: float, oldest: int | None = None) -> None:
    """Delete the files that no version of the last `retention_hours` needs. Older versions cannot be read afterwards.

    A version counts for as long as it is the newest. `oldest` is one that has to stay readable, however old it is: a table that does not
    change has the same version for months, and readers refuse one that is older than the table's log is kept.
    """
    with isolated(spark, conf_for(written_rows(path))) as session, failures(path):
        age = 0.0 if oldest is None else hours_since(path, oldest) + _UNTIL_THE_NEXT
        # In whole steps, so that the property of a table that does not change is not set anew each night.
        steps = max(1, math.ceil(max(retention_hours, age) / _HISTORY_HOURS))
        _keep_readable(session, path, steps * _HISTORY_HOURS)
        session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        # With true, Delta ignores RETAIN and takes the table's property.
        session.conf.set("spark.databricks.delta.vacuum.retentionWindowIgnore.enabled", "false")
        # The listing starts this many tasks; the default is ten thousand.
        session.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", "8")
        session.sql(f"VACUUM {statements.table_at(path)} RETAIN {retention_hours} HOURS").collect()


def _keep_readable(session: "SparkSession", path: str, hours: int) -> None:
    """Keep versions of the last `hours` readable: Spark refuses versions older than the table's property, even if their files exist."""
    table = open_current(path)
    found = {} if table is None else table.metadata().configuration
    if any(found.get(name) != value for name, value in _readable(hours).items()):
        session.sql(statements.set_properties(path, _readable(hours))).collect()


def _readable(hours: int) -> dict[str, str]:
    return dict.fromkeys(("delta.logRetentionDuration", "delta.deletedFileRetentionDuration"), f"interval {hours} hours")


def _merge(session: "SparkSession", request: MergeRequest, changes: Files) -> MergeResult:
    with failures(str(request.table)):
        target = session.read.format("delta").load(request.current_path)
        raw = changes.read(session)
        types = _source_types(request, changes)
        shape = _known_columns(request.shape, types, target.schema)
        _check_types(shape, types, target.schema)
        if widen(session, request.current_path, shape.columns, types, target.schema):
            target = session.read.format("delta").load(request.current_path)
        rows = fold.between(raw, request.from_lsn, request.to_lsn)
        truncate = fold.last_truncate(rows) if request.traits.truncated else None
        steps = fold.steps(rows, changes.schema, shape, target.schema, after=truncate)
    if truncate is not None:
        return _overwrite(request, shape, steps, target)
    if not shape.key:
        return _merge_bag(session, request, shape, steps, target)
    return _merge_changes(session, request, shape, steps, target)


def _small(request: MergeRequest, changes: Files) -> rewrite.Small | None:
    """The table if it is to be written anew: it is small, and there is no more to do than to apply changes to its rows."""
    if not request.key or request.traits.truncated:
        return None
    found = rewrite.small(request.current_path, request.from_lsn, changes)
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
        rows = fold.between(changes.read(session).coalesce(1), request.from_lsn, request.to_lsn)
        steps = fold.steps(rows, changes.schema, shape, small.schema)
        source, lacking = _folded(steps, target, small.schema, shape, request.traits)
    with table_failures(shape, lacking):
        changed = rewrite.write(
            small,
            rewrite.rows_after(target, small.schema, source, fold.checked_schema(small.schema, shape, request.traits), shape),
            request.to_lsn,
        )
    return MergeResult(_reached(request), changed)


def _folded(
    steps: "DataFrame", target: "DataFrame", types: StructType, shape: Shape, traits: Traits
) -> "tuple[DataFrame, Callable[[], DataFrame | None]]":
    """The changes of a keyed table, which fail when they are read if one lacks a value, and a function that returns those that do."""
    if traits.key_changes and traits.unchanged:
        steps = fold.with_left_behind(steps, target, shape)
    changes = fold.net(steps, types, shape, traits)

    def lacking() -> "DataFrame":
        kept = changes.where(f"NOT {fold.GONE} AND {fold.KEPT} IS NOT NULL")
        return changes.where(f"{fold.LOST} IS NOT NULL").unionByName(fold.matching(kept, target, shape.key, "left_anti"))

    return fold.checked(changes, shape, traits), lacking


def _merge_changes(session: "SparkSession", request: MergeRequest, shape: Shape, steps: "DataFrame", target: "DataFrame") -> MergeResult:
    traits = request.traits
    span = _span(steps, request.current_path, shape)
    source, lacking = _folded(steps, target, target.schema, shape, traits)
    kinds = fold.checked_schema(target.schema, shape, traits)
    statement = statements.merge_changes(request.current_path, target.schema, kinds, _VIEW, shape, span)
    return _run(session, request, shape, source, statement, lacking)


def _merge_bag(session: "SparkSession", request: MergeRequest, shape: Shape, steps: "DataFrame", target: "DataFrame") -> MergeResult:
    changes = bag.renewed(bag.counted(steps, shape), target, shape)
    statement = statements.merge_bag(request.current_path, target.schema, changes.schema, _VIEW, shape)
    return _run(session, request, shape, changes, statement, lambda: None)


def _run(
    session: "SparkSession",
    request: MergeRequest,
    shape: Shape,
    source: "DataFrame",
    statement: str,
    lacking: "Callable[[], DataFrame | None]",
) -> MergeResult:
    """Run the MERGE `statement`, which reads `source` by the view `_VIEW`."""
    with table_failures(shape, lacking):
        source.createOrReplaceTempView(_VIEW)
        set_write_options(session, _fence(request.to_lsn))
        failpoints.hit("publish.in_merge")
        counted = session.sql(statement).collect()
        failpoints.hit("publish.in_merge")
    return MergeResult(_reached(request), counted[0]["num_affected_rows"] if counted else 0)


def _overwrite(request: MergeRequest, shape: Shape, steps: "DataFrame", target: "DataFrame") -> MergeResult:
    """Replace the table after a TRUNCATE: it has only the rows of the events since then."""
    if shape.key:
        rows, lacking = fold.rows_alone(fold.net(steps, target.schema, shape, request.traits), shape, request.traits)
    else:
        rows, lacking = bag.applied(bag.counted(steps, shape), target.limit(0), shape), None
    with table_failures(shape, lambda: lacking):
        whole = _as_target(rows, target.schema)
        failpoints.hit("publish.in_merge")
        whole.write.format("delta").mode("overwrite").options(**_fence(request.to_lsn)).save(request.current_path)
        failpoints.hit("publish.in_merge")
    return MergeResult(_reached(request), last_output_rows(request.current_path))


def _replace(
    session: "SparkSession", request: ReplaceRequest, found: Files | None, changes: Files | None, fence: Mapping[str, str]
) -> MergeResult:
    shape, path = request.shape, request.current_path
    with failures(str(request.table)):
        snapshot, raw = (None if files is None else files.read(session) for files in (found, changes))
        known = None if request.schema_json is None else StructType.fromJson(json.loads(request.schema_json))
        types = base.column_types(shape, snapshot, raw) if known is None else known
        source = base.Source(session, request.chunks, request.snapshot_lsn)
        if raw is None or changes is None or not changes.paths:
            whole, lacking = base.rows_as_read(source, snapshot, shape, types), None
        else:
            whole, lacking = _with_events(source, snapshot, raw, changes.schema, types, request)
        whole = _with_dropped(whole, shape, _read(session, path) if request.keep else None, request.keep)
    properties = {"delta.enableDeletionVectors": "true", GENERATION: request.generation, **_readable(_HISTORY_HOURS)}
    properties |= delta_features({field.name: field.dataType.simpleString() for field in whole.schema.fields})
    with table_failures(shape, lambda: lacking):
        writer = whole.writeTo(statements.table_at(path)).using("delta").options(**fence)
        for name, value in properties.items():
            writer = writer.tableProperty(name, value)
        failpoints.hit("publish.in_merge")
        writer.createOrReplace()
        failpoints.hit("publish.in_merge")
    return MergeResult(_reached(request), last_output_rows(path))


def _with_events(
    source: base.Source, snapshot: "DataFrame | None", raw: "DataFrame", has: StructType, types: StructType, request: ReplaceRequest
) -> "tuple[DataFrame, DataFrame | None]":
    """The rows of `snapshot` with the events of `raw` applied, and the changes that lack a value (None if no change can lack one)."""
    shape, short = request.shape, few(request.rows)
    events = fold.between(raw, request.from_lsn, request.to_lsn)
    if short:
        events = events.localCheckpoint()
    truncate = fold.last_truncate(events) if request.traits.truncated else None
    steps = fold.steps(events, has, shape, types, after=truncate)
    rows = base.snapshot_rows(source, snapshot, shape, types, truncate)
    if short:
        rows = rows.localCheckpoint()
    if shape.key:
        return base.rows_of_keys(source, rows, steps, types, shape, request.traits)
    return base.rows_of_bag(source, rows, steps, shape), None


def _with_dropped(rows: "DataFrame", shape: Shape, present: "DataFrame | None", names: Collection[str]) -> "DataFrame":
    """`rows` with the columns `names` of the `present` table added, all null, after the source's own."""
    if present is None:
        return rows
    taken = {name.lower() for name in shape.columns}
    kept = [field for field in present.schema.fields if field.name in names and field.name.lower() not in taken]
    nulls = [f"{null_of(field.dataType)} AS {quote(field.name)}" for field in kept]
    return rows.selectExpr(*map(quote, shape.columns), *nulls, COMMIT_LSN, TEXT)


def _read(session: "SparkSession", path: str) -> "DataFrame | None":
    return None if open_current(path) is None else session.read.format("delta").load(path)


def _reached(request: MergeRequest | ReplaceRequest) -> int:
    """The version that holds the work just committed. Raises LakeError if another publish has changed the table meanwhile.

    On an object store Spark checks whether a commit exists and then writes it: if two publishes do so at once, the slower one overwrites
    the other's commit.
    """
    table = open_current(request.current_path)
    mark = None if table is None else table.transaction_version(FENCE)
    if table is None or mark != request.to_lsn:
        lost = LakeError(
            f"{request.table}: another publish changed its current table at the same time, which stands at "
            f"{'no LSN' if mark is None else format_lsn(mark)} instead of {format_lsn(request.to_lsn)}; try again."
        )
        lost.transient = True
        raise lost
    return table.version()


def _fence(lsn: int) -> dict[str, str]:
    return {"txnAppId": FENCE, "txnVersion": str(lsn)}


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


def delta_features(types: Mapping[str, str]) -> dict[str, str]:
    """The table properties that these columns (name to Delta type) need: Delta does not enable a table feature by itself."""
    properties = {}
    if any("timestamp_ntz" in kind for kind in types.values()):
        properties["delta.feature.timestampNtz"] = "supported"
    if any(_MAPPED.intersection(name) for name in types):
        properties["delta.columnMapping.mode"] = "name"
    return properties


def _as_target(rows: "DataFrame", target: StructType) -> "DataFrame":
    """`rows` with the columns of the target; those that the source has dropped are null."""
    has = rows.columns
    values = {field.name: quote(field.name) if field.name in has else null_of(field.dataType) for field in target.fields}
    return rows.selectExpr(*(f"{value} AS {quote(name)}" for name, value in values.items()))


def _span(steps: "DataFrame", path: str, shape: Shape) -> tuple[int, int] | None:
    """The smallest and largest value of the key's first column in `steps`, so that a MERGE skips most files of a large target.

    None if the target is small or the column is no integer.
    """
    name = shape.key[0]
    if not isinstance(steps.schema[name].dataType, ShortType | IntegerType | LongType) or written_rows(path) < _SPAN_ROWS:
        return None
    low, high = steps.selectExpr(f"min({quote(name)})", f"max({quote(name)})").collect()[0]
    return None if low is None else (low, high)

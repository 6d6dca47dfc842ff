"""Replace a `current` table by a snapshot and the events on top of it, laid out by its key.

The files have ranges of the key that do not overlap, and their rows are in its order: a MERGE of changes that lie close together, and a
reader who looks for some keys, read few of them.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as replaced
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import base, files, fold, frozen, kept, properties, statements
from pgwal_pipeline.lake.columns import null_of, quote
from pgwal_pipeline.lake.files import Files
from pgwal_pipeline.lake.fold import Shape
from pgwal_pipeline.lake.isolation import conf_for, failures, few, isolated, table_failures
from pgwal_pipeline.lake.standing import FENCE, GENERATION, last_output_rows, open_current, rows_in
from pgwal_pipeline.lake.work import MergeRequest, MergeResult, ReplaceRequest, fence, reached
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.own_columns import COMMIT_LSN, TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_BYTES = 32 << 20
"""About the size of a file: small enough to leave most of a table unread, and large enough that opening it costs little beside reading."""
_GROWTH = 2
"""A file of `current` takes so many times the bytes of its rows in a snapshot, about, which is compressed better."""
_MANY_FILES = 128
"""With more files than that they get larger, up to `_LARGEST_FILE`."""
_LARGEST_FILE = 256 << 20


def file_bytes(table_bytes: int) -> int:
    """Return about how large the files of a table with so many bytes should be."""
    return min(max(table_bytes // _MANY_FILES, FILE_BYTES), _LARGEST_FILE)


def by_key(rows: "DataFrame", key: Sequence[str], parts: int) -> "DataFrame":
    """Return `rows` in so many parts, by ranges of the key, each in the key's order. Each becomes a file."""
    order = [F.expr(quote(name)) for name in key]
    ranged = rows.repartitionByRange(parts, *order) if parts > 1 else rows.coalesce(1)
    return ranged.sortWithinPartitions(*order)


def replace(spark: "SparkSession", request: ReplaceRequest) -> MergeResult:
    """Replace `current` by a snapshot and the events on top of it, in one commit; change nothing if that has been done already.

    Raises Unresolved if a value was not sent and the lake does not have it, TableError if the table cannot be followed, LakeError if it
    stands past `to_lsn` or Spark fails.
    """
    table = open_current(request.current_path)
    mark = None if table is None else table.transaction_version(FENCE)
    if mark is not None and mark > request.to_lsn:
        raise LakeError(
            f"{request.table}: its current table stands at {format_lsn(mark)}, past {format_lsn(request.to_lsn)}, the LSN of this publish; "
            f"remove {request.current_path} if it belongs to another source."
        )
    if table is not None and mark == request.to_lsn and table.metadata().configuration.get(GENERATION) == request.generation:
        return MergeResult(table.version(), 0)
    changes = files.changes(request.raw_path, request.from_lsn, request.to_lsn)
    snapshot = files.snapshot(request.snapshot_path, request.generation)
    files.require(request.table, request.rows, {request.snapshot_path: snapshot, request.raw_path: changes})
    with isolated(spark, conf_for(request.rows)) as session:
        return _replace(session, request, snapshot, changes, mark)


def _replace(session: "SparkSession", request: ReplaceRequest, found: Files | None, changes: Files | None, mark: int | None) -> MergeResult:
    shape, path = request.shape, request.current_path
    with failures(str(request.table)):
        snapshot, raw = (None if files is None else files.read(session) for files in (found, changes))
        known = None if request.schema_json is None else StructType.fromJson(json.loads(request.schema_json))
        has = StructType() if changes is None else changes.schema
        if known is not None:
            snapshot = None if snapshot is None else frozen.as_kept(snapshot, snapshot.schema, known, request.arriving_json)[0]
            raw, has = (None, has) if raw is None else frozen.as_kept(raw, has, known, request.arriving_json)
        types = base.column_types(shape, snapshot, raw) if known is None else known
        source = base.Source(session, request.chunks, request.snapshot_lsn)
        if raw is None or changes is None or not changes.paths:
            whole, lacking, gone, emptied = base.rows_as_read(source, snapshot, shape, types), None, None, None
        else:
            whole, lacking, gone, emptied = _with_events(source, snapshot, raw, has, types, request)
        present = _read(session, path) if request.keep or request.keeps else None
        whole = _with_dropped(whole, shape, present if request.keep else None, request.keep, request.order)
        expected = _GROWTH * sum(part.bytes for part in (found, changes) if part is not None)
        if request.keeps:
            assert request.read_at is not None
            read = kept.Moment.of(request.snapshot_lsn, request.read_at)
            moment = read if emptied is None or mark is None or emptied.lsn < mark else emptied
            whole = kept.with_deleted(whole, present if request.clean else None, gone, shape, moment)
    with table_failures(shape, lambda: lacking):
        _write(whole, path, shape, expected, request.generation, {} if mark == request.to_lsn else fence(request.to_lsn))
    return MergeResult(reached(request), last_output_rows(path))


def _write(whole: "DataFrame", path: str, shape: Shape, expected: int, generation: str, options: Mapping[str, str]) -> None:
    """Write `whole`, about `expected` bytes, in place of the table at `path`."""
    schema = whole.schema
    if shape.key:
        whole = by_key(whole, shape.key, max(1, math.ceil(expected / file_bytes(expected))))
    wanted = {"delta.enableDeletionVectors": "true", GENERATION: generation, **properties.readable(properties.HISTORY_HOURS)}
    wanted |= properties.delta_features({field.name: field.dataType.simpleString() for field in schema.fields})
    wanted |= properties.statistics(schema, shape.key)
    writer = whole.writeTo(statements.table_at(path)).using("delta").options(**options)
    for name, value in wanted.items():
        writer = writer.tableProperty(name, value)
    failpoints.hit("publish.in_merge")
    writer.createOrReplace()
    failpoints.hit("publish.in_merge")


def without_deleted(spark: "SparkSession", request: MergeRequest) -> None:
    """Write the table anew without the deleted rows that it kept, and without their columns. It stays at its LSN."""
    table = open_current(request.current_path)
    assert table is not None
    generation = table.metadata().configuration.get(GENERATION, "")
    expected = sum(table.get_add_actions()["size_bytes"].to_pylist())
    with isolated(spark, conf_for(rows_in(table))) as session, failures(str(request.table)):
        rows = session.read.format("delta").load(request.current_path).where(kept.LIVING).drop(*kept.COLUMNS)
        _write(rows, request.current_path, request.shape, expected, generation, {})


def _with_events(
    source: base.Source, snapshot: "DataFrame | None", raw: "DataFrame", has: StructType, types: StructType, request: ReplaceRequest
) -> "tuple[DataFrame, DataFrame | None, DataFrame | None, kept.Moment | None]":
    """The rows of `snapshot` with the events of `raw` applied, and the changes that lack a value (None if no change can lack one).

    If deleted rows stay also the changes of keys without a row, and the last TRUNCATE.
    """
    shape, short = request.shape, few(request.rows)
    events = fold.between(raw, request.from_lsn, request.to_lsn)
    if short:
        events = events.localCheckpoint()
    truncate = fold.last_truncate(events) if request.traits.truncated else None
    keeping = shape.keeps and shape.key
    steps = fold.steps(events, has, shape, types, after=None if keeping else truncate)
    if keeping and truncate is not None:
        steps = kept.emptied(steps, events, types, shape)
    rows = base.snapshot_rows(source, snapshot, shape, types, truncate)
    if short:
        rows = rows.localCheckpoint()
    emptied = kept.Moment(truncate.lsn, truncate.moment) if shape.keeps and truncate is not None else None
    if shape.key:
        return *base.rows_of_keys(source, rows, steps, types, shape, request.traits), emptied
    return base.rows_of_bag(source, rows, steps, replaced(shape, keeps=False)), None, None, emptied


def _with_dropped(
    rows: "DataFrame", shape: Shape, present: "DataFrame | None", names: Collection[str], order: Sequence[str]
) -> "DataFrame":
    """`rows` with the columns `names` of the `present` table added, all null, after the source's own or where `order` has them."""
    if present is None:
        return rows
    taken = {name.lower() for name in shape.columns}
    kept = [field for field in present.schema.fields if field.name in names and field.name.lower() not in taken]
    values = {name: quote(name) for name in shape.columns}
    values |= {field.name: f"{null_of(field.dataType)} AS {quote(field.name)}" for field in kept}
    ordered = dict.fromkeys([*(name for name in order if name in values), *values])
    return rows.selectExpr(*(values[name] for name in ordered), COMMIT_LSN, TEXT)


def _read(session: "SparkSession", path: str) -> "DataFrame | None":
    return None if open_current(path) is None else session.read.format("delta").load(path)

"""Merge into a small `current` table by writing its rows anew: Spark computes them in one task, this process writes and commits the file.

Delta's MERGE starts several jobs and reads its log by queries, whatever the table's size: most of a small merge is that (measured). The
fold, the check of values that were not sent and the rows that come out are those of the MERGE.
"""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import statements
from pgwal_pipeline.lake.delta import commit, lake_errors, side_by_side
from pgwal_pipeline.lake.files import Files, no_rows
from pgwal_pipeline.lake.fold import GONE, Shape
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.parquet import ParquetFile, add_action, discard_file, new_file_name, plain_schema
from pgwal_pipeline.lake.properties import STATISTICS
from pgwal_pipeline.lake.standing import FENCE
from pgwal_pipeline.lake.standing import GENERATION as GENERATION_PROPERTY
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.spark.internals import to_arrow
from pgwal_pipeline.values.own_columns import COMMIT_LSN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CONF = {
    # One task computes the rows, without exchanges; a broadcast would be a job of its own.
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # The text of a plan, which is made for a UI, costs more than the rows.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.debug.maxToStringFields": "25",
}
"""The settings of the session that computes the rows."""

_ROWS = 10_000
_BYTES = 1 << 20
_FILES = 16
_PLAIN_BYTES = 64 << 20
"""The rows pass through the memory of Spark's driver and of this process, and a few compressed bytes may be very long text."""
_PROPERTIES = frozenset(
    {
        GENERATION_PROPERTY,
        "delta.enableDeletionVectors",
        "delta.logRetentionDuration",
        "delta.deletedFileRetentionDuration",
        "delta.feature.timestampNtz",
        STATISTICS,
    }
)
_FEATURES = frozenset({"deletionVectors", "invariants", "appendOnly", "timestampNtz"})
_WRITERS = frozenset({1, 2, 7})
"""The writer versions whose features are named by the protocol, or are among `_FEATURES`."""
FATE = "_pgwal_fate"
"""The column of `rows_after` with what became of a row: `kept`, `gone` or `written`."""
_CHECKPOINT_COMMITS = 10


@dataclass(frozen=True)
class Small:
    """A `current` table that is small enough to be written anew, with its files, relative to it."""

    path: str
    table: DeltaTable
    schema: StructType
    paths: tuple[str, ...]

    def read(self, session: "SparkSession") -> "DataFrame":
        """Return the table's rows, in one part."""
        if not self.paths:
            return no_rows(session, {field.name: field.dataType for field in self.schema.fields}).coalesce(1)
        reader = session.read.schema(self.schema).option("__globPaths__", "false")
        return reader.parquet(*(f"{self.path}/{name}" for name in self.paths)).coalesce(1)


def small(path: str, table: DeltaTable, changes: Files) -> Small | None:
    """Return `table`, at `path`, if it can be written anew for `changes`; None if it is large, or has what only Spark's Delta handles.

    That is deletion vectors in use, mapped columns, or properties that this pipeline does not set.
    """
    if changes.rows is None or changes.rows > _ROWS or changes.bytes > _BYTES or len(changes.paths) > _FILES:
        return None
    with lake_errors(path):
        about, protocol = table.metadata(), table.protocol()
        features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
        if protocol.min_writer_version not in _WRITERS:
            return None
        if about.partition_columns or not _PROPERTIES.issuperset(about.configuration) or not _FEATURES.issuperset(features):
            return None
        files = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        counts = [file["num_records"] for file in files]
        if len(files) > _FILES or None in counts or sum(counts) > _ROWS or sum(file["size_bytes"] for file in files) > _BYTES:
            return None
        if any("/" in file["path"] for file in files) or _has_deletion_vectors(table):
            return None
        paths = [file["path"] for file in files]
        if _plain_bytes(path, paths) + _plain_bytes(changes.table, changes.paths) > _PLAIN_BYTES:
            return None
        return Small(path, table, StructType.fromJson(json.loads(table.schema().to_json())), tuple(paths))


def _plain_bytes(table: str, paths: Iterable[str]) -> float:
    """The size of the files at `paths` without compression; infinite if one cannot be read, which is for the MERGE to report."""
    root, folder = table.rsplit("/", 1)
    store = filesystem(root)

    def of(path: str) -> int:
        about = pq.read_metadata(f"{folder}/{path}", filesystem=store)
        return sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))

    try:
        return sum(side_by_side(of, list(paths)))
    except (OSError, pa.ArrowException):
        return math.inf


def _has_deletion_vectors(table: DeltaTable) -> bool:
    return pa.table(table.deletion_vectors()).num_rows > 0


def rows_after(target: "DataFrame", schema: StructType, changes: "DataFrame", kinds: StructType, shape: Shape) -> "DataFrame":
    """Return the rows of `target` after `changes` (`fold.checked`), each with what became of it. `schema` and `kinds` are their schemas.

    Reading them fails with `fold.unsent_marker` if a value was not sent and is not there.
    """
    ours = target.selectExpr("*", f"true AS {statements.HERE}").alias("t")
    theirs = changes.selectExpr("*", f"true AS {statements.HERE}").alias("s")
    joined = ours.join(theirs, F.expr(statements.same_key(schema, kinds, shape)), "full_outer")
    gone = f"s.{GONE}" if not shape.keeps else "false"
    stays = f"s.{statements.HERE} IS NULL" + (f" OR t.{statements.HERE} AND NOT {statements.renews(shape)}" if shape.keeps else "")
    fate = f"CASE WHEN {stays} THEN 'kept' WHEN {gone} THEN 'gone' ELSE 'written' END AS {FATE}"
    affected = joined.where(f"t.{statements.HERE} IS NOT NULL OR {statements.inserts(kinds, shape)}")
    return affected.selectExpr(*statements.merged_row(schema, kinds, shape), fate)


def write(found: Small, rows: "DataFrame", to_lsn: int) -> int:
    """Write `rows` (`rows_after`) as the whole table, in one commit that brings it to `to_lsn`; return how many rows changed.

    If none changed the files stay, and the commit has nothing but the LSN. Raises LakeError if another writer has changed the table since
    `found` was opened.
    """
    schema = plain_schema(pa.schema(found.table.schema().to_arrow()))
    computed = to_arrow(rows)
    changed = sum(fate["counts"] for fate in computed[FATE].value_counts().to_pylist() if fate["values"] != "kept")
    stay = computed.filter(pc.field(FATE) != "gone").select(schema.names).cast(schema)
    failpoints.hit("publish.in_merge")
    root, folder = found.path.rsplit("/", 1)
    lake = Lake(root)
    with lake_errors(found.path):
        written = [_written(lake, folder, stay)] if changed and stay.num_rows else []
        try:
            commit(lake, found.path, found.table, written, marker=Transaction(FENCE, to_lsn), replace=changed > 0)
        except CommitFailedError as error:
            for action in written:
                discard_file(lake, f"{folder}/{action.path}")
            lost = LakeError(f"{found.path}: another writer changed this table at the same time; nothing was changed here, try again.")
            lost.transient = True
            raise lost from error
        found.table.update_incremental()
    _checkpoint(found)
    failpoints.hit("publish.in_merge")
    return changed


def _written(lake: Lake, folder: str, rows: pa.Table) -> AddAction:
    """Write `rows` to a new file in `folder` and return the action that adds it."""
    file = ParquetFile(lake, f"{folder}/{new_file_name()}", rows.schema, (COMMIT_LSN,))
    try:
        file.write(rows)
        return add_action(file.close(folder), {})
    except BaseException:
        file.discard()
        raise


def _checkpoint(found: Small) -> None:
    """Write a checkpoint of the log as often as Spark does; delta-rs does so every hundredth commit. The commit counts without one."""
    if found.table.version() % _CHECKPOINT_COMMITS == 0:
        with suppress(LakeError), lake_errors(found.path):
            found.table.create_checkpoint()

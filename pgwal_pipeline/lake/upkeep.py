"""Keep the files of a `current` table in order: rewrite small ones and those with many deleted rows, and remove what no version needs.

Files are rewritten beside publishes. A Delta table of its own, in `_pgwal/rewriting`, names the files to be rewritten; Spark reads it and
writes it anew, by the key. Then, under the lock that publishes take, the new files are moved to `current` and committed in place of the old
ones, which takes a moment. If a publish has changed one of the old files meanwhile, the work is dropped. A process that dies leaves at most
files that no log names; vacuum removes them.
"""

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs
from deltalake import DeltaTable

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import properties, statements, table_log
from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.isolation import conf_for, failures, isolated
from pgwal_pipeline.lake.layout import Lake, filesystem
from pgwal_pipeline.lake.parquet import discard_file, flush, make_folder, move
from pgwal_pipeline.lake.replacing import by_key, file_bytes
from pgwal_pipeline.lake.standing import hours_since, open_current, physical_names, written_rows
from pgwal_pipeline.lake.table_log import Add
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.own_columns import OPEN, VALID_TO_LSN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REWRITING = "_pgwal/rewriting"
"""The folder in the lake of the tables by which files are rewritten."""

_SMALL_FILES = 16
"""With so many small files, those of less than half the usual size, a table is rewritten where it needs it."""
_DELETED = 0.1
"""Or when so large a part of its rows is deleted."""
_WORTH = 0.05
"""Then also files are rewritten of whose rows a larger part than this is deleted."""
_UNIT_BYTES = 256 << 20
"""About how many bytes are rewritten at once: a commit of a publish in between costs no more than that work."""
_TINY = 1 << 20
"""A single file with fewer bytes is left as it is."""
_UNTIL_THE_NEXT = 48
"""How many hours may pass until the next maintenance of a table."""
_LEFT_BEHIND_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class Unit:
    """Files of one version of a table that are rewritten together, in one partition if it has some; `order` is that of their rows.

    `file_bytes` is how large the files of the table should be.
    """

    path: str
    version: int
    files: tuple[Add, ...]
    file_bytes: int
    order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The rows of `unit`, in new files that no version names yet. `folder` is where they are, relative to the lake's root."""

    unit: Unit
    folder: str
    added: tuple[Add, ...]


def due(path: str, key: Sequence[str]) -> list[Unit]:
    """Return what of the table at `path` is to be rewritten, in the key's order; nothing if it is as it should be."""
    table = open_current(path)
    if table is None:
        return []
    sizes = table.get_add_actions()["size_bytes"].to_pylist()
    if len(sizes) < 2 and sum(sizes) < _TINY:
        return []
    parts: dict[tuple[tuple[str, Any], ...], list[Add]] = {}
    for file in table_log.files_at(path, table.version()).values():
        parts.setdefault(tuple(sorted(file["partitionValues"].items())), []).append(file)
    return [
        unit
        for partition, files in parts.items()
        for unit in _due(path, table, files, (VALID_TO_LSN,) if (OPEN, "false") in partition else tuple(key))
    ]


def _due(path: str, table: DeltaTable, files: list[Add], order: tuple[str, ...]) -> list[Unit]:
    """What is to be rewritten of the files of one partition; versions that have ended are in the order of their ends."""
    wanted = file_bytes(sum(file["size"] for file in files))
    small = [file for file in files if file["size"] < wanted // 2]
    rows = sum(table_log.rows_of(file) or 0 for file in files)
    if len(small) < _SMALL_FILES and sum(map(table_log.deleted_rows, files)) <= _DELETED * rows:
        return []
    chosen = [file for file in files if file in small or table_log.deleted_rows(file) > _WORTH * (table_log.rows_of(file) or 0)]
    units = _units(sorted(chosen, key=_place(table, order)))
    return [Unit(path, table.version(), tuple(unit), wanted, order) for unit in units if len(unit) > 1 or table_log.deleted_rows(unit[0])]


def _units(files: Sequence[Add]) -> list[list[Add]]:
    units: list[list[Add]] = []
    size = _UNIT_BYTES
    for file in files:
        if size >= _UNIT_BYTES:
            units.append([])
            size = 0
        units[-1].append(file)
        size += file["size"]
    return units


def _place(table: DeltaTable, key: Sequence[str]) -> Any:
    """A function that gives where in the key's order a file begins; those of which that is not known come first."""
    stored = physical_names(table)

    def place(add: Add) -> tuple[Any, ...]:
        least = json.loads(add.get("stats") or "{}").get("minValues", {})
        values = (least.get(stored.get(name, name)) for name in key)
        return tuple((value is not None, value if isinstance(value, int | float) else 0, str(value)) for value in values)

    return place


def rewrite(spark: "SparkSession", lake: Lake, unit: Unit) -> Rewritten:
    """Write the rows of `unit` to new files, in its order. The table does not change yet. Raises LakeError."""
    folder = f"{REWRITING}/{int(time.time())}-{uuid.uuid4().hex}"
    try:
        _stage(lake, folder, unit)
        rows = sum((table_log.rows_of(file) or 0) - table_log.deleted_rows(file) for file in unit.files)
        with isolated(spark, conf_for(rows)) as session, failures(unit.path):
            found = session.read.format("delta").load(lake.absolute(folder))
            parts = max(1, round(sum(file["size"] for file in unit.files) / unit.file_bytes))
            ordered = by_key(found, unit.order, parts) if unit.order else found.repartition(parts)
            ordered.write.format("delta").mode("overwrite").option("dataChange", "false").save(lake.absolute(folder))
        added = tuple(table_log.files_at(lake.absolute(folder), 1).values())
        written = sum(table_log.rows_of(file) or 0 for file in added)
        if written != rows or any("deletionVector" in file for file in added):
            raise LakeError(f"{unit.path}: its files have {rows} rows, and {written} were written in place of them; nothing was changed.")
    except BaseException:
        clear(lake, folder)
        raise
    failpoints.hit("upkeep.rewritten")
    return Rewritten(unit, folder, added)


def _stage(lake: Lake, folder: str, unit: Unit) -> None:
    """Make a Delta table in `folder` that has the files of `unit` where they are."""
    table = open_current(unit.path, unit.version)
    assert table is not None
    about, protocol = table.metadata(), table.protocol()
    features = {"readerFeatures": protocol.reader_features, "writerFeatures": protocol.writer_features}
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": table.schema().to_json(),
        "partitionColumns": about.partition_columns,
        "configuration": about.configuration,
        "createdTime": int(time.time() * 1000),
    }
    versions = {"minReaderVersion": protocol.min_reader_version, "minWriterVersion": protocol.min_writer_version}
    actions: list[dict[str, Any]] = [
        {"protocol": {**versions, **{name: list(found) for name, found in features.items() if found is not None}}},
        {"metaData": metadata},
        *({"add": table_log.absolute(unit.path, file)} for file in unit.files),
    ]
    make_folder(lake, f"{folder}/_delta_log")
    with lake_errors(folder), filesystem(lake.uri).open_output_stream(f"{folder}/_delta_log/{0:020}.json") as stream:
        stream.write("".join(json.dumps(action) + "\n" for action in actions).encode())


def commit(lake: Lake, done: Rewritten) -> bool:
    """Put the new files in place of the old ones, in one commit; return False if a publish has changed one of the old ones meanwhile.

    The caller holds the lock that publishes take. Raises LakeError.
    """
    unit, relative = done.unit, lake.relative(done.unit.path)
    table = open_current(unit.path)
    if table is None or not _unchanged(table_log.files_at(unit.path, table.version()), unit.files):
        return False
    moved = [table_log.file_name(file) for file in done.added]
    with lake_errors(unit.path):
        for name in moved:
            move(lake, f"{done.folder}/{name}", f"{relative}/{name}")
        flush(lake, [f"{relative}/{name}" for name in moved])
    failpoints.hit("upkeep.moved")
    committed = table_log.commit_rewrite(lake, unit.path, table.version(), unit.files, done.added)
    if not committed:
        for name in moved:
            discard_file(lake, f"{relative}/{name}")
    return committed


def _unchanged(live: Mapping[str, Add], files: Sequence[Add]) -> bool:
    return all(file["path"] in live and _vector(live[file["path"]]) == _vector(file) for file in files)


def _vector(add: Add) -> Any:
    vector = add.get("deletionVector")
    return None if vector is None else (vector["storageType"], vector["pathOrInlineDv"], vector.get("offset"))


def clear(lake: Lake, folder: str | None = None) -> None:
    """Remove what rewriting leaves in `folder`; without one, what processes that died have left there a day ago and earlier."""
    store = filesystem(lake.uri)
    with lake_errors(lake.uri):
        if folder is not None:
            _remove(store, folder)
            return
        found = store.get_file_info(pafs.FileSelector(REWRITING, allow_not_found=True))
        for entry in found:
            made_at = entry.base_name.split("-")[0]
            if made_at.isdigit() and int(made_at) < time.time() - _LEFT_BEHIND_SECONDS:
                _remove(store, entry.path)


def _remove(store: pafs.FileSystem, folder: str) -> None:
    if store.get_file_info(folder).type == pafs.FileType.Directory:
        store.delete_dir(folder)


def vacuum(spark: "SparkSession", path: str, retention_hours: float) -> None:
    """Delete the files that no version of the last `retention_hours` needs. Older versions cannot be read afterwards.

    A version counts for as long as it is the newest.
    """
    with isolated(spark, conf_for(written_rows(path))) as session, failures(path):
        session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        # With true, Delta ignores RETAIN and takes the table's property.
        session.conf.set("spark.databricks.delta.vacuum.retentionWindowIgnore.enabled", "false")
        # The listing starts this many tasks; the default is ten thousand.
        session.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", "8")
        session.sql(f"VACUUM {statements.table_at(path)} RETAIN {retention_hours} HOURS").collect()


def properties_for(path: str, retention_hours: float, oldest: int) -> dict[str, str]:
    """Return the properties that keep versions of the last `retention_hours` readable: Spark refuses older ones, even if the files exist.

    `oldest` is a version that has to stay readable, however old it is: a table that does not change has the same version for months, and
    readers refuse one that is older than the table's log is kept.
    """
    hours = max(retention_hours, hours_since(path, oldest) + _UNTIL_THE_NEXT)
    # In whole steps, so that the property of a table that does not change is not set anew each night.
    return properties.readable(max(1, math.ceil(hours / properties.HISTORY_HOURS)) * properties.HISTORY_HOURS)


def needs_properties(path: str, wanted: Mapping[str, str]) -> bool:
    """Return whether the table at `path` lacks one of the properties."""
    table = open_current(path)
    found = {} if table is None else table.metadata().configuration
    return any(found.get(name) != value for name, value in wanted.items())


def set_properties(spark: "SparkSession", path: str, wanted: Mapping[str, str]) -> None:
    """Set properties of the table at `path`. The caller holds the lock that publishes take."""
    with isolated(spark, conf_for(0)) as session, failures(path):
        session.sql(statements.set_properties(path, wanted)).collect()

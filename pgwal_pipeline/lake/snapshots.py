"""Write snapshots: the rows of a table that were there before the stream, chunk by chunk.

There is one Delta table per source table, with one partition per generation: a new snapshot is a new generation beside the old one. Every
row carries the attempt that wrote it, and counts only if the ledger names that attempt. So nothing has to be undone when a chunk is read
again after a crash.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import write_deltalake
from deltalake.exceptions import CommitFailedError

from pgwal_pipeline.lake.delta import ATTEMPTS, Clash, commit, create_table, crowded, ensure_table, lake_errors, open_table
from pgwal_pipeline.lake.layout import Lake, filesystem, remove_file, storage_options
from pgwal_pipeline.lake.parquet import ParquetFile, add_action, discard_file, new_file_name, plain_schema, plain_tables
from pgwal_pipeline.lake.records import FileWrite
from pgwal_pipeline.lake.schema import changed_type, check_columns, fitted, partitioned_schema
from pgwal_pipeline.values.own_columns import CHUNK, GENERATION
from pgwal_pipeline.values.relation import Relation, TableName

_CONFIGURATION = {
    "delta.dataSkippingStatsColumns": CHUNK,
    "delta.deletedFileRetentionDuration": "interval 1 days",
    "delta.logRetentionDuration": "interval 2 days",
}
_GROUP_BYTES = 16 << 20
_FILE_BYTES = 512 << 20
_ID = re.compile(r"[A-Za-z0-9_-]+\Z")


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """What an attempt at a chunk wrote to the lake: how many rows, and how many bytes of files."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Staged:
    """The files that an attempt at a chunk wrote, before a commit names them."""

    schema: pa.Schema | None
    files: tuple[FileWrite, ...]


class SnapshotWriter:
    """Writes the chunks of one generation of one table. Threads may share it.

    `location` is the table's location, by default its name. Raises TableError for a table whose columns Delta cannot have, ValueError for a
    generation with characters other than letters, digits, `_` and `-`.
    """

    def __init__(self, lake: Lake, relation: Relation, generation: str, location: TableName | None = None) -> None:
        check_columns(relation)
        if not _ID.match(generation):
            raise ValueError(f"{generation!r} is no id of a snapshot")
        self._lake = lake
        self._table = relation.table
        self._generation = generation
        self._uri = lake.snapshot(location or relation.table)
        self._folder = lake.layer_path("snapshot", location or relation.table)

    def write(self, attempt: str, pieces: Iterable[pa.Table]) -> ChunkWrite:
        """Write the rows of one attempt at a chunk, with the source's columns and `_pgwal_text`, in one commit.

        Does as `stage` and `commit`, and raises what they raise. After a failure nothing is committed.
        """
        return self.commit(self.stage(attempt, pieces))

    def stage(self, attempt: str, pieces: Iterable[pa.Table]) -> "Staged":
        """Write the files of one attempt at a chunk, which no commit names yet.

        The pieces share one schema and are taken one by one; at most about 16 MB of them are held. Raises LakeError.
        """
        chunk = _ChunkFiles(self._lake, self._folder, f"{self._folder}/{GENERATION}={self._generation}", attempt)
        try:
            for piece in pieces:  # outside `lake_errors`: an error in reading the source is not the lake's
                with lake_errors(self._uri):
                    chunk.add(piece)
            with lake_errors(self._uri):
                return Staged(chunk.schema, tuple(chunk.close()))
        except BaseException:
            chunk.discard()
            raise

    def commit(self, staged: "Staged", *, creating: bool = False) -> ChunkWrite:
        """Commit the files of an attempt; with `creating`, a missing table is created in the same commit.

        Raises TableError if the snapshot table has a column with another type, LakeError.
        """
        try:
            if staged.schema is not None:
                with lake_errors(self._uri):
                    self._commit(staged.schema, staged.files, creating)
        except BaseException:
            self.discard(staged)
            raise
        return ChunkWrite(sum(file.rows for file in staged.files), sum(file.size for file in staged.files))

    def discard(self, staged: "Staged") -> None:
        """Remove the files of an attempt that is not to be committed."""
        for file in staged.files:
            discard_file(self._lake, f"{self._folder}/{file.path}")

    def begin(self, schema: pa.Schema, *, create: bool = True) -> None:
        """Create the snapshot table with the columns of `schema`, or add those it lacks. If a type differs (table altered), empty it.

        Without `create` a table that is not there is left to the first commit, which is cheaper.
        """
        rows = plain_schema(schema).append(pa.field(CHUNK, pa.string()))
        wanted = partitioned_schema(rows, GENERATION)
        with lake_errors(self._uri):
            standing = open_table(self._lake, self._uri)
            if standing is None and not create:
                return
            if standing is None or fitted(standing.schema(), rows).names == rows.names:
                ensure_table(self._lake, self._uri, wanted, partition_by=[GENERATION], configuration=_CONFIGURATION)
                return
            write_deltalake(
                self._uri,
                pa.schema(wanted.to_arrow()).empty_table(),
                mode="overwrite",
                schema_mode="overwrite",
                partition_by=[GENERATION],
                configuration=_CONFIGURATION,
                storage_options=storage_options(self._lake.uri),
            )

    def _commit(self, schema: pa.Schema, files: Collection[FileWrite], creating: bool) -> None:
        wanted = partitioned_schema(schema, GENERATION)
        actions = [add_action(file, {GENERATION: self._generation}) for file in files]
        for _ in range(ATTEMPTS):
            try:
                if creating and actions and open_table(self._lake, self._uri) is None:
                    create_table(self._lake, self._uri, wanted, actions, partition_by=[GENERATION], configuration=_CONFIGURATION)
                    return
                table = ensure_table(self._lake, self._uri, wanted, partition_by=[GENERATION], configuration=_CONFIGURATION)
                if actions:
                    commit(self._lake, self._uri, table, actions, partition_by=[GENERATION])
            except Clash as clash:
                raise changed_type(self._table, clash) from None
            except CommitFailedError:
                continue
            return
        raise crowded(self._uri)


class _ChunkFiles:
    """The Parquet files of one attempt at a chunk, one open at a time."""

    def __init__(self, lake: Lake, table_folder: str, folder: str, attempt: str) -> None:
        self.schema: pa.Schema | None = None
        self._lake = lake
        self._table_folder = table_folder
        self._folder = folder
        self._attempt = attempt
        self._held: list[pa.Table] = []
        self._file: ParquetFile | None = None
        self._done: list[FileWrite] = []

    def add(self, piece: pa.Table) -> None:
        plain = plain_schema(piece.schema)
        if self.schema is None:
            self.schema = plain.append(pa.field(CHUNK, pa.string()))
        for rows in plain_tables(piece, plain):
            self._held.append(rows.append_column(CHUNK, pa.repeat(self._attempt, rows.num_rows)))
        if sum(rows.nbytes for rows in self._held) >= _GROUP_BYTES:
            self._write()

    def close(self) -> list[FileWrite]:
        self._write()
        self._close_file()
        return self._done

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()
        for file in self._done:
            discard_file(self._lake, f"{self._table_folder}/{file.path}")

    def _write(self) -> None:
        rows = pa.concat_tables(self._held) if self._held else None
        self._held = []
        if rows is None or rows.num_rows == 0:
            return
        if self._file is None:
            self._file = ParquetFile(self._lake, f"{self._folder}/{new_file_name()}", rows.schema)
        self._file.write(rows)
        if self._file.size >= _FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is None:
            return
        written, self._file = self._file.close(self._table_folder), None
        limits = {CHUNK: self._attempt}
        stats = {"numRecords": written.rows, "minValues": limits, "maxValues": limits, "nullCount": {CHUNK: 0}}
        self._done.append(replace(written, stats=json.dumps(stats)))


def generations(lake: Lake, location: TableName) -> set[str]:
    """Return the generations that have rows in the snapshot table of that location. Raises LakeError."""
    found = open_table(lake, lake.snapshot(location))
    return set() if found is None else {partition[GENERATION] for partition in found.partitions()}


def remove_generations(lake: Lake, location: TableName, gone: Collection[str]) -> None:
    """Remove the generations in `gone` from the snapshot table of that location; vacuum removes the files later. Raises LakeError."""
    uri = lake.snapshot(location)
    if not gone:
        return
    named = ", ".join(f"'{generation}'" for generation in sorted(gone))
    with lake_errors(uri):
        for _ in range(ATTEMPTS):
            found = open_table(lake, uri)
            try:
                if found is not None:
                    found.delete(f"{GENERATION} IN ({named})")
            except CommitFailedError:
                continue
            return
        raise crowded(uri)


def remove_unfinished(lake: Lake, location: TableName, before: datetime) -> int:
    """Remove the files older than `before` that a process left behind which died before it made the snapshot table; return how many.

    Where there is a table, its vacuum removes them. Raises LakeError.
    """
    if open_table(lake, lake.snapshot(location)) is not None:
        return 0
    with lake_errors(lake.snapshot(location)):
        found = filesystem(lake.uri).get_file_info(
            pafs.FileSelector(lake.layer_path("snapshot", location), recursive=True, allow_not_found=True)
        )
        gone = [file.path for file in found if _is_ours(file) and file.mtime < before]
        for path in gone:
            remove_file(lake.uri, path)
    return len(gone)


def _is_ours(file: pafs.FileInfo) -> bool:
    return file.type == pafs.FileType.File and f"/{GENERATION}=" in file.path and file.base_name.startswith("part-")

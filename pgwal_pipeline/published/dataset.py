"""Read one version of a Delta table by Arrow, without Spark.

Arrow's own reading of a Delta table takes neither deletion vectors nor mapped columns. Here both are taken, and files and columns that a
query does not need are left unread: by the statistics in the table's log, then by those of the Parquet files.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads

from pgwal_pipeline.lake.delta import lake_errors
from pgwal_pipeline.lake.layout import filesystem
from pgwal_pipeline.lake.standing import open_current, physical_names
from pgwal_pipeline.messages.errors import LakeError

_BATCH_ROWS = 131_072
_FORMAT = pads.ParquetFileFormat(default_fragment_scan_options=pads.ParquetFragmentScanOptions(pre_buffer=True))


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the table: its path from the table's root, and the statistics of the log by name (`min.…`, `max.…`, `null_count.…`)."""

    path: str
    statistics: Mapping[str, Any]


class TableDataset(pads.Dataset):
    """The rows of one version of a Delta table, as an Arrow dataset.

    DuckDB and Polars take it as they take any other: they ask `scanner` for the columns and the rows that a query needs. Making one reads
    the table's log, and no file of data. Raises LakeError if there is no such version, or if it cannot be read any more.
    """

    def __init__(self, path: str, version: int | None = None) -> None:  # pyright: ignore[reportMissingSuperCall] (the base cannot be made)
        self._path = path
        table = open_current(path, version)
        if table is None:
            raise LakeError(f"There is no Delta table at {path}.")
        self._table = table
        with lake_errors(path):
            self._schema = _arrow_schema(table)
            self._stored = physical_names(table)
            fields = json.loads(table.schema().to_json())["fields"]
        self.delta_types: Mapping[str, Any] = {field["name"]: field["type"] for field in fields}
        """The columns' types as Delta's log writes them."""
        self._stored_schema = pa.schema([field.with_name(self._stored[field.name]) for field in self._schema])

    @property
    def path(self) -> str:
        """Where the table is."""
        return self._path

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return self._schema

    @property
    def is_mapped(self) -> bool:
        """Whether columns have other names in the files than in the table."""
        return any(stored != name for name, stored in self._stored.items())

    @property
    def is_partitioned(self) -> bool:
        """Whether columns have their values in the log, not in the files."""
        return bool(self._partitions)

    @property
    def stored_names(self) -> Mapping[str, str]:
        """The columns' names in the files, by those in the table."""
        return self._stored

    @property
    def parts(self) -> "list[tuple[str, np.ndarray | None]]":
        """The files, by paths relative to the table, each with which of its rows are not deleted; None: all."""
        return [(unquote(file.path), self._kept.get(unquote(file.path).rsplit("/", 1)[-1])) for file in self._files]

    @property
    def bytes(self) -> int:
        """What the table's files take."""
        return sum(file.statistics["size_bytes"] for file in self._files)

    def files(self, filter: pads.Expression | None = None) -> list[str]:  # noqa: A002 - Arrow's name for it
        """Return the files that may have rows of `filter`, by the log's statistics; their paths are relative to the table."""
        return [fragment.path for fragment in self._fragments(filter)]

    def scanner(
        self,
        columns: Sequence[str] | Mapping[str, pads.Expression] | None = None,
        filter: pads.Expression | None = None,  # noqa: A002 - Arrow's name for it
        batch_size: int = _BATCH_ROWS,
        **options: Any,
    ) -> Any:
        """Return a scanner of the rows of `filter`, with `columns` or all of them: Arrow's own, or one that works like it."""
        if isinstance(columns, Mapping):
            of_none = pads.dataset(self._schema.empty_table()).scanner(columns=dict(columns))
            return _Scan(of_none.projected_schema, lambda: self._projected(columns, filter, batch_size))
        wanted = list(self._schema.names) if columns is None else list(columns)
        if not self.is_mapped and not self._kept:
            with lake_errors(self._path):
                return self._of(self._fragments(filter)).scanner(columns=wanted, filter=filter, batch_size=batch_size, **options)
        if not wanted:
            return self._counted(filter, batch_size)
        schema = pa.schema([self._schema.field(name) for name in wanted])
        return _Scan(schema, lambda: self._batches(wanted, filter, batch_size))

    def get_fragments(self, filter: pads.Expression | None = None) -> Iterator[pads.Fragment]:  # noqa: A002 - Arrow's name for it
        """Refuse: a file's rows are not all the table's. Raises NotImplementedError."""
        raise NotImplementedError("the files of a published table have rows that were deleted; read it by scanner()")

    def _counted(self, filter: pads.Expression | None, batch_size: int) -> pads.Scanner:  # noqa: A002
        """A scanner that only has a number of rows."""
        rows = sum(batch.num_rows for batch in self._batches(self._schema.names[:1], filter, batch_size))
        return pads.dataset(pa.table({"rows": pa.nulls(rows)})).scanner(columns=[])

    def _projected(
        self,
        columns: Mapping[str, pads.Expression],
        filter: pads.Expression | None,  # noqa: A002
        batch_size: int,
    ) -> Iterator[pa.RecordBatch]:
        for batch in self._batches(None, filter, batch_size):
            yield from pads.dataset(pa.Table.from_batches([batch])).scanner(columns=dict(columns)).to_batches()

    def _batches(self, columns: list[str] | None, filter: pads.Expression | None, batch_size: int) -> Iterator[pa.RecordBatch]:  # noqa: A002
        wanted = list(self._schema.names) if columns is None else columns
        needed = [name for name in self._schema.names if name in {*wanted, *_columns_of(filter, self._schema)}]
        stored = [self._stored[name] for name in needed]
        schema = pa.schema([self._schema.field(name) for name in needed])
        with lake_errors(self._path):
            for fragment in self._fragments(filter):
                keep = self._kept.get(fragment.path.rsplit("/", 1)[-1])
                rest = None if self.is_mapped else filter
                if keep is None and not self.is_mapped:
                    yield from self._of([fragment]).scanner(columns=wanted, filter=filter, batch_size=batch_size).to_batches()
                    continue
                for batch in _kept_rows(fragment, keep, self._stored_schema, stored, rest, batch_size):
                    renamed = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
                    if filter is None:
                        yield renamed.select(wanted)
                        continue
                    yield from pa.Table.from_batches([renamed]).filter(filter).select(wanted).to_batches()

    def _fragments(self, filter: pads.Expression | None) -> list[pads.ParquetFileFragment]:  # noqa: A002
        """The files that may have rows of `filter`."""
        used = _columns_of(filter, self._schema)
        place = filesystem(self._path)
        known = [
            _FORMAT.make_fragment(file.path, filesystem=place, partition_expression=self._promise(file.statistics, used))
            for file in self._files
        ]
        if filter is None:
            return known
        return list(pads.FileSystemDataset(known, self._schema, _FORMAT, place).get_fragments(filter))

    def _of(self, fragments: list[pads.ParquetFileFragment]) -> pads.FileSystemDataset:
        return pads.FileSystemDataset(fragments, self._schema, _FORMAT, filesystem(self._path))

    def _promise(self, statistics: Mapping[str, Any], columns: Sequence[str]) -> pads.Expression:
        """What the log's statistics say of all rows of a file, about these columns."""
        promise = pads.scalar(True)
        for name in self._partitions:
            value = statistics[f"partition.{name}"]
            promise &= pads.field(name).is_null() if value is None else pads.field(name) == pa.scalar(value, self._schema.field(name).type)
        for name in columns:
            kind, stored, field = self._schema.field(name).type, self._stored[name], pads.field(name)
            low, high = statistics.get(f"min.{stored}"), statistics.get(f"max.{stored}")
            # Only of types whose statistics are exact bounds: times are cut to milliseconds there, and NaN is beyond every float.
            if low is None or high is None or not (pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_string(kind)):
                continue
            bounds = (field >= pa.scalar(low, kind)) & (field <= pa.scalar(high, kind))
            promise &= bounds if statistics.get(f"null_count.{stored}") == 0 else bounds | field.is_null()
        return promise

    @cached_property
    def _partitions(self) -> list[str]:
        """The columns by which the table is partitioned; their values are in the log, not in the files."""
        return self._table.metadata().partition_columns

    @cached_property
    def _files(self) -> list[_File]:
        with lake_errors(self._path):
            rows = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        return [_File(row["path"], row) for row in rows]

    @cached_property
    def _kept(self) -> dict[str, np.ndarray]:
        """Of the files with deleted rows, by their names: which rows are kept."""
        with lake_errors(self._path):
            protocol = self._table.protocol()
            if "deletionVectors" not in (protocol.reader_features or ()):
                return {}
            found = pa.table(self._table.deletion_vectors())
        names = [unquote(uri).rsplit("/", 1)[-1] for uri in found["filepath"].to_pylist()]
        masks = (chunk.values.slice(chunk.offsets[n].as_py(), chunk.offsets[n + 1].as_py() - chunk.offsets[n].as_py())
                 for chunk in found["selection_vector"].chunks for n in range(len(chunk)))  # fmt: skip
        return {name: mask.to_numpy(zero_copy_only=False) for name, mask in zip(names, masks, strict=True)}


@dataclass(frozen=True)
class _Scan:
    """What readers use of Arrow's Scanner, over batches that are made as they are asked for.

    Arrow's own would make them ahead, in threads that do not end with the reader: they would still run Python when the process exits.
    """

    projected_schema: pa.Schema
    batches: Callable[[], Iterator[pa.RecordBatch]]

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.batches())

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    def to_table(self) -> pa.Table:
        return pa.Table.from_batches(self.batches(), self.projected_schema)

    def head(self, num_rows: int) -> pa.Table:
        found, rows = [], 0
        for batch in self.batches():
            found.append(batch)
            rows += batch.num_rows
            if rows >= num_rows:
                break
        return pa.Table.from_batches(found, self.projected_schema).slice(0, num_rows)

    def count_rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches())


def _arrow_schema(table: Any) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


def _kept_rows(
    fragment: pads.ParquetFileFragment,
    keep: np.ndarray | None,
    schema: pa.Schema,
    columns: list[str],
    filter: pads.Expression | None,  # noqa: A002
    batch_size: int,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file that are not deleted, from the row groups that may have rows of `filter`."""
    if filter is None:
        parts = [(0, fragment)]
    else:
        groups = [fragment.metadata.row_group(number).num_rows for number in range(fragment.metadata.num_row_groups)]
        starts = np.concatenate(([0], np.cumsum(groups)))
        parts = [(int(starts[part.row_groups[0].id]), part) for part in fragment.split_by_row_group(filter, schema)]
    for start, part in parts:
        at = start
        for batch in part.scanner(schema=schema, columns=columns, batch_size=batch_size).to_batches():
            mask = None if keep is None else keep[at : at + batch.num_rows]
            at += batch.num_rows
            if mask is None or mask.all():
                yield batch
                continue
            # A mask that ends before the file does deletes nothing there.
            whole = np.ones(batch.num_rows, np.bool_)
            whole[: len(mask)] = mask
            yield batch.filter(pa.array(whole))


def _columns_of(filter: pads.Expression | None, schema: pa.Schema) -> list[str]:  # noqa: A002
    """The columns that an expression names: those without which it means nothing."""
    if filter is None:
        return []
    text = str(filter)
    return [name for name in schema.names if name in text and not _is_bound(filter, [field for field in schema if field.name != name])]


def _is_bound(filter: pads.Expression, fields: list[pa.Field]) -> bool:  # noqa: A002
    try:
        pa.schema(fields).empty_table().filter(filter)
    except (pa.ArrowInvalid, pa.ArrowKeyError):
        return False
    return True

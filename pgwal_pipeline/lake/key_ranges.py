"""Find the ranges of the key in which changes lie, so that a MERGE reads only those files of its target that may have one of these keys.

The keys are read from the files of raw, the files' bounds from the target's log. What is read of the log only decides where the ranges are
cut: every key of the changes is in one of them, whatever the log says. A key that is null in its column (its value is in `_pgwal_text`) has
a range of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyarrow.compute import call_function
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pgwal_pipeline.lake.columns import literal, quote
from pgwal_pipeline.lake.files import Files
from pgwal_pipeline.lake.fold import holder_in_raw
from pgwal_pipeline.lake.layout import filesystem
from pgwal_pipeline.lake.parquet import plain_type
from pgwal_pipeline.lake.standing import physical_names

_ORDERED = (BooleanType, ShortType, IntegerType, LongType, StringType, DateType, TimestampType, TimestampNTZType, DecimalType)
"""Types whose order is the same for Arrow, Spark and the statistics. Floats are not: -0.0 equals 0.0, and nothing is beyond NaN."""
_RANGES = 32
_KEY_BYTES = 256 << 20
"""Of more keys than that only the smallest and the largest are looked at: they are held in memory, and sorted."""
_LONGEST_TEXT = 64
"""In characters: a longer bound is cut, to one that is a little further out."""

Keys = Mapping[str, pa.ChunkedArray]
"""The values of the key's columns, one entry a change."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of keys: for columns of the key their smallest and largest value; both are None for null."""

    bounds: tuple[tuple[str, Any, Any], ...]


@dataclass(frozen=True)
class KeyRanges:
    """Ranges that have every changed key, and what of the target's files may have keys in them: how many files, and their rows.

    `kinds` are the types of the key's columns in the target.
    """

    ranges: tuple[Range, ...]
    kinds: Mapping[str, DataType]
    files: int
    rows: int

    def condition(self, alias: str = "") -> str:
        """Return the condition that a row of the target (the relation `alias`) has a key in one of the ranges."""
        return f"({' OR '.join(self._within(one, alias) for one in self.ranges)})"

    def _within(self, one: Range, alias: str) -> str:
        parts = []
        for name, low, high in one.bounds:
            column, kind = quote(name, alias), self.kinds[name]
            if low is None:
                parts.append(f"{column} IS NULL")
                continue
            least, most = _least(low), _most(high)
            parts.append(f"{column} >= {_literal(least, kind)}")
            if most is not None:
                parts.append(f"{column} <= {_literal(most, kind)}")
        return f"({' AND '.join(parts)})"


@dataclass(frozen=True)
class _TargetFiles:
    """The files of the target: how many rows each has, and its smallest and largest value of the key's columns, None if not known."""

    rows: list[int]
    bounds: Mapping[str, list[tuple[Any, Any] | None]]
    nulls: Mapping[str, list[int | None]]


def find(
    target: DeltaTable, schema: StructType, changes: Files, key: Sequence[str], within: tuple[str, Any] | None = None
) -> KeyRanges | None:
    """Return the ranges in which the keys of `changes`, files of raw, lie; None if they would not spare a MERGE a file of the target.

    `schema` is the target's. With `within`, a partition column and its value, only the files of that partition count.
    """
    ordered = [name for name in key if name in schema.names and isinstance(schema[name].dataType, _ORDERED)]
    if not ordered or not changes.paths:
        return None
    files = _files_of(target, ordered, within)
    if len(files.rows) < 2:
        return None
    kinds = {name: schema[name].dataType for name in ordered}
    found = _keys(changes, kinds)
    if found is None:
        return None
    keys, whole = found
    ranges = tuple(_ranges(keys, ordered, files, list(range(len(files.rows))), _RANGES if whole else 1))
    hit = [number for number in range(len(files.rows)) if any(_may_hold(files, number, one) for one in ranges)]
    if len(hit) == len(files.rows) or not ranges:
        return None
    return KeyRanges(ranges, kinds, len(hit), sum(files.rows[number] for number in hit))


def _files_of(target: DeltaTable, names: Sequence[str], within: tuple[str, Any] | None) -> _TargetFiles:
    listed = pa.table(target.get_add_actions(flatten=True))
    if within is not None:
        listed = listed.filter(pads.field(f"partition.{within[0]}") == within[1])
    stored = physical_names(target)

    def column(what: str, name: str) -> list[Any]:
        title = f"{what}.{stored.get(name, name)}"
        return listed[title].to_pylist() if title in listed.column_names else [None] * listed.num_rows

    bounds = {name: [_bounds(*pair) for pair in zip(column("min", name), column("max", name), strict=True)] for name in names}
    nulls = {name: column("null_count", name) for name in names}
    return _TargetFiles([rows or 0 for rows in listed["num_records"].to_pylist()], bounds, nulls)


def _bounds(low: Any, high: Any) -> tuple[Any, Any] | None:
    return None if low is None or high is None else (low, high)


def _keys(changes: Files, kinds: Mapping[str, DataType]) -> tuple[Keys, bool] | None:
    """The keys of `changes`, and whether they are all there: of very many, only their bounds. None if a file cannot be read.

    That a file cannot be read is for the merge to report.
    """
    root, folder = changes.table.rsplit("/", 1)
    store = filesystem(root)
    holders = {name: holder_in_raw(changes.schema, name, kind) for name, kind in kinds.items()}
    parts: dict[str, list[pa.Array]] = {name: [] for name in kinds}
    size, whole = 0, True
    try:
        for path in changes.paths:
            file = pq.ParquetFile(f"{folder}/{path}", filesystem=store)
            for group in range(file.num_row_groups):
                has = [holder for holder in holders.values() if holder is not None and holder in file.schema_arrow.names]
                rows = file.read_row_group(group, columns=has)
                count = file.metadata.row_group(group).num_rows
                for name, holder in holders.items():
                    values = rows[holder] if holder in has else pa.chunked_array([pa.nulls(count)])
                    parts[name].extend(values.chunks if pa.types.is_null(values.type) else values.cast(plain_type(values.type)).chunks)
                size += rows.nbytes
                if size > _KEY_BYTES:
                    whole, size = False, 0
                    parts = {name: _ends(chunks) for name, chunks in parts.items()}
    except (OSError, pa.ArrowException):
        return None
    return {name: _joined(chunks) for name, chunks in parts.items()}, whole


def _joined(chunks: Sequence[pa.Array]) -> pa.ChunkedArray:
    kind = next((chunk.type for chunk in chunks if not pa.types.is_null(chunk.type)), pa.null())
    return pa.chunked_array([chunk.cast(kind) for chunk in chunks], kind)


def _ends(chunks: Sequence[pa.Array]) -> list[pa.Array]:
    """The smallest and the largest value of a column, and a null if it has one: of several columns these are no keys, but bound them."""
    values = _joined(chunks)
    if pa.types.is_null(values.type):
        return [pa.nulls(3)]
    ends = call_function("min_max", [values]).as_py()
    return [pa.array([ends["min"], ends["max"], None if values.null_count else ends["max"]], values.type)]


def _ranges(keys: Keys, names: Sequence[str], files: _TargetFiles, numbers: list[int], most: int) -> Iterator[Range]:
    """The ranges of `keys`, at most about `most`, cut where files of `numbers` lie between two keys."""
    name, further = names[0], names[1:]
    values = keys[name]
    sent = values.is_valid()
    if values.null_count:
        yield Range(((name, None, None),))
    if values.null_count == len(values):
        return
    there = {column: entries.filter(sent) for column, entries in keys.items()} if values.null_count else dict(keys)
    order = call_function("sort_indices", [there[name]])
    ordered = {column: entries.take(order).combine_chunks() for column, entries in there.items()}
    sorted_values = _array(ordered[name])
    for start, end in _pieces(sorted_values, files.bounds[name], numbers, most, apart=bool(further)):
        low, high = sorted_values[start].as_py(), sorted_values[end - 1].as_py()
        own = ((name, low, high),)
        if not further:
            yield Range(own)
            continue
        inside = {column: pa.chunked_array([_array(ordered[column]).slice(start, end - start)]) for column in further}
        near = [number for number in numbers if _overlaps(files.bounds[name][number], low, high)]
        pieces = max(1, most * (end - start) // len(sorted_values)) if low == high else 1
        for one in _ranges(inside, further, files, near, pieces):
            yield Range(own + one.bounds)


def _array(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array, whatever `combine_chunks` made of it."""
    if isinstance(values, pa.ChunkedArray):
        return pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    return values


def _pieces(
    values: pa.Array, bounds: Sequence[tuple[Any, Any] | None], numbers: Sequence[int], most: int, *, apart: bool
) -> list[tuple[int, int]]:
    """Cut sorted values where files lie between two of them; return at most `most` pieces, as first index and the index after the last.

    With `apart` each distinct value is a piece, if they are few: columns of the key that follow can then be cut too.
    """
    if apart:
        counts = values.value_counts().field("counts").to_numpy()
        if len(counts) <= most:
            ends = np.cumsum(counts)
            return [(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)]
    spared: dict[int, int] = {}
    for number in numbers:
        found = bounds[number]
        if found is None:
            continue
        before = _position(values, found[0], after=False)
        if before == _position(values, found[1], after=True) and 0 < before < len(values):
            spared[before] = spared.get(before, 0) + 1
    cuts = sorted(sorted(spared, key=lambda cut: -spared[cut])[: most - 1])
    return list(zip([0, *cuts], [*cuts, len(values)], strict=True))


def _position(values: pa.Array, wanted: Any, *, after: bool) -> int:
    """How many of the sorted values are less than `wanted`; with `after` also those that equal it."""
    first, last = 0, len(values)
    while first < last:
        middle = (first + last) // 2
        found = values[middle].as_py()
        if found < wanted or (after and found == wanted):
            first = middle + 1
        else:
            last = middle
    return first


def _overlaps(bounds: tuple[Any, Any] | None, low: Any, high: Any) -> bool:
    return bounds is None or (bounds[0] <= high and low <= bounds[1])


def _may_hold(files: _TargetFiles, number: int, one: Range) -> bool:
    """Whether a file may have rows with a key in the range."""
    return all(
        files.nulls[name][number] != 0 if low is None else _overlaps(files.bounds[name][number], low, high)
        for name, low, high in one.bounds
    )


def _least(value: Any) -> Any:
    """A bound that is not above `value`. A text is cut: what it begins with is not above it."""
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


def _most(value: Any) -> Any | None:
    """A bound that is not below `value`, None if there is none. A text that is cut ends with a greater character."""
    if not isinstance(value, str) or len(value) <= _LONGEST_TEXT:
        return value
    text = value[:_LONGEST_TEXT].rstrip("\U0010ffff")
    if not text:
        return None
    after = ord(text[-1]) + 1
    return text[:-1] + chr(0xE000 if after == 0xD800 else after)  # between them are no characters


def _literal(value: Any, kind: DataType) -> str:
    """A literal of the type `kind`: Delta compares no statistics with one of another type."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}{'L' if isinstance(kind, LongType) else 'S' if isinstance(kind, ShortType) else ''}"
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, Decimal):
        return f"CAST('{value:f}' AS {kind.simpleString()})"
    if isinstance(value, datetime):
        text = f"{value.replace(tzinfo=None).isoformat(' ')}"
        return f"TIMESTAMP_NTZ'{text}'" if isinstance(kind, TimestampNTZType) else f"TIMESTAMP'{text}Z'"
    assert isinstance(value, date)
    return f"DATE'{value.isoformat()}'"

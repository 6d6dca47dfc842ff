"""Turns fields into typed columns. Columns of one type are cast together across tables, so that many small tables cost little more than one
large one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pgwal_pipeline.decode import binary
from pgwal_pipeline.decode.casts import Cast, cast_to, kept
from pgwal_pipeline.decode.ragged import UnreadableError, offsets_of
from pgwal_pipeline.decode.tuples import SENT, UNCHANGED, Fields
from pgwal_pipeline.decode.types import TEXT_TYPE, UNCHANGED_TYPE, Target
from pgwal_pipeline.decode.vectors import Ints, Mask


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one table: the columns' targets and names, the places of their fields in a row, and each row's first field."""

    targets: Sequence[Target]
    names: Sequence[str]
    places: Sequence[int]
    first: Ints


@dataclass(slots=True)
class Columns:
    """The columns of a block. For each row `unchanged` lists columns that were not sent, `text` values that did not fit; None if none."""

    values: list[pa.Array]
    unchanged: pa.Array | None = None
    text: pa.Array | None = None


class CellError(ValueError):
    """A value that cannot be read: its block, row and column, and what is wrong with it."""

    def __init__(self, block: int, row: int, column: int, reason: str) -> None:
        super().__init__(reason)
        self.block = block
        self.row = row
        self.column = column


@dataclass(slots=True)
class _Marks:
    """Cells of one block that were not sent or did not fit: their rows and columns, and the texts to keep."""

    rows: list[Ints] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    texts: list[pa.Array] = field(default_factory=list)

    def add(self, column: int, rows: Ints, texts: pa.Array | None = None) -> None:
        if len(rows):
            self.rows.append(rows)
            self.columns.append(column)
            if texts is not None:
                self.texts.append(texts)


def decode_columns(fields: Fields, blocks: Sequence[Block]) -> list[Columns]:
    """Return the typed columns of every block; several blocks may share memory. Raises CellError."""
    cells: dict[Target, list[tuple[int, int]]] = {}
    for number, block in enumerate(blocks):
        for column, target in enumerate(block.targets):
            cells.setdefault(target, []).append((number, column))
    done = [Columns([pa.nulls(0)] * len(block.targets)) for block in blocks]
    misfits, unchanged = [_Marks() for _ in blocks], [_Marks() for _ in blocks]
    some_unchanged = bool((fields.kinds == UNCHANGED).any())
    for target, group in cells.items():
        wanted = fields.resolve(_concatenate([blocks[number].first + blocks[number].places[column] for number, column in group]))
        kinds = fields.kinds[wanted]
        try:
            cast, texts_of = _read(fields, wanted, kinds != SENT, target)
        except UnreadableError as error:
            raise _locate(blocks, group, error) from None
        begin = 0
        for number, column in group:
            end = begin + len(blocks[number].first)
            done[number].values[column] = cast.values if len(group) == 1 else cast.values.slice(begin, end - begin)
            if cast.misfits is not None:
                rows = np.flatnonzero(cast.misfits[begin:end])
                misfits[number].add(column, rows, texts_of(rows + begin))
            if some_unchanged:
                unchanged[number].add(column, np.flatnonzero(kinds[begin:end] == UNCHANGED))
            begin = end
    for number, block in enumerate(blocks):
        done[number].unchanged = _unchanged(block, unchanged[number])
        done[number].text = _text(block, misfits[number])
    return done


def _read(fields: Fields, wanted: Ints, missing: Mask, target: Target) -> tuple[Cast, Callable[[Ints], pa.StringArray]]:
    """Return the values of the fields, and a function that returns the texts of some of them. Raises UnreadableError."""
    size = None if target.binary is None else binary.SIZES.get(target.binary)
    if target.binary is None or size is None:
        texts = fields.texts(wanted, missing)
        return cast_to(texts, target), lambda rows: kept(texts.take(pa.array(rows)))
    numbers = fields.numbers(wanted, missing, size)
    return Cast(*binary.read(numbers, missing, target.arrow, target.binary)), lambda rows: binary.written(numbers[rows], target.arrow)


def _concatenate(vectors: list[Ints]) -> Ints:
    return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)


def _locate(blocks: Sequence[Block], group: list[tuple[int, int]], error: UnreadableError) -> CellError:
    index = error.index
    for number, column in group:
        if index < len(blocks[number].first):
            return CellError(number, index, column, error.reason)
        index -= len(blocks[number].first)
    raise AssertionError("an index past the last block") from error


def _names(block: Block, marks: _Marks) -> tuple[pa.Array, Ints, pa.Array, Ints]:
    """Return, for marked cells ordered by row: the columns' names, each row's bounds, which rows have none, and the order."""
    rows = np.concatenate(marks.rows)
    columns = np.repeat(marks.columns, [len(some) for some in marks.rows])
    order = np.lexsort([columns, rows])
    names = pa.array(block.names, pa.string()).take(pa.array(columns[order]))
    counts = np.bincount(rows, minlength=len(block.first))
    return names, offsets_of(counts), pa.array(counts == 0), order


def _unchanged(block: Block, marks: _Marks) -> pa.Array | None:
    if not marks.rows:
        return None
    names, offsets, none, _ = _names(block, marks)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), names, type=UNCHANGED_TYPE, mask=none)


def _text(block: Block, marks: _Marks) -> pa.Array | None:
    if not marks.rows:
        return None
    names, offsets, none, order = _names(block, marks)
    texts = pa.concat_arrays(marks.texts).take(pa.array(order))
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, texts, type=TEXT_TYPE, mask=none)

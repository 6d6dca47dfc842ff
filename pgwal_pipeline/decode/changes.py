"""Decodes the row changes of a batch of messages into tables, one for each version of a relation."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.columns import Block, CellError, Columns, decode_columns
from pgwal_pipeline.decode.frames import HEAD, Frames
from pgwal_pipeline.decode.ragged import UnreadableError, assemble
from pgwal_pipeline.decode.relations import KnownRelations, Layout
from pgwal_pipeline.decode.route import DELETE, INSERT, UPDATE, Route
from pgwal_pipeline.decode.tuples import SENT, Fields, check_kinds, fill_unchanged, walk
from pgwal_pipeline.decode.types import TEXT_TYPE, UNCHANGED_TYPE
from pgwal_pipeline.decode.vectors import Bytes, Ints, Mask
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline.values.relation import Relation, TableName

OPS = b"IUDTK"
"""The operations of a row, as bytes: insert, update, delete, truncate, and the old key of an update that changed it."""

_KEY, _OLD, _NEW = b"KON"


class LargeRow(Exception):
    """A change in the window is too large, so that only its head is here; `size` is how many bytes it has."""

    def __init__(self, relation: Relation, size: int) -> None:
        super().__init__(f"a row of {relation.table} has {size} bytes")
        self.relation = relation
        self.size = size


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changes of one table under one definition.

    `rows` has the schema `change_schema(relation)`: one row for each change, and for each old key one with the operation K and the ordinal
    of its update, in any order. The counts are of rows; `key_changes` counts K rows. `unchanged`: some row has a value that was not sent.
    """

    relation: Relation
    rows: pa.Table
    inserts: int
    updates: int
    deletes: int
    truncates: int
    key_changes: int
    unchanged: bool


@dataclass(frozen=True, slots=True)
class _Tuples:
    """The messages that change a row, ordered by version: their index in the batch, version, first field, and column count.

    `double`: whether an old tuple comes before the new one.
    """

    message: Ints
    version: Ints
    first: Ints
    width: Ints
    double: Mask


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows to build, ordered by version: the operation, the message it comes from, its first field, and its ordinal."""

    op: Bytes
    message: Ints
    version: Ints
    first: Ints
    ordinal: Ints


def decode_changes(routed: Route, known: KnownRelations) -> tuple[TableChanges, ...]:
    """Decode the changes that belong to the window.

    Raises DecodeError for the first message found that cannot be read, LargeRow for the first of which only the head is here.
    """
    frames = routed.frames
    tuples = _order(routed, known, np.flatnonzero(routed.rows))
    fields = _read(frames, known, tuples)
    doubles = np.flatnonzero(tuples.double)
    fields = fill_unchanged(fields, tuples.first[doubles], (tuples.first + tuples.width)[doubles], tuples.width[doubles])
    rows = _rows(routed, known, tuples, fields)
    if not len(rows.op):
        return ()
    starts = np.flatnonzero(np.diff(rows.version, prepend=-1))
    stops = np.append(starts[1:], len(rows.version))
    layouts = [known.layout(version) for version in rows.version[starts].tolist()]
    for layout in layouts:
        failpoints.at("decode", layout.relation.table)
    blocks = [
        Block(layout.targets, layout.relation.column_names, layout.places, rows.first[start:stop])
        for layout, start, stop in zip(layouts, starts.tolist(), stops.tolist(), strict=True)
    ]
    try:
        columns = decode_columns(fields, blocks)
    except CellError as error:
        relation = layouts[error.block].relation
        message = int(rows.message[starts[error.block] + error.row])
        reason = f"in column {relation.columns[error.column].name!r}, {error}"
        raise frames.table_error(message, reason, relation.table) from None
    return _tables(routed, rows, layouts, columns, starts, stops)


def _order(routed: Route, known: KnownRelations, messages: Ints) -> _Tuples:
    """Check the messages and return their versions and shapes; wider tables come first, as `walk` needs it."""
    frames, heads = routed.frames, routed.heads[messages]
    short = frames.ends[messages] - frames.starts[messages] < HEAD
    if short.any():
        raise frames.table_error(int(messages[short.argmax()]), "it is too short for a change")
    try:
        versions = known.versions(heads >> 24 & 0xFFFFFFFF, messages)
    except UnreadableError as error:
        raise frames.table_error(int(messages[error.index]), error.reason) from None
    widths = known.widths[versions]
    wanted = widths >= 0
    if not wanted.all():
        messages, heads, versions, widths = messages[wanted], heads[wanted], versions[wanted], widths[wanted]
    for message, size in frames.heads.items():
        at = np.flatnonzero(messages == message)
        if len(at):
            raise LargeRow(known.layout(int(versions[at[0]])).relation, size)
    kinds, tags = routed.kinds[messages], heads >> 16 & 0xFF
    old = (tags == _KEY) | (tags == _OLD)
    bad_tag = ~np.where(tags == _NEW, kinds != DELETE, old & (kinds != INSERT))
    if bad_tag.any():
        index = int(bad_tag.argmax())
        raise frames.table_error(int(messages[index]), "its rows are not marked as they should be", _table(known, versions[index]))
    _check_widths(frames, known, messages, versions, heads & 0xFFFF)
    double = old & (kinds == UPDATE)
    counts = np.where(double, 2 * widths, widths)
    first = np.cumsum(counts) - counts
    order = _by_version(versions, known.widths)
    if order is None:
        return _Tuples(messages, versions, first, widths, double)
    return _Tuples(messages[order], versions[order], first[order], widths[order], double[order])


def _by_version(versions: Ints, widths: Ints) -> Ints | None:
    """Return the stable order that groups rows by version, wider versions first; None if there is one version only."""
    present = np.flatnonzero(np.bincount(versions))
    if len(present) < 2:
        return None
    rank = np.zeros(len(widths), np.uint16 if len(present) < 1 << 16 else np.int64)  # 16 bits are sorted fastest
    rank[present[np.argsort(-widths[present], kind="stable")]] = np.arange(len(present))
    return np.argsort(rank[versions], kind="stable")


def _table(known: KnownRelations, version: int) -> TableName:
    return known.layout(int(version)).relation.table


def _check_widths(frames: Frames, known: KnownRelations, messages: Ints, versions: Ints, counts: Ints) -> None:
    wrong = counts != known.widths[versions]
    if wrong.any():
        index = int(wrong.argmax())
        reason = f"a row in it has {counts[index]} columns, but the table {known.widths[versions[index]]}"
        raise frames.table_error(int(messages[index]), reason, _table(known, versions[index]))


def _read(frames: Frames, known: KnownRelations, tuples: _Tuples) -> Fields:
    """Read all tuples of the messages. Raises DecodeError if the last tuple of a message does not end where the message does."""
    total = int((tuples.width * np.where(tuples.double, 2, 1)).sum())
    fields = Fields.empty(frames.buffer, total, int(known.widths.max(initial=0)))
    starts, ends = frames.starts[tuples.message], frames.ends[tuples.message]

    def fail(index: int, reason: str) -> DecodeError:
        return frames.table_error(int(tuples.message[index]), reason, _table(known, tuples.version[index]))

    try:
        at = walk(frames, fields, tuples.first, starts + HEAD, ends, tuples.width)
    except UnreadableError as error:
        raise fail(error.index, error.reason) from None
    doubles = np.flatnonzero(tuples.double)
    if len(doubles):
        between = at[doubles]
        head = frames.word(between)
        wrong = (between + 3 > ends[doubles]) | (head >> 56 != _NEW) | ((head >> 40 & 0xFFFF) != tuples.width[doubles])
        if wrong.any():
            raise fail(int(doubles[wrong.argmax()]), "no new row of the table follows the old one")
        first = (tuples.first + tuples.width)[doubles]
        try:
            at[doubles] = walk(frames, fields, first, between + 3, ends[doubles], tuples.width[doubles])
        except UnreadableError as error:
            raise fail(int(doubles[error.index]), error.reason) from None
    wrong = at != ends
    if wrong.any():
        index = int(wrong.argmax())
        raise fail(index, f"its rows end {ends[index] - at[index]} bytes before it does")
    field = check_kinds(fields)
    if field is not None:
        counts = np.where(tuples.double, 2, 1) * tuples.width
        index = int(((tuples.first <= field) & (field < tuples.first + counts)).argmax())
        column = (field - int(tuples.first[index])) % int(tuples.width[index])
        raise fail(index, f"column {column + 1} of a row is marked {chr(fields.kinds[field])!r}, neither text nor null nor unchanged")
    return fields


def _rows(routed: Route, known: KnownRelations, tuples: _Tuples, fields: Fields) -> _Rows:
    """Return the rows to build: one for each change, one more for each old key that differs, one for each table of a Truncate."""
    keys = _changed_keys(known, tuples, fields)
    extra = [
        _Rows(
            np.full(len(keys), ord("K"), np.uint8),
            tuples.message[keys],
            tuples.version[keys],
            tuples.first[keys],
            routed.ordinals[tuples.message[keys]],
        ),
        _truncates(routed, known, fields),
    ]
    rows = _Rows(
        routed.kinds[tuples.message],
        tuples.message,
        tuples.version,
        np.where(tuples.double, tuples.first + tuples.width, tuples.first),
        routed.ordinals[tuples.message],
    )
    if not any(len(more.op) for more in extra):
        return rows
    parts = [rows, *extra]
    op, message = np.concatenate([part.op for part in parts]), np.concatenate([part.message for part in parts])
    version, first = np.concatenate([part.version for part in parts]), np.concatenate([part.first for part in parts])
    ordinal = np.concatenate([part.ordinal for part in parts])
    order = _by_version(version, known.widths)
    if order is None:
        return _Rows(op, message, version, first, ordinal)
    return _Rows(op[order], message[order], version[order], first[order], ordinal[order])


def _changed_keys(known: KnownRelations, tuples: _Tuples, fields: Fields) -> Ints:
    """Return the messages whose old row has another key than the new row; without a key, all messages with an old row."""
    doubles = np.flatnonzero(tuples.double)
    if not len(doubles):
        return doubles
    changed = np.ones(len(doubles), np.bool_)
    versions = tuples.version[doubles]
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(doubles)], strict=True):
        key = known.layout(int(versions[start])).key
        if key:
            some = doubles[start:stop]
            old = tuples.first[some]
            new = old + tuples.width[some]
            changed[start:stop] = np.logical_or.reduce([_differ(fields, old + column, new + column) for column in key])
    return doubles[changed]


def _differ(fields: Fields, old: Ints, new: Ints) -> Mask:
    old, new = fields.resolve(old), fields.resolve(new)
    one, other = (fields.texts(some, fields.kinds[some] != SENT).view(pa.binary()) for some in (old, new))
    differ = np.asarray(pc.call_function("not_equal", [one, other]).fill_null(False))
    return differ | (fields.kinds[old] != fields.kinds[new])


def _truncates(routed: Route, known: KnownRelations, fields: Fields) -> _Rows:
    emptied = [(message, oid, place) for message, truncate in routed.truncates.items() for place, oid in enumerate(truncate.relations)]
    messages, oids, places = np.array(emptied, np.int64).reshape(-1, 3).T
    try:
        versions = known.versions(oids, messages)
    except UnreadableError as error:
        raise routed.frames.message_error(int(messages[error.index]), error.reason) from None
    wanted = known.widths[versions] >= 0
    messages, versions, places = messages[wanted], versions[wanted], places[wanted]
    return _Rows(
        np.full(len(messages), ord("T"), np.uint8),
        messages,
        versions,
        np.full(len(messages), fields.absent),
        routed.ordinals[messages] + places,
    )


def _tables(
    routed: Route, rows: _Rows, layouts: list[Layout], columns: list[Columns], starts: Ints, stops: Ints
) -> tuple[TableChanges, ...]:
    """Build one table for each version; the versions of a relation are in the order of the stream."""
    transaction = routed.transaction[rows.message]
    count = len(rows.op)
    meta = pa.RecordBatch.from_arrays(
        [
            assemble(pa.string(), count, None, np.arange(count + 1, dtype=np.int32), rows.op),
            pa.array(routed.transactions.commit_lsn[transaction]),
            pa.array(rows.ordinal),
            pa.array(routed.transactions.xid[transaction]),
            pa.array(routed.transactions.committed_at[transaction]).view(pa.timestamp("us", "UTC")),
        ],
        names=["", "", "", "", ""],
    )
    done = []
    for number in np.argsort(rows.version[starts]).tolist():
        start, length = int(starts[number]), int(stops[number] - starts[number])
        layout, column = layouts[number], columns[number]
        unchanged = pa.nulls(length, UNCHANGED_TYPE) if column.unchanged is None else column.unchanged
        text = pa.nulls(length, TEXT_TYPE) if column.text is None else column.text
        batch = pa.RecordBatch.from_arrays([*column.values, *meta.slice(start, length).columns, unchanged, text], schema=layout.schema)
        if len(layouts) > 1:
            # A slice keeps the memory of all tables alive. Concatenating it with an empty one copies it.
            batch = pa.concat_batches([batch, batch.slice(0, 0)])
        ops = np.bincount(rows.op[start : start + length], minlength=128)
        done.append(
            TableChanges(
                layout.relation,
                pa.Table.from_batches([batch]),
                *(int(ops[op]) for op in OPS),
                unchanged=column.unchanged is not None,
            )
        )
    return tuple(done)

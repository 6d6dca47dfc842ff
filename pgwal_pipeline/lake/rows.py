"""Convert the ledger's records to Arrow rows and back, a column at a time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from functools import cache
from itertools import islice, repeat
from typing import Any

import numpy as np
import pyarrow as pa

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.records import (
    Chunk,
    FileWrite,
    Plan,
    Proof,
    Publish,
    Registration,
    Source,
    TablePointer,
    TableState,
    TableWrite,
    Window,
    relation_from_json,
    relation_to_json,
)
from pgwal_pipeline.lake.stream_facts import Read, StreamFacts
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.xid import TransactionMark

_MOMENT = pa.timestamp("us", "UTC")
_FILE = pa.struct([("path", pa.string()), ("size", pa.int64()), ("rows", pa.int64()), ("stats", pa.string())])
_WRITE = pa.struct(
    [
        ("table", pa.string()),
        ("path", pa.string()),
        ("rows", pa.int64()),
        ("inserts", pa.int64()),
        ("updates", pa.int64()),
        ("deletes", pa.int64()),
        ("truncates", pa.int64()),
        ("key_changes", pa.int64()),
        ("unchanged", pa.bool_()),
        ("files", pa.list_(_FILE)),
        ("schema", pa.string()),
    ]
)

_NEWEST = pa.struct([("lsn", pa.int64()), ("committed_at", pa.int64())])
_MARK = pa.struct([("commit_lsn", pa.int64()), ("xid", pa.int64()), ("committed_at", pa.int64())])
_COUNTS = ("rows", "inserts", "updates", "deletes", "truncates", "key_changes", "unchanged")

SOURCE = pa.schema(
    [
        ("system_identifier", pa.string()),  # an unsigned 64-bit number
        ("timeline", pa.int64()),
        ("database_oid", pa.int64()),
        ("database", pa.string()),
        ("publication", pa.string()),
        ("slot", pa.string()),
        ("publication_oid", pa.int64()),
        ("format", pa.int64()),
        ("at", _MOMENT),
    ]
)
WINDOWS = pa.schema(
    [
        ("key", pa.string()),
        ("slot", pa.string()),
        ("start_lsn", pa.int64()),
        ("end_lsn", pa.int64()),
        ("state", pa.string()),
        ("transactions", pa.int64()),
        ("changes", pa.int64()),
        ("bytes", pa.int64()),
        ("seconds", pa.map_(pa.string(), pa.float64())),
        ("min_xid", pa.int64()),
        ("max_xid", pa.int64()),
        ("marks", pa.list_(_MARK)),
        ("at", _MOMENT),
        ("tables", pa.list_(_WRITE)),
        ("newest", pa.list_(_NEWEST)),  # of each of `tables`, in their order
    ]
)
PLANS = pa.schema([("start_lsn", pa.int64()), ("ends", pa.list_(pa.int64())), ("ended", pa.string()), ("at", _MOMENT)])
READS = pa.schema([*WINDOWS, pa.field("streamed", pa.string())])
TABLES = pa.schema(
    [
        ("table", pa.string()),
        ("oid", pa.int64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("key", pa.list_(pa.string())),
        ("relation", pa.string()),
        ("generation", pa.string()),
        ("reading", pa.string()),
        ("published", pa.string()),
        ("joined_xid", pa.int64()),
        ("required_lsn", pa.int64()),
        ("storage", pa.string()),
        ("dropped", pa.list_(pa.string())),
        ("kept_as", pa.string()),
        ("earlier", pa.list_(pa.int64())),
        ("stage", pa.string()),
        ("gap_lsn", pa.int64()),
        ("failures", pa.int64()),
        ("retry_at", _MOMENT),
        ("rereads", pa.int64()),
        ("raw_from", pa.int64()),
        ("unclean", pa.list_(pa.string())),
        ("options", pa.string()),
        ("accepted", pa.string()),
        ("held", pa.string()),
        ("at", _MOMENT),
    ]
)
CHUNKS = pa.schema(
    [
        ("table", pa.string()),
        ("generation", pa.string()),
        ("chunk", pa.int64()),
        ("lower", pa.list_(pa.string())),
        ("upper", pa.list_(pa.string())),
        ("attempt", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("snapshot", pa.string()),
        ("insert_lsn", pa.int64()),
        ("at", _MOMENT),
    ]
)
PUBLISHES = pa.schema(
    [
        ("lsn", pa.int64()),
        ("published_at", _MOMENT),
        ("tables", pa.map_(pa.string(), pa.struct([("path", pa.string()), ("version", pa.int64())]))),
    ]
)
REGISTRATIONS = pa.schema(
    [
        ("location", pa.string()),
        ("name", pa.string()),
        ("target", pa.string()),
        ("tried", pa.string()),
        ("comments", pa.string()),
        ("error", pa.string()),
        ("failures", pa.int64()),
        ("retry_at", _MOMENT),
        ("at", _MOMENT),
    ]
)
PROOFS = pa.schema(
    [
        ("location", pa.string()),
        ("generation", pa.string()),
        ("verified_through", pa.int64()),
        ("proven_at", _MOMENT),
        ("round_lsn", pa.int64()),
        ("cursor", pa.list_(pa.string())),
        ("rows", pa.int64()),
        ("seconds", pa.float64()),
        ("at", _MOMENT),
    ]
)


def source_rows(source: Source, now: datetime) -> pa.Table:
    """Return a source as one row of SOURCE."""
    return pa.Table.from_pylist([_fields(source) | {"system_identifier": str(source.system_identifier), "at": now}], SOURCE)


def sources(rows: pa.Table) -> list[Source]:
    """Return the sources in `rows`, in their order."""
    return [Source(**_known(Source, row, system_identifier=int(row["system_identifier"]))) for row in _records(rows)]


def window_rows(windows: Iterable[Window], lake: Lake, now: datetime) -> pa.Table:
    """Return windows as rows of WINDOWS. Paths are relative to the lake's root; only prepared windows keep their files."""
    return pa.Table.from_pylist([_window_row(window, lake) | {"at": window.at or now} for window in windows], WINDOWS)


def _window_row(window: Window, lake: Lake) -> dict[str, Any]:
    prepared = window.state == "prepared"
    tables = [
        _fields(write)
        | {
            "path": lake.relative(write.path),
            "schema": write.schema_json if prepared else None,
            "files": [_fields(file) for file in write.files] if prepared else [],
        }
        for write in window.tables
    ]
    marks = [_fields(mark) for mark in window.marks]
    newest = [{"lsn": write.newest_lsn, "committed_at": write.newest_at} for write in window.tables]
    return _fields(window) | {"seconds": list(window.seconds.items()), "tables": tables, "marks": marks, "newest": newest}


def windows(rows: pa.Table, lake: Lake) -> list[Window]:
    """Return the windows in `rows`, in their order."""
    plain = rows.drop_columns(["tables", "newest"])
    tables = _writes(rows["tables"].combine_chunks(), rows["newest"].combine_chunks(), lake)
    return [
        Window(**_known(Window, row, seconds=dict(row["seconds"] or ()), marks=_marks(row["marks"]), tables=writes))
        for row, writes in zip(_records(plain), tables, strict=True)
    ]


def _marks(found: Sequence[Mapping[str, int]] | None) -> tuple[TransactionMark, ...]:
    return tuple(TransactionMark(**mark) for mark in found or ())


def _writes(lists: pa.ListArray, newest: pa.ListArray, lake: Lake) -> Iterator[tuple[TableWrite, ...]]:
    """The table writes of each window. As there are many, they are decoded field by field, without a dict for each."""
    found = lists.flatten()
    lengths = np.diff(lists.offsets.to_numpy())
    has_newest = np.repeat(newest.is_valid().to_numpy(zero_copy_only=False), lengths)
    paths = {path: lake.absolute(path) for path in found.field("path").unique().to_pylist()}
    files = found.field("files")
    writes = [
        TableWrite(table, paths[path], schema or "", tuple(FileWrite(**file) for file in named or ()), *counts)
        for table, path, schema, named, *counts in zip(
            found.field("table").to_pylist(),
            found.field("path").to_pylist(),
            found.field("schema").to_pylist(),
            files.to_pylist() if len(files.flatten()) else repeat(None),
            *(found.field(name).to_pylist() for name in _COUNTS),
            *(_where(has_newest, newest.flatten().field(name)) for name in ("lsn", "committed_at")),
            strict=False,
        )
    ]
    remaining = iter(writes)
    return (tuple(islice(remaining, length)) for length in lengths.tolist())


def _where(known: np.ndarray, values: pa.Array) -> list[int]:
    """Return the values in their order, each at the next place that is `known`; 0 at the other places."""
    placed = np.zeros(len(known), "i8")
    placed[known] = values.to_numpy(zero_copy_only=False)
    return placed.tolist()


def plan_rows(plan: Plan, now: datetime) -> pa.Table:
    """Return a plan as one row of PLANS."""
    return pa.Table.from_pylist([_fields(plan) | {"ends": list(plan.ends), "at": plan.at or now}], PLANS)


def plans(rows: pa.Table) -> list[Plan]:
    """Return the plans in `rows`, in their order."""
    return [Plan(**_known(Plan, row, ends=tuple(row["ends"] or ()))) for row in _records(rows)]


def read_rows(read: Read, lake: Lake, now: datetime) -> pa.Table:
    """Return a window that was read ahead as one row of READS. The window is a prepared one, so the row has its files."""
    return window_rows([read.window], lake, now).append_column("streamed", pa.array([read.facts.to_json()], pa.string()))


def reads(rows: pa.Table, lake: Lake) -> list[Read]:
    """Return the windows that were read ahead in `rows`, in their order."""
    texts = rows["streamed"].to_pylist()
    return [Read(window, StreamFacts.from_json(text)) for window, text in zip(windows(rows, lake), texts, strict=True)]


def state_rows(states: Iterable[TableState], now: datetime) -> pa.Table:
    """Return table states as rows of TABLES."""
    return pa.Table.from_pylist(
        [
            _fields(state)
            | {
                "table": str(state.table),
                "key": list(state.key),
                "dropped": list(state.dropped),
                "earlier": list(state.earlier),
                "unclean": list(state.unclean),
                "kept_as": None if state.kept_as is None else str(state.kept_as),
                "relation": None if state.relation is None else relation_to_json(state.relation),
                "storage": None if state.storage is None else state.storage.to_json(),
                "accepted": None if state.accepted is None else relation_to_json(state.accepted),
                "at": state.at or now,
            }
            for state in states
        ],
        TABLES,
    )


def states(rows: pa.Table) -> list[TableState]:
    """Return the table states in `rows`, in their order, without those in state `renamed`."""
    return [
        TableState(
            **_known(
                TableState,
                row,
                table=TableName.parse(row["table"]),
                key=tuple(row["key"] or ()),
                dropped=tuple(row["dropped"] or ()),
                earlier=tuple(row["earlier"] or ()),
                unclean=tuple(row.get("unclean") or ()),
                failures=row["failures"] or 0,
                rereads=row["rereads"] or 0,
                raw_from=row["raw_from"] or 0,
                kept_as=None if row["kept_as"] is None else TableName.parse(row["kept_as"]),
                relation=None if row["relation"] is None else relation_from_json(row["relation"]),
                storage=None if row["storage"] is None else Storage.from_json(row["storage"]),
                accepted=relation_from_json(text) if (text := row.get("accepted")) is not None else None,
            )
        )
        for row in _records(rows)
        if row["state"] != "renamed"
    ]


def chunk_rows(chunks: Iterable[Chunk], now: datetime) -> pa.Table:
    """Return chunks as rows of CHUNKS."""
    return pa.Table.from_pylist([_fields(chunk) | {"table": str(chunk.table), "at": chunk.at or now} for chunk in chunks], CHUNKS)


def chunks(rows: pa.Table) -> list[Chunk]:
    """Return the chunks in `rows`, in their order."""
    return [
        Chunk(**_known(Chunk, row, table=TableName.parse(row["table"]), lower=_bound(row["lower"]), upper=_bound(row["upper"])))
        for row in _records(rows)
    ]


def _bound(found: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if found is None else tuple(found)


def publish_rows(publish: Publish, lake: Lake) -> pa.Table:
    """Return a publish as one row of PUBLISHES. Paths are relative to the lake's root."""
    tables = [(str(table), {"path": lake.relative(pointer.path), "version": pointer.version}) for table, pointer in publish.tables.items()]
    return pa.Table.from_pylist([_fields(publish) | {"tables": tables}], PUBLISHES)


def publishes(rows: pa.Table, lake: Lake) -> list[Publish]:
    """Return the publishes in `rows`, in their order."""
    return [
        Publish(
            lsn=row["lsn"],
            published_at=row["published_at"],
            tables={
                TableName.parse(name): TablePointer(lake.absolute(found["path"]), found["version"]) for name, found in row["tables"] or ()
            },
        )
        for row in _records(rows)
    ]


def registration_rows(registrations: Iterable[Registration], now: datetime) -> pa.Table:
    """Return registrations as rows of REGISTRATIONS."""
    found = [_fields(one) | {"location": str(one.location), "at": one.at or now} for one in registrations]
    return pa.Table.from_pylist(found, REGISTRATIONS)


def registrations(rows: pa.Table) -> list[Registration]:
    """Return the registrations in `rows`, in their order."""
    return [Registration(**_known(Registration, row, location=TableName.parse(row["location"]))) for row in _records(rows)]


def proof_rows(proofs: Iterable[Proof], now: datetime) -> pa.Table:
    """Return proofs as rows of PROOFS."""
    found = [
        _fields(one) | {"location": str(one.location), "cursor": None if one.cursor is None else list(one.cursor), "at": one.at or now}
        for one in proofs
    ]
    return pa.Table.from_pylist(found, PROOFS)


def proofs(rows: pa.Table) -> list[Proof]:
    """Return the proofs in `rows`, in their order."""
    return [Proof(**_known(Proof, row, location=TableName.parse(row["location"]), cursor=_bound(row["cursor"]))) for row in _records(rows)]


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _known(record: Any, row: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """The fields of a record that a row has. A null in the place of one with a default is from before the field, which then has that."""
    defaults = _with_defaults(record)
    return {
        name: value for name in record.__slots__ if name in row and ((value := row[name]) is not None or name not in defaults)
    } | changed


@cache
def _with_defaults(record: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(record) if field.default is not MISSING or field.default_factory is not MISSING)


def _records(rows: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows as dicts. Converting whole columns takes a fraction of the time of converting rows."""
    columns = [column.to_pylist() for column in rows.columns]
    names = rows.column_names
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))

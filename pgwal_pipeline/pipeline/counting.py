"""From what was read of windows to windows that count: what the stream told is reviewed, the ledger takes them, raw names their files."""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import psycopg

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.errors import SlotBusy
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Read, TableState, Window
from pgwal_pipeline.lake.raw import commit_window
from pgwal_pipeline.lake.records import relation_from_json, relation_to_json
from pgwal_pipeline.lsn import window_key
from pgwal_pipeline.pipeline.changes import Look, Streamed
from pgwal_pipeline.pipeline.looks import looks, next_xid, review_tables
from pgwal_pipeline.pipeline.window import StreamBroke, WindowRead
from pgwal_pipeline.postgres import catalog
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.progress import Progress
from pgwal_pipeline.relation import Relation, TableName
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.xid import Snapshot


@dataclass(frozen=True)
class Pass:
    """One drain: what it goes by, its connection to the source and lake, and whom it tells how far it is."""

    settings: Settings
    ledger: Ledger
    conn: psycopg.Connection[Any]
    server_version: int
    warn: Callable[[str], None]
    progress: Progress


@dataclass(frozen=True)
class Told:
    """What the stream told of the tables besides their rows.

    The tables as they were, by oid, the last definition last; the transactions (32 bits) that truncated one, by its oid; which
    table could not be written, by its oid and with the reason, by its place. The others are as `WindowRead` has them.
    """

    relations: Mapping[int, Sequence[Relation]]
    truncated: Mapping[int, Collection[int]]
    refused: Mapping[str, tuple[int, str]]
    refilled: Collection[int] = ()
    partitions: Mapping[int, Collection[int]] = field(default_factory=dict)
    lacking: Collection[int] = ()

    @classmethod
    def of(cls, read: WindowRead) -> "Told":
        """What reading a window found."""
        refused = {error.table: (error.oid, str(error)) for error in read.refused}
        return cls(_by_oid(read.relations), read.truncated, refused, read.refilled, read.partitions, read.lacking)

    @classmethod
    def joined(cls, parts: Iterable["Told"]) -> "Told":
        """What windows that follow one another told together."""
        relations: list[Relation] = []
        truncated: dict[int, set[int]] = {}
        refused: dict[str, tuple[int, str]] = {}
        refilled: set[int] = set()
        partitions: dict[int, set[int]] = {}
        lacking: set[int] = set()
        for part in parts:
            relations += chain.from_iterable(part.relations.values())
            refused = {**part.refused, **refused}
            refilled.update(part.refilled)
            lacking.update(part.lacking)
            for oid, xids in part.truncated.items():
                truncated.setdefault(oid, set()).update(xids)
            for oid, oids in part.partitions.items():
                partitions.setdefault(oid, set()).update(oids)
        return cls(_by_oid(relations), truncated, refused, refilled, partitions, lacking)

    def to_json(self) -> str:
        """As text for the ledger."""
        return json.dumps(
            {
                "relations": [relation_to_json(relation) for relation in chain.from_iterable(self.relations.values())],
                "truncated": {str(oid): sorted(xids) for oid, xids in self.truncated.items()},
                "refused": dict(self.refused),
                "refilled": sorted(self.refilled),
                "partitions": {str(oid): sorted(oids) for oid, oids in self.partitions.items()},
                "lacking": sorted(self.lacking),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Told":
        """What `to_json` wrote."""
        found = json.loads(text)
        relations = _by_oid(map(relation_from_json, found["relations"]))
        return cls(
            relations,
            {int(oid): set(xids) for oid, xids in found["truncated"].items()},
            {place: (oid, reason) for place, (oid, reason) in found["refused"].items()},
            found.get("refilled", ()),
            {int(oid): set(oids) for oid, oids in found.get("partitions", {}).items()},
            found.get("lacking", ()),
        )


def _by_oid(relations: Iterable[Relation]) -> dict[int, Sequence[Relation]]:
    found: dict[int, list[Relation]] = {}
    for relation in relations:
        found.setdefault(relation.oid, []).append(relation)
    return dict(found)


def window_of(slot: str, start_lsn: int, end_lsn: int, read: WindowRead) -> Window:
    """What was read as the window that the ledger takes."""
    return Window(
        key=window_key(end_lsn),
        slot=slot,
        start_lsn=start_lsn,
        end_lsn=end_lsn,
        state="prepared",
        transactions=read.transactions,
        changes=read.changes,
        bytes=read.bytes,
        seconds=read.seconds,
        min_xid=read.min_xid,
        max_xid=read.max_xid,
        tables=read.writes,
    )


def keep_what_came(ledger: Ledger, slot: str, start_lsn: int, broke: StreamBroke) -> None:
    """Write down what came whole before a stream broke off, as a window of its own; see `Ledger.refined`."""
    if broke.kept is not None:
        ledger.record_read(Read(window_of(slot, start_lsn, broke.kept_end, broke.kept), Told.of(broke.kept).to_json()))


def review(run: Pass, before: Mapping[TableName, Look], told: Told, ended: Snapshot) -> dict[TableName, Look]:
    """Look at the tables again and write down what became of them; returns the looks. To be done before the windows read count."""
    found = looks(run.conn, run.settings.publication)
    streamed = Streamed(told.relations, told.truncated, told.refilled, told.partitions, told.lacking, ended)
    rewrites = run.settings.on_rewrite == "resnapshot"
    for table, reason in review_tables(run.ledger, before, found, streamed, next_xid(run.conn), rewrites=rewrites).items():
        run.warn(f"Table {table}: {reason}.")
    if told.refused:
        unborn_xid = next_xid(run.conn)
        run.ledger.amend_tables(
            lambda known: [
                _refused(state, *told.refused[str(state.place)], unborn_xid)
                for state in known.values()
                if str(state.place) in told.refused and state.followed
            ]
        )
    return found


def _refused(state: TableState, oid: int, reason: str, unborn_xid: int) -> TableState:
    """The state of a table of which the windows have nothing: what they had of it is only in the source now."""
    unread = replace(state, generation=None, reading=None, published=None)
    if oid == state.oid:
        return replace(unread, state="error", reason=reason)
    return replace(
        unread, state="pending", reason=f"it is read again, for another one that stood there before: {reason}", joined_xid=unborn_xid
    )


def count(ledger: Ledger, windows: Sequence[Window]) -> None:
    """Make windows durable, all at once: from their ledger record on they are never read again, whatever happens to what follows."""
    ledger.append_windows(windows)
    failpoints.hit("drain.after_prepared")
    _complete(ledger.lake, ledger, windows)


def recover(lake: Lake, ledger: Ledger) -> tuple[Window, ...]:
    """Complete the windows that were prepared when a process died: their files are durable, so they are named in raw and done."""
    windows = ledger.prepared()
    if windows:
        _complete(lake, ledger, windows)
    return windows


def _complete(lake: Lake, ledger: Ledger, windows: Sequence[Window]) -> None:
    for window in windows:
        commit_window(lake, window.key, window.tables)
    failpoints.hit("drain.before_complete")
    ledger.append_windows([replace(window, state="complete") for window in windows])


def open_stream(run: Pass, start_lsn: int) -> ReplicationStream:
    """The slot's stream; a walsender that still holds it, though its client has gone, is waited for, for PGWAL_BUSY_TIMEOUT."""
    settings, deadline = run.settings, time.monotonic() + run.settings.busy_timeout
    while True:
        try:
            return ReplicationStream.open(settings.dsn, settings.slot, settings.publication, start_lsn, server_version=run.server_version)
        except SlotBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def describe_on(conn: psycopg.Connection[Any]) -> Callable[[RelationMessage], Relation]:
    """The catalog's answer to a Relation message, asked on `conn` from whichever thread decodes."""
    lock = threading.Lock()

    def describe(message: RelationMessage) -> Relation:
        with lock:
            return catalog.describe(conn, message)

    return describe

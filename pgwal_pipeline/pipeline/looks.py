"""Looks at the followed tables in the catalog, before the stream is read and after, and what the ledger is told of them."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg

from pgwal_pipeline.decode.types import arrow_type, change_schema
from pgwal_pipeline.errors import TableError
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.raw import check_columns, ensure_raw_table
from pgwal_pipeline.pipeline.changes import Look, Streamed, altered, dropped, had_others_names, read_again, republished, rewritten
from pgwal_pipeline.postgres import catalog
from pgwal_pipeline.postgres.storage import Storage, storages
from pgwal_pipeline.relation import Relation, TableName
from pgwal_pipeline.xid import Snapshot

Connection = psycopg.Connection[Any]

_GONE = "no longer published"


def looks(conn: Connection, publication: str) -> dict[TableName, Look]:
    """The published tables as the catalog shows them now."""
    relations = catalog.tables_of(conn, publication)
    stored = storages(conn, publication, [relation.oid for relation in relations])
    return {relation.table: Look(relation, stored[relation.oid]) for relation in relations if relation.oid in stored}


def record_tables(ledger: Ledger, conn: Connection, found: Mapping[TableName, Look], skipped: Mapping[TableName, str]) -> dict[str, str]:
    """Write down tables that joined, left, were altered or made anew since the last look; returns why some are to be read again.

    A table that joins is read only after the transactions that run now have ended: what they wrote to it before is in no stream.
    """
    known = ledger.tables()
    joined_xid = next_xid(conn)
    fresh = [look for table, look in found.items() if _joins(known.get(table), look)]
    with ThreadPoolExecutor(8, "pgwal-bootstrap") as pool:
        changed = list(pool.map(lambda look: _joined(ledger.lake, look, joined_xid), fresh))
    again: dict[str, str] = {}
    for table, look in found.items():
        state = known.get(table)
        if state is None or _joins(state, look):
            continue
        seen = _seen(state, look, joined_xid)
        if seen.reason is not None and seen.reason != state.reason:
            again[str(table)] = seen.reason
        if seen != state:
            changed.append(seen)
    for table, reason in skipped.items():
        state = known.get(table)
        if state is None or (state.state, state.reason) != ("skipped", reason):
            changed.append(TableState(table=table, oid=0, state="skipped", reason=reason))
    changed += [
        replace(state, state="gone", reason=_GONE)
        for table, state in known.items()
        if table not in found and table not in skipped and state.state != "gone"
    ]
    if changed:
        ledger.record_tables(changed)
    return again


def review_tables(
    ledger: Ledger,
    before: Mapping[TableName, Look],
    found: Mapping[TableName, Look],
    streamed: Streamed,
    unborn_xid: int,
    *,
    rewrites: bool,
) -> dict[str, str]:
    """Look at the tables again when the stream has been read, and write down what the looks and the stream together say.

    To be done before what was read counts, for what is published goes by it. Returns why some tables are to be read again; `rewrites` says
    whether those are that were rewritten without a word in the stream.
    """
    again: dict[str, str] = {}

    def decide(known: Mapping[TableName, TableState]) -> list[TableState]:
        again.clear()
        changed = []
        for table, look in found.items():
            state, earlier = known.get(table), before.get(table)
            if state is not None and state.oid != look.relation.oid and state.followed:
                # Another table took the name while the stream was read. It joins at the next look.
                changed.append(replace(state, state="gone", reason=_GONE))
            if state is None or earlier is None or state.storage is None or _joins(state, look):
                continue
            seen = _reviewed(state, Storage.from_json(state.storage), earlier, look, streamed, unborn_xid, rewrites)
            if seen.reason is not None and seen.reason != state.reason:
                again[str(table)] = seen.reason
            if seen != state:
                changed.append(seen)
        changed += [
            # Its rows under another name are not in its raw, should it get its name back.
            replace(state, state="gone", reason=_GONE)
            for table, state in known.items()
            if table not in found and state.state == "ready" and _had_other_name(state, streamed)
        ]
        return changed

    ledger.amend_tables(decide)
    return again


def _joins(known: TableState | None, look: Look) -> bool:
    if known is None or known.oid != look.relation.oid or not known.followed:
        return True
    # What could not be followed may be possible now that it is another table.
    return known.state == "error" and known.storage is not None and Storage.from_json(known.storage).columns != look.storage.columns


def _joined(lake: Lake, look: Look, joined_xid: int) -> TableState:
    """A table that joins, with its raw table made so that readers find it before its first change."""
    relation = look.relation
    state = TableState(
        table=relation.table,
        oid=relation.oid,
        state="pending",
        key=relation.key,
        relation=relation,
        joined_xid=joined_xid,
        storage=look.storage.to_json(),
    )
    try:
        check_columns(relation)
        ensure_raw_table(lake, relation.table, change_schema(relation))
    except TableError as error:
        return replace(state, state="error", reason=str(error))
    return state


def _seen(state: TableState, look: Look, unborn_xid: int) -> TableState:
    """What a look at a known table's definition makes of its state. New files are not judged: the stream may still tell of a TRUNCATE."""
    if state.storage is None or state.relation is None or state.state == "error":
        return replace(state, relation=look.relation, key=look.relation.key, storage=look.storage.to_json())
    before = Storage.from_json(state.storage)
    if republished(before, look.storage):
        return read_again(state, look, "it was taken out of the publication and put back, or the publication was altered", unborn_xid)
    reason = altered(state.relation, before, look, state.dropped)
    state = replace(state, dropped=dropped(state, before, look.storage))
    if reason is not None:
        return read_again(state, look, reason, state.joined_xid)
    now = replace(look.storage, files=before.files, shown=before.shown) if _is_read(state) else look.storage
    return replace(state, relation=look.relation, key=look.relation.key, storage=now.to_json())


def _reviewed(
    state: TableState, stored: Storage, earlier: Look, look: Look, streamed: Streamed, unborn_xid: int, rewrites: bool
) -> TableState:
    seen = _seen(state, look, unborn_xid)
    if seen.reason != state.reason:
        return seen
    versions = streamed.relations.get(state.oid, ())
    if _is_read(state):
        if _had_other_name(state, streamed):
            return read_again(state, look, "it had another name for a while")
        if any(version.key != state.key for version in versions):
            return read_again(state, look, "its replica identity was another one for a while")
        told = _columns(earlier.relation) | _columns(look.relation) | _columns(state.relation)
        if any(column not in told and column[0] not in state.dropped for version in versions for column in _columns(version)):
            return read_again(state, look, "its columns changed more than once while the stream was read")
        if had_others_names(stored.shown, versions, (earlier.relation, look.relation)):
            return read_again(state, look, "its columns had each other's names for a while")
        if any(state.oid in partitions for partitions in streamed.partitions.values()):
            return read_again(state, look, "it was a partition of another table for a while")
        if state.oid in streamed.lacking:
            return read_again(state, look, "a row came into the publication's row filter, with values that the stream does not bring")
    last = versions[-1] if versions else None
    if look.relation != earlier.relation and last is not None and last.table == state.table:
        # Altered meanwhile: what is published has the columns that the stream had; the rest shows at the next look.
        state = replace(state, relation=last, key=last.key)
    if not _is_read(state):
        return state
    reason, storage = rewritten(state.oid, stored, look.storage, streamed)
    if reason is not None and rewrites:
        return read_again(state, look, reason)
    shown = (last or earlier.relation).column_names
    return replace(state, storage=replace(stored, files=storage.files, shown=shown).to_json())


def _had_other_name(state: TableState, streamed: Streamed) -> bool:
    return any(relation.table != state.table for relation in streamed.relations.get(state.oid, ()))


def _is_read(state: TableState) -> bool:
    """Whether some of the table's rows have been read already."""
    return state.generation is not None or state.reading is not None


def _columns(relation: Relation | None) -> set[tuple[str, str]]:
    return set() if relation is None else {(column.name, str(arrow_type(column.type))) for column in relation.columns}


def next_xid(conn: Connection) -> int:
    """The first transaction id (64 bits) that no transaction has had yet."""
    return Snapshot.parse(catalog.running_transactions(conn)).high

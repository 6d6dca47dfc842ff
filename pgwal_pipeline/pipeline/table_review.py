"""Record the published tables in the ledger: before the stream is read, and after it with what the stream showed of them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

from pgwal_pipeline.decode.types import change_schema, column_type
from pgwal_pipeline.lake.delta import open_table
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.locations import free_location
from pgwal_pipeline.lake.raw import check_columns, ensure_raw_table
from pgwal_pipeline.lake.stream_facts import StreamFacts
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.pipeline import schema_policy
from pgwal_pipeline.pipeline.alterations import (
    CatalogEntry,
    altered,
    begun_anew,
    dropped,
    protected_otherwise,
    read_again,
    republished,
    rewritten,
    swapped_names,
)
from pgwal_pipeline.postgres import catalog
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.storage import storages
from pgwal_pipeline.values.protection import Protection
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.table_options import FREEZE, PROPAGATE
from pgwal_pipeline.values.xid import Snapshot

_GONE = "no longer published"
_EARLIER = 8  # tables of one location whose last changes may still be in the stream


def catalog_entries(conn: Connection, publication: str, protection: Protection) -> dict[TableName, CatalogEntry]:
    """Return the published tables as the catalog shows them now and their options make them, without those that these do not fit."""
    relations = [relation for relation in catalog.tables_of(conn, publication) if protection.misused(relation) is None]
    stored = storages(conn, publication, [relation.oid for relation in relations])
    return {
        relation.table: CatalogEntry(protection.relation(relation), stored[relation.oid], protection.options.of(relation.table))
        for relation in relations
        if relation.oid in stored
    }


def record_tables(
    ledger: Ledger, conn: Connection, found: Mapping[TableName, CatalogEntry], skipped: Mapping[TableName, str]
) -> dict[str, str]:
    """Record tables that joined, left, or were renamed, altered or recreated since they were last recorded.

    Returns a message for some of them, by name. A table that joins is read only after the transactions that run now have ended: no stream
    has what they wrote to it before.
    """
    before = ledger.tables()
    known, changed, news = _renamed(before, found)
    joined_xid = next_xid(conn)
    fresh = [entry for table, entry in found.items() if _joins(known.get(table), entry)]
    locations = _locations_for(ledger.lake, known, fresh)
    taken = {*locations.values(), *(state.location for state in known.values())}
    raw_from = catalog.insert_lsn(conn) if fresh else 0
    with ThreadPoolExecutor(8, "pgwal-bootstrap") as pool:
        changed += pool.map(
            lambda entry: _joined(
                ledger.lake, entry, known.get(entry.relation.table), locations[entry.relation.table], joined_xid, raw_from
            ),
            fresh,
        )
    for table, entry in found.items():
        state = known.get(table)
        if state is None or _joins(state, entry):
            continue
        updated = _updated(schema_policy.begun(state, entry), entry, joined_xid)
        updated = replace(schema_policy.judged(updated, entry), options=entry.options.to_text())
        if (told := _told(state, updated)) is not None:
            news[str(table)] = told
        if updated != before.get(table):
            changed.append(updated)
    changed = _now_readable(conn, changed, known)
    for table, reason in skipped.items():
        state = known.get(table)
        if state is None or (state.state, state.reason) != ("skipped", reason):
            location = free_location(table, 0, taken) if state is None else state.location
            taken.add(location)
            before = TableState(table=table, oid=0, state="skipped") if state is None else state
            changed.append(
                TableState(
                    table=table,
                    oid=before.oid,
                    state="skipped",
                    reason=reason,
                    kept_as=location,
                    earlier=before.earlier,
                    unclean=before.unclean,
                    options=before.options,
                    history=before.history,
                    accepted=before.accepted,
                )
            )
    changed += [
        replace(state, state="gone", reason=_GONE)
        for table, state in known.items()
        if table not in found and table not in skipped and state.state != "gone"
    ]
    if changed:
        ledger.record_tables(changed)
    return news


def _told(before: TableState, now: TableState) -> str | None:
    """Return what is new about a table, None if nothing is."""
    if now.held is not None:
        return now.held if now.held != before.held else None
    return now.reason if now.reason != before.reason else None


def _now_readable(conn: Connection, changed: list[TableState], known: Mapping[TableName, TableState]) -> list[TableState]:
    """Return the states to record: those `changed`, and those of tables that the role may read again, which are due at once."""
    amended = {state.table for state in changed}
    barred = [state for state in (*changed, *(state for table, state in known.items() if table not in amended)) if state.barred]
    found = catalog.readable(conn, [state.oid for state in barred]) if barred else set()
    now = datetime.now(UTC)
    freed = {state.table: replace(state, retry_at=now) for state in barred if state.oid in found and not state.due(now)}
    return [freed.pop(state.table, state) for state in changed] + list(freed.values())


def review_tables(
    ledger: Ledger,
    before: Mapping[TableName, CatalogEntry],
    found: Mapping[TableName, CatalogEntry],
    facts: StreamFacts,
    ended: Snapshot | None,
    first_new_xid: int,
    *,
    rewrites: bool,
) -> dict[str, str]:
    """Record what became of the tables while the stream was read, from the catalog entries before and after it and its facts.

    To be called before the windows are committed, since a publish relies on it. `rewrites`: whether tables that were rewritten without a
    message in the stream are read again. Returns a message for some tables, by name, such as why they are read again.
    """
    news: dict[str, str] = {}
    earlier_entries = {entry.relation.oid: entry for entry in before.values()}

    def decide(recorded: Mapping[TableName, TableState]) -> list[TableState]:
        known, changed, renamed = _renamed(recorded, found)
        news.clear()
        news.update(renamed)
        for table, entry in found.items():
            state, earlier = known.get(table), earlier_entries.get(entry.relation.oid)
            if state is not None and state.oid != entry.relation.oid and state.followed:
                # Another table took the name while the stream was read. It joins when the next drain attaches.
                changed.append(replace(state, state="gone", reason=_GONE))
            reviewed = state
            if state is not None and earlier is not None and state.storage is not None and not _joins(state, entry):
                begun = schema_policy.begun(state, entry)
                reviewed = _reviewed(begun, state.storage, earlier, entry, facts, ended, first_new_xid, rewrites)
                reviewed = schema_policy.judged(reviewed, entry)
                if (told := _told(state, reviewed)) is not None:
                    news[str(table)] = told
            if reviewed is not None and reviewed.oid == entry.relation.oid and reviewed != recorded.get(table):
                changed.append(reviewed)
        return changed

    ledger.amend_tables(decide)
    return news


def _renamed(
    known: Mapping[TableName, TableState], found: Mapping[TableName, CatalogEntry]
) -> tuple[dict[TableName, TableState], list[TableState], dict[str, str]]:
    """Return the known tables by their names now, records that take their old names out, and a message for each renamed table.

    A table is identified by its oid.
    """
    by_oid = {state.oid: state for state in known.values() if state.followed}
    moved = {
        table: by_oid[entry.relation.oid]
        for table, entry in found.items()
        if entry.relation.oid in by_oid and by_oid[entry.relation.oid].table != table
    }
    earlier = {state.table for state in moved.values()}
    present = {table: state for table, state in known.items() if table not in earlier}
    present |= {table: state.called(table) for table, state in moved.items()}
    left = [TableState(table=table, oid=0, state="renamed") for table in sorted(earlier - present.keys())]
    return present, left, {str(table): f"it was renamed from {state.table} and is still followed" for table, state in moved.items()}


def _locations_for(lake: Lake, known: Mapping[TableName, TableState], joining: Sequence[CatalogEntry]) -> dict[TableName, TableName]:
    """Return the locations for tables that join, by name: each gets the location of the earlier table of its name, if there was one.

    A table that was recreated while a stream was read may have a location already, at which that stream's rows are: see `Locations`.
    """
    locations: dict[TableName, TableName] = {}
    for relation in (entry.relation for entry in joining):
        taken = {*locations.values(), *(state.location for state in known.values() if state.table != relation.table)}
        before = known.get(relation.table)
        location = free_location(relation.table, relation.oid, taken)
        if before is not None and before.oid:
            beside = free_location(relation.table, relation.oid, {*taken, before.location, relation.table})
            location = beside if before.oid != relation.oid and open_table(lake, lake.raw(beside)) is not None else before.location
        locations[relation.table] = location
    return locations


def _joins(known: TableState | None, entry: CatalogEntry) -> bool:
    if known is None or known.oid != entry.relation.oid or not known.followed:
        return True
    # A table in error that was never read may be possible to follow once it has been altered.
    if known.state != "error" or known.is_read or known.storage is None:
        return False
    was = known.relation
    identity = was is not None and (was.replica_identity, was.key) != (entry.relation.replica_identity, entry.relation.key)
    return identity or known.storage.columns != entry.storage.columns


def _joined(lake: Lake, entry: CatalogEntry, before: TableState | None, location: TableName, joined_xid: int, raw_from: int) -> TableState:
    """Return the state of a table that joins; its raw table is created, so that readers find it before its first change.

    `before` is the table that had its name. If that was left out of raw, raw has the changes from the LSN `raw_from` on.
    """
    relation = entry.relation
    earlier = (*before.earlier, before.oid) if before is not None and before.oid and before.location == location else ()
    state = TableState(
        table=relation.table,
        oid=relation.oid,
        state="pending",
        key=relation.key,
        relation=relation,
        joined_xid=joined_xid,
        storage=entry.storage,
        kept_as=location,
        earlier=tuple(dict.fromkeys(oid for oid in earlier if oid != relation.oid))[-_EARLIER:],
        raw_from=0 if before is None else raw_from if before.left_out else before.raw_from,
        unclean=_unclean(before, entry),
        options=entry.options.to_text(),
        history=None if before is None or before.location != location else before.history,
        accepted=before.accepted if before is not None and before.oid == relation.oid and not _unclean(before, entry) else None,
    )
    state = schema_policy.judged(replace(state, accepted=None if entry.options.on_schema_change == PROPAGATE else state.accepted), entry)
    try:
        with table_work(lake, relation.table, "describe", oid=relation.oid):
            check_columns(relation)
            ensure_raw_table(lake, location, change_schema(relation))
    except TableError as error:
        return state.with_gap("describe", str(error), 0)
    return state


def _unclean(before: TableState | None, entry: CatalogEntry) -> tuple[str, ...]:
    """Return the layers at the location of a table that joins which may have values that are protected now."""
    if before is None:
        return ()
    unknown = before.relation is None and entry.options.protects
    anew = unknown or before.unclean or protected_otherwise(before, entry) is not None
    return ("raw", "snapshot", "current", "history") if anew else ()


def _updated(state: TableState, entry: CatalogEntry, first_new_xid: int) -> TableState:
    """Return the state of a known table with its new definition. New files are not judged: the stream may still have their TRUNCATE."""
    otherwise = protected_otherwise(state, entry)
    if otherwise is not None:
        kept = schema_policy.otherwise_protected(state.accepted, entry)
        return replace(begun_anew(state, entry, otherwise, first_new_xid), accepted=kept)
    if state.storage is None or state.relation is None or (state.state == "error" and not state.is_read):
        return replace(state, relation=entry.relation, key=entry.relation.key, storage=entry.storage)
    before = state.storage
    if republished(before, entry.storage):
        return read_again(state, entry, "it left the publication and came back, or the publication was altered", first_new_xid)
    known, stored, seen = schema_policy.compared(state, entry)
    assert known is not None
    assert stored is not None
    reason = altered(known, stored, seen, state.dropped)
    state = replace(state, dropped=dropped(state, stored, seen.storage))
    if reason is not None:
        return read_again(state, entry, reason, state.joined_xid)
    now = replace(entry.storage, files=before.files, shown=before.shown) if state.is_read else entry.storage
    return replace(state, relation=entry.relation, key=entry.relation.key, storage=now)


def _reviewed(
    state: TableState,
    stored: Storage,
    earlier: CatalogEntry,
    entry: CatalogEntry,
    facts: StreamFacts,
    ended: Snapshot | None,
    first_new_xid: int,
    rewrites: bool,
) -> TableState:
    updated = _updated(state, entry, first_new_xid)
    if updated.reason != state.reason:
        return updated
    versions = shown_since = facts.relations.get(state.oid, ())
    if state.is_read:
        if state.accepted is not None and entry.options.on_schema_change == FREEZE:
            kept = state.accepted.column_names
            shown_since = [schema_policy.narrowed(version, kept) for version in versions]
        if any(version.key != state.key for version in versions):
            return read_again(state, entry, "its replica identity was different for a while")
        recorded = _columns(earlier.relation) | _columns(entry.relation) | _columns(state.relation)
        if any(column not in recorded and column[0] not in state.dropped for version in shown_since for column in _columns(version)):
            return read_again(state, entry, "its columns changed more than once while the stream was read")
        if swapped_names(stored.shown, versions, (earlier.relation, entry.relation)):
            return read_again(state, entry, "its columns had each other's names for a while")
        if any(state.oid in partitions for partitions in facts.partitions.values()):
            return read_again(state, entry, "it was a partition of another table for a while")
        if state.oid in facts.lacking:
            return read_again(state, entry, "an update brought a row into the publication's row filter without its unchanged values")
    last = versions[-1] if versions else None
    if entry.relation != earlier.relation and last is not None:
        # It was altered meanwhile: record the definition that the stream had last; the next drain records the newer one.
        state = replace(state, relation=replace(last, table=state.table), key=last.key)
    if not state.is_read:
        return state
    reason, storage = rewritten(state.oid, stored, entry.storage, facts, ended)
    if reason is not None and rewrites:
        return read_again(state, entry, reason)
    # If the stream goes on (`ended` is None), rows may still come with the columns of before.
    shown = stored.shown if last is None and ended is None else (last or earlier.relation).column_names
    return replace(state, storage=replace(stored, files=storage.files, shown=shown))


def foreseen(
    state: TableState, before: CatalogEntry, entry: CatalogEntry, facts: StreamFacts, ended: Snapshot, *, rewrites: bool
) -> TableState:
    """Return what a review would make of a table that has been published, from its catalog entries before and after a migration."""
    assert state.storage is not None
    begun = schema_policy.begun(state, entry)
    return schema_policy.judged(_reviewed(begun, state.storage, before, entry, facts, ended, 0, rewrites), entry)


def _columns(relation: Relation | None) -> set[tuple[str, str]]:
    return set() if relation is None else {(column.name, f"{column_type(column)} {column.protection}") for column in relation.columns}


def next_xid(conn: Connection) -> int:
    """Return the first transaction id (64 bits) that no transaction has had yet."""
    return Snapshot.parse(catalog.running_transactions(conn)).high

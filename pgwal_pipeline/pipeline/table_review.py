"""Looks at the followed tables in the catalog, before the stream is read and after, and what the ledger is told of them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

from pgwal_pipeline.decode.types import arrow_type, change_schema
from pgwal_pipeline.lake.delta import open_table
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.locations import free_location
from pgwal_pipeline.lake.raw import check_columns, ensure_raw_table
from pgwal_pipeline.lake.stream_facts import StreamFacts
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.pipeline.alterations import CatalogEntry, altered, dropped, read_again, republished, rewritten, swapped_names
from pgwal_pipeline.postgres import catalog
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.storage import storages
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.xid import Snapshot

_GONE = "no longer published"
_EARLIER = 8  # tables of one location whose last changes may still be in the stream


def catalog_entries(conn: Connection, publication: str) -> dict[TableName, CatalogEntry]:
    """The published tables as the catalog shows them now."""
    relations = catalog.tables_of(conn, publication)
    stored = storages(conn, publication, [relation.oid for relation in relations])
    return {relation.table: CatalogEntry(relation, stored[relation.oid]) for relation in relations if relation.oid in stored}


def record_tables(
    ledger: Ledger, conn: Connection, found: Mapping[TableName, CatalogEntry], skipped: Mapping[TableName, str]
) -> dict[str, str]:
    """Write down tables that joined, left, were renamed, altered or made anew since the last look; returns what to say of some, by name.

    A table that joins is read only after the transactions that run now have ended: what they wrote to it before is in no stream.
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
        seen = _seen(state, entry, joined_xid)
        if seen.reason is not None and seen.reason != state.reason:
            news[str(table)] = seen.reason
        if seen != before.get(table):
            changed.append(seen)
    changed = _now_readable(conn, changed, known)
    for table, reason in skipped.items():
        state = known.get(table)
        if state is None or (state.state, state.reason) != ("skipped", reason):
            location = free_location(table, 0, taken) if state is None else state.location
            taken.add(location)
            oid, earlier = (0, ()) if state is None else (state.oid, state.earlier)
            changed.append(TableState(table=table, oid=oid, state="skipped", reason=reason, kept_as=location, earlier=earlier))
    changed += [
        replace(state, state="gone", reason=_GONE)
        for table, state in known.items()
        if table not in found and table not in skipped and state.state != "gone"
    ]
    if changed:
        ledger.record_tables(changed)
    return news


def _now_readable(conn: Connection, changed: list[TableState], known: Mapping[TableName, TableState]) -> list[TableState]:
    """The states to be written down, with those of tables that may be read now after all: they are read at once."""
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
    unborn_xid: int,
    *,
    rewrites: bool,
) -> dict[str, str]:
    """Look at the tables again when the stream has been read, and write down what the looks and the stream together say.

    To be done before what was read counts, for what is published goes by it. Returns what to say of some tables, such as why they are to be
    read again; `rewrites` says whether those are that were rewritten without a word in the stream.
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
                # Another table took the name while the stream was read. It joins at the next look.
                changed.append(replace(state, state="gone", reason=_GONE))
            seen = state
            if state is not None and earlier is not None and state.storage is not None and not _joins(state, entry):
                seen = _reviewed(state, state.storage, earlier, entry, facts, ended, unborn_xid, rewrites)
                if seen.reason is not None and seen.reason != state.reason:
                    news[str(table)] = seen.reason
            if seen is not None and seen.oid == entry.relation.oid and seen != recorded.get(table):
                changed.append(seen)
        return changed

    ledger.amend_tables(decide)
    return news


def _renamed(
    known: Mapping[TableName, TableState], found: Mapping[TableName, CatalogEntry]
) -> tuple[dict[TableName, TableState], list[TableState], dict[str, str]]:
    """The known tables by the names that they have now, records that take the other names out, and what to say of those renamed.

    A table is the same as long as it has its oid.
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
    return present, left, {str(table): f"it was {state.table} before and is followed on" for table, state in moved.items()}


def _locations_for(lake: Lake, known: Mapping[TableName, TableState], joining: Sequence[CatalogEntry]) -> dict[TableName, TableName]:
    """Where tables that join are to stand, by their names: each where the table of its name stood before, if there was one.

    One that was made anew between a look and the end of the stream read then has a location already: see `Locations`.
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
    # What could not be followed may be possible now that it is another table.
    if known.state != "error" or known.is_read or known.storage is None:
        return False
    was = known.relation
    identity = was is not None and (was.replica_identity, was.key) != (entry.relation.replica_identity, entry.relation.key)
    return identity or known.storage.columns != entry.storage.columns


def _joined(lake: Lake, entry: CatalogEntry, before: TableState | None, location: TableName, joined_xid: int, raw_from: int) -> TableState:
    """A table that joins, with its raw table made so that readers find it before its first change; `before` had its name.

    Of one that was left out of raw before, raw has the changes from `raw_from` on.
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
    )
    try:
        with table_work(lake, relation.table, "describe", oid=relation.oid):
            check_columns(relation)
            ensure_raw_table(lake, location, change_schema(relation))
    except TableError as error:
        return state.with_gap("describe", str(error), 0)
    return state


def _seen(state: TableState, entry: CatalogEntry, unborn_xid: int) -> TableState:
    """What a look at a known table's definition makes of its state. New files are not judged: the stream may still tell of a TRUNCATE."""
    if state.storage is None or state.relation is None or (state.state == "error" and not state.is_read):
        return replace(state, relation=entry.relation, key=entry.relation.key, storage=entry.storage)
    before = state.storage
    if republished(before, entry.storage):
        return read_again(state, entry, "it was taken out of the publication and put back, or the publication was altered", unborn_xid)
    reason = altered(state.relation, before, entry, state.dropped)
    state = replace(state, dropped=dropped(state, before, entry.storage))
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
    unborn_xid: int,
    rewrites: bool,
) -> TableState:
    seen = _seen(state, entry, unborn_xid)
    if seen.reason != state.reason:
        return seen
    versions = facts.relations.get(state.oid, ())
    if state.is_read:
        if any(version.key != state.key for version in versions):
            return read_again(state, entry, "its replica identity was another one for a while")
        told = _columns(earlier.relation) | _columns(entry.relation) | _columns(state.relation)
        if any(column not in told and column[0] not in state.dropped for version in versions for column in _columns(version)):
            return read_again(state, entry, "its columns changed more than once while the stream was read")
        if swapped_names(stored.shown, versions, (earlier.relation, entry.relation)):
            return read_again(state, entry, "its columns had each other's names for a while")
        if any(state.oid in partitions for partitions in facts.partitions.values()):
            return read_again(state, entry, "it was a partition of another table for a while")
        if state.oid in facts.lacking:
            return read_again(state, entry, "a row came into the publication's row filter, with values that the stream does not bring")
    last = versions[-1] if versions else None
    if entry.relation != earlier.relation and last is not None:
        # Altered meanwhile: what is published has the columns that the stream had; the rest shows at the next look.
        state = replace(state, relation=replace(last, table=state.table), key=last.key)
    if not state.is_read:
        return state
    reason, storage = rewritten(state.oid, stored, entry.storage, facts, ended)
    if reason is not None and rewrites:
        return read_again(state, entry, reason)
    # Behind a window that ends where the stream goes on rows may still come as they were before the looks.
    shown = stored.shown if last is None and ended is None else (last or earlier.relation).column_names
    return replace(state, storage=replace(stored, files=storage.files, shown=shown))


def _columns(relation: Relation | None) -> set[tuple[str, str]]:
    return set() if relation is None else {(column.name, str(arrow_type(column.type))) for column in relation.columns}


def next_xid(conn: Connection) -> int:
    """The first transaction id (64 bits) that no transaction has had yet."""
    return Snapshot.parse(catalog.running_transactions(conn)).high

"""Apply the options of tables: refuse those that do not fit, and clean the lake of what they protect now."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

from pgwal_pipeline.decode.types import change_schema
from pgwal_pipeline.lake import cleaning
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.raw import ensure_raw_table
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.pipeline.alterations import CatalogEntry
from pgwal_pipeline.postgres import catalog, publication
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.followed import followed_tables
from pgwal_pipeline.postgres.publication_shape import FIRST_WITH_LISTS, Wanted
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.protection import other_key
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline.values.table_options import TableOptions
from pgwal_pipeline.values.xid import Snapshot


def require_fitting(settings: Settings, conn: Connection, ledger: Ledger) -> Wanted:
    """Return what is wanted of the source's tables.

    Raises SettingError if options do not fit a table, the publication or the server, or if columns are hashed with another key than before.
    A table that its options fitted when it was first followed, and do not fit any more, is only left out: it was altered at the source.
    """
    options, known = settings.table_options, ledger.tables()
    _require_same_key(settings, known)
    if not options.rules:
        return Wanted(in_force=filters(known))
    tables = followed_tables(conn, settings.publication, settings.tables)
    _require_filters(settings, conn, tables)
    return Wanted(options, filters(known), barred(settings, known, tables))


def barred(settings: Settings, known: Mapping[TableName, TableState], tables: Collection[Relation]) -> dict[TableName, str]:
    """Return those of `tables`, as the source has them, that their options do not fit any more, with the reason.

    Raises SettingError for one that they never fitted.
    """
    found = {}
    for relation in tables:
        reason = settings.protection.misused(relation)
        if reason is None:
            continue
        state = known.get(relation.table)
        if state is None or state.options != settings.table_options.of(relation.table).to_text():
            raise SettingError(f"PGWAL_TABLE_OPTIONS does not fit: table {relation.table} {reason}.")
        found[relation.table] = f"it {reason}"
    return found


def unmet(options: TableOptions, entries: Mapping[TableName, CatalogEntry]) -> list[str]:
    """Return a warning for each table with options that name a column which it does not have: the name may be mistyped."""
    found = []
    for table, entry in entries.items() if options.rules else ():
        has = {column.name for column in entry.storage.columns}
        lacking = [name for name in options.named(table) if name not in has]
        if lacking:
            found.append(f"Table {table} has no column {', '.join(map(repr, lacking))}, which PGWAL_TABLE_OPTIONS names.")
    return found


def filters(known: Mapping[TableName, TableState]) -> dict[int, str]:
    """Return the row filters that our publication has by now, by the tables' oids."""
    found = {state.oid: json.loads(state.options).get("rows") for state in known.values() if state.options is not None}
    return {oid: rows for oid, rows in found.items() if rows is not None}


def _require_filters(settings: Settings, conn: Connection, tables: Collection[Relation]) -> None:
    filtered = next((relation.table for relation in tables if settings.table_options.of(relation.table).rows is not None), None)
    if filtered is None:
        return
    if conn.info.server_version < FIRST_WITH_LISTS:
        raise SettingError(
            f"PGWAL_TABLE_OPTIONS gives {filtered} the option rows, which needs a source of Postgres 15 or newer; leave the option out."
        )
    if not publication.is_ours_to_make(conn, settings.publication):
        raise SettingError(
            f"PGWAL_TABLE_OPTIONS gives {filtered} the option rows, but publication {settings.publication} is not ours; leave the option "
            f"out, and give the publication the row filter: ALTER PUBLICATION … SET TABLE … WHERE (…)."
        )


def _require_same_key(settings: Settings, known: Mapping[TableName, TableState]) -> None:
    """Raise SettingError if the columns of a table were hashed with another key than the one that is set."""
    others = [state.table for state in known.values() if _has_other_key(settings, state)]
    if others:
        names = " ".join(f"'{table}'" for table in others)
        raise SettingError(
            f"PGWAL_HASH_KEY is not the key with which {', '.join(map(str, others))} was hashed, so that equal values would no longer be "
            f"equal; set it to that key, or run `pgwal resnapshot {names}` to read them again with the new one."
        )


def _has_other_key(settings: Settings, state: TableState) -> bool:
    if not state.followed or state.relation is None or not settings.table_options.of(state.table).hash:
        return False
    hashed = [column for column in state.relation.columns if settings.table_options.of(state.table).treatment(column.name) == "hash"]
    return other_key(hashed, settings.protection.fingerprint)


def take_key(settings: Settings, ledger: Ledger, tables: Collection[TableName] | None) -> None:
    """Let `tables`, None for all, be hashed with another key than before. They have to be read again."""

    def decide(known: Mapping[TableName, TableState]) -> list[TableState]:
        chosen = [state for state in known.values() if (tables is None or state.table in tables) and _has_other_key(settings, state)]
        return [_with_key(settings, state) for state in chosen]

    if settings.table_options.hashes:
        ledger.amend_tables(decide)


def _with_key(settings: Settings, state: TableState) -> TableState:
    assert state.relation is not None
    relation = settings.protection.relation(state.relation)
    return replace(
        state.without_error(),
        state="pending",
        reason="it is read again: its columns are hashed with another key",
        relation=relation,
        generation=None,
        reading=None,
        published=None,
        unclean=("raw", "snapshot", "current"),
    )


def clean_raw(ledger: Ledger, conn: Connection) -> None:
    """Remove from raw what was written there before the options of tables protected it; the tables are read after that.

    The caller holds the slot's lock. A table is not read before every transaction has ended whose changes raw loses here. What a catch-up
    has read of it is read again.
    """
    unclean = [state for state in ledger.tables().values() if "raw" in state.unclean and state.oid]
    if not unclean:
        return
    plan = ledger.plan()
    if plan is not None:
        ledger.record_plan(replace(plan, ends=()))
        ledger.forget_reads(plan)
    for state in unclean:
        cleaning.clean_raw(ledger.lake, state.location, state.oid)
        if state.relation is not None and state.relation.hides_key:
            cleaning.clean_keys(ledger, state.location)
        if state.relation is not None and state.followed:
            ensure_raw_table(ledger.lake, state.location, change_schema(state.relation))
    joined_xid = Snapshot.parse(catalog.running_transactions(conn)).high
    raw_from = catalog.insert_lsn(conn)
    cleaned = {state.location for state in unclean}
    ledger.amend_tables(
        lambda known: [
            replace(state.cleaned("raw"), joined_xid=joined_xid, raw_from=raw_from)
            for state in known.values()
            if state.location in cleaned and "raw" in state.unclean
        ]
    )

"""What a lake and a source must agree on before anything is read: identity, publication, slot, and which tables are followed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from pgwal_pipeline import failpoints
from pgwal_pipeline.errors import LakeError, SlotLost
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Source, Window
from pgwal_pipeline.lsn import format_lsn, window_key
from pgwal_pipeline.pipeline.changes import Look
from pgwal_pipeline.pipeline.looks import looks, record_tables
from pgwal_pipeline.postgres import catalog, publication, slot
from pgwal_pipeline.postgres.slot import SlotState
from pgwal_pipeline.relation import TableName
from pgwal_pipeline.settings import Settings

Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Attached:
    """A source and a lake that belong together: every table the stream carries, and where the slot stands."""

    server_version: int
    slot: SlotState
    tables: dict[TableName, Look]
    skipped: dict[TableName, str]


def attach(settings: Settings, conn: Connection, *, warn: Callable[[str], None]) -> Attached:
    """Make sure that publication and slot exist and are this lake's, and record in the ledger which tables they carry.

    To be called by the holder of the slot's lock only. The source's record is written before the slot is made: a slot that a crash leaves
    behind is then known as ours. Raises LakeError for another source's lake, SlotLost where the slot is gone or stands beyond the frontier.
    """
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    identity = catalog.source_identity(conn)
    recorded = ledger.source()
    ours = Source(
        system_identifier=identity.system_identifier,
        timeline=identity.timeline,
        database_oid=identity.database_oid,
        database=identity.database,
        publication=settings.publication,
        slot=settings.slot,
    )
    if recorded is not None:
        _require_same_source(lake, recorded, ours)
    published = publication.ensure(conn, settings.publication, settings.tables)
    state = slot.inspect(conn, settings.slot)
    frontier = ledger.frontier()
    if state is not None:
        slot.require_usable(state, identity.database)
    if recorded is None and state is not None:
        raise LakeError(
            f"Slot {settings.slot} exists already, but the lake {lake.uri} has no record of it: another lake may be fed by it. "
            f"Set PGWAL_LAKE to that lake, PGWAL_SLOT to another name, or drop the slot with `pgwal drop` to start anew."
        )
    if state is None and frontier is not None:
        raise SlotLost(
            f"Slot {settings.slot} is gone from the source, and with it the WAL after {format_lsn(frontier)}. "
            f"Run `pgwal resnapshot --all` to make it anew and read every table again."
        )
    if recorded is None:
        ledger.record_source(ours)
    if state is None:
        failpoints.hit("bootstrap.before_slot")
        state = slot.create(settings.dsn, settings.slot, blocked_timeout=settings.blocked_timeout, warn=warn)
        failpoints.hit("bootstrap.after_slot")
    if frontier is None:
        ledger.append_window(_origin(settings.slot, state.confirmed_flush_lsn))
        frontier = state.confirmed_flush_lsn
    elif state.confirmed_flush_lsn > _durable(ledger, frontier):
        raise SlotLost(
            f"Slot {settings.slot} was advanced to {format_lsn(state.confirmed_flush_lsn)} by someone else, but the lake has changes up to "
            f"{format_lsn(frontier)} only. Run `pgwal resnapshot --all` to read every table again."
        )
    found = looks(conn, settings.publication)
    for table, reason in record_tables(ledger, conn, found, published.skipped).items():
        warn(f"Table {table}: {reason}.")
    return Attached(identity.server_version, state, found, dict(published.skipped))


def renew(settings: Settings, conn: Connection, *, warn: Callable[[str], None]) -> None:
    """Make a slot anew that is missing, lost, or stands past what the lake holds, and have every table read again.

    An intact slot is left as it is. Otherwise nothing between the old frontier and the new slot is in any stream: until a table has been
    read again it is not published, and its old `current` stays as it was. To be called by the holder of the slot's lock only.
    """
    ledger = Ledger(Lake(settings.lake))
    state = slot.inspect(conn, settings.slot)
    frontier = ledger.frontier()
    if frontier is not None and (state is None or state.wal_status == "lost" or state.confirmed_flush_lsn > _durable(ledger, frontier)):
        if state is not None:
            slot.drop(conn, settings.slot)
        publication.ensure(conn, settings.publication, settings.tables)
        state = slot.create(settings.dsn, settings.slot, blocked_timeout=settings.blocked_timeout, warn=warn)
        ledger.append_window(_origin(settings.slot, state.confirmed_flush_lsn))
        ledger.record_tables(
            [
                replace(known, state="pending", reason=None, generation=None, reading=None, published=None)
                for known in ledger.tables().values()
                if known.state not in ("skipped", "gone")
            ]
        )
    attach(settings, conn, warn=warn)


def _durable(ledger: Ledger, frontier: int) -> int:
    """How far the slot may stand: windows that are prepared are durable, though raw may not name their files yet."""
    return max([frontier, *(window.end_lsn for window in ledger.prepared())])


def _require_same_source(lake: Lake, recorded: Source, ours: Source) -> None:
    if (recorded.system_identifier, recorded.database_oid) != (ours.system_identifier, ours.database_oid):
        raise LakeError(
            f"The lake {lake.uri} was built from database {recorded.database} of cluster {recorded.system_identifier}, but "
            f"PGWAL_SOURCE_DSN leads to database {ours.database} of cluster {ours.system_identifier}: "
            f"set PGWAL_LAKE to another place, or the DSN to that source."
        )
    for variable, was, now in (("SLOT", recorded.slot, ours.slot), ("PUBLICATION", recorded.publication, ours.publication)):
        if was != now:
            raise LakeError(
                f"The lake {lake.uri} is fed by {variable.lower()} {was}, but PGWAL_{variable} is {now}: "
                f"set PGWAL_{variable}={was}, or PGWAL_LAKE to another place."
            )


def _origin(slot_name: str, lsn: int) -> Window:
    """The empty window at which a new slot begins, so that there is a frontier from the start."""
    return Window(key=window_key(lsn), slot=slot_name, start_lsn=lsn, end_lsn=lsn, state="complete")

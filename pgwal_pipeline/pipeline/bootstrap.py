"""Check, before anything is read, that source and lake belong together: identity, publication and slot; record the tables to follow."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Source, Window
from pgwal_pipeline.lake.records import FORMAT
from pgwal_pipeline.messages.errors import ChangeNotSent, FileGone, LakeError, PublicationMissing, SlotLost
from pgwal_pipeline.pipeline import applied_options
from pgwal_pipeline.pipeline import same_source as history
from pgwal_pipeline.pipeline.alterations import CatalogEntry
from pgwal_pipeline.pipeline.table_review import catalog_entries, record_tables
from pgwal_pipeline.pipeline.window_commit import recover, slot_stream
from pgwal_pipeline.postgres import catalog, publication, slot
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.slot import SlotState
from pgwal_pipeline.postgres.standbys import HeldBack
from pgwal_pipeline.postgres.timeline import left_at
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn, window_key
from pgwal_pipeline.values.relation import TableName

_ABSENT, _NOT_SENT = -1, -2  # recorded as the publication's oid: the stream met a time without it, or a change that cannot be sent


@dataclass(frozen=True)
class Attached:
    """A source and a lake that belong together: the state of the slot, the published tables, and those left out with the reason.

    `recovered`: windows that an earlier drain left prepared and that are complete now.
    """

    server_version: int
    slot: SlotState
    tables: dict[TableName, CatalogEntry]
    skipped: dict[TableName, str]
    recovered: tuple[Window, ...] = ()


def attach(settings: Settings, conn: Connection, *, warn: Callable[[str], None], proven: bool = False) -> Attached:
    """Make sure that publication and slot exist and belong to this lake, and record the published tables in the ledger.

    With `proven` the transactions that the slot sends again are not compared, since they just were. The caller holds the slot's lock.

    Raises LakeError if the lake is another source's. Raises SlotLost if the slot is gone or past the frontier, or if the source was
    promoted from a server that was behind the lake or set back to an older copy of itself; with PGWAL_ON_SLOT_LOSS=resnapshot the slot is
    created again instead, and every table read again.
    """
    try:
        return _attach(settings, conn, warn=warn, proven=proven)
    except SlotLost as loss:
        if settings.on_slot_loss == "stop":
            raise
        warn(f"{loss} That is done now, as PGWAL_ON_SLOT_LOSS=resnapshot says.")
        return renew(settings, conn, warn=warn)


def _attach(settings: Settings, conn: Connection, *, warn: Callable[[str], None], proven: bool = False) -> Attached:
    """Do the work of `attach`. The source is recorded before the slot is created, so that a slot left by a crash is known as ours."""
    ledger = Ledger(Lake(settings.lake))
    recorded, ours, frontier, state = require_agreement(settings, conn)
    wanted = applied_options.require_fitting(settings, conn, ledger)
    published = publication.ensure(conn, settings.publication, settings.tables, wanted)
    ours = replace(ours, publication_oid=published.oid)
    if recorded != ours:
        if recorded is not None and recorded.timeline != ours.timeline:
            _discard_past_fork(settings, ledger, recorded, ours)
        ledger.record_source(ours)
    if state is None:
        failpoints.hit("bootstrap.before_slot")
        state = slot.create(settings.dsn, settings.slot, blocked_timeout=settings.blocked_timeout, warn=warn)
        failpoints.hit("bootstrap.after_slot")
    if frontier is None:
        ledger.append_window(_origin(settings.slot, state.confirmed_flush_lsn))
    recovered = _completed(ledger, warn)
    if not proven:
        _require_same_changes(settings, conn, ledger, state, warn)
    found = catalog_entries(conn, settings.publication, settings.protection)
    for table in published.unshaped & found.keys():
        options = replace(found[table].options, rows=wanted.in_force.get(found[table].relation.oid))
        found[table] = replace(found[table], options=options)
        warn(f"Table {table} is locked, so that what the source sends of it could not be altered; the next run tries again.")
    skipped = {**wanted.barred, **published.skipped}
    if settings.table_options.protects:  # what the publication now sends of a table may show another key
        skipped |= applied_options.barred(settings, ledger.tables(), catalog.tables_of(conn, settings.publication))
    for table, reason in record_tables(ledger, conn, found, skipped).items():
        warn(f"Table {table}: {reason}.")
    applied_options.clean_raw(ledger, conn)
    for warning in applied_options.unmet(settings.table_options, found):
        warn(warning)
    if not found:
        warn(_nothing_to_follow(settings, conn, ours=published.ours))
    return Attached(conn.info.server_version, state, found, skipped, recovered)


def _nothing_to_follow(settings: Settings, conn: Connection, *, ours: bool) -> str:
    """Return the warning that there is no table to follow; it names the schemas that have tables."""
    schemas = catalog.user_schemas(conn)
    there = f"the database has tables in {', '.join(schemas)}" if schemas else "the database has no tables"
    if not ours:
        return f"Publication {settings.publication} holds no table, so there is nothing to follow; {there}. ALTER PUBLICATION … ADD TABLE."
    return f"No table that can be published matches PGWAL_TABLES={settings.tables}, so there is nothing to follow; {there}."


def _require_same_changes(settings: Settings, conn: Connection, ledger: Ledger, state: SlotState, warn: Callable[[str], None]) -> None:
    """Raise SlotLost unless the transactions that a slot before the frontier sends again are those that the lake has."""
    frontier = ledger.frontier()
    again = None if frontier is None else history.to_be_sent_again(ledger, state.confirmed_flush_lsn, frontier)
    if frontier is not None and again is not None:
        start, expected = again
        with slot_stream(settings, start, conn.info.server_version) as stream:
            history.require_same(stream, start, frontier, expected, HeldBack(settings.dsn, settings.slot, warn))


def _completed(ledger: Ledger, warn: Callable[[str], None]) -> tuple[Window, ...]:
    """Complete prepared windows before the tables are recorded: raw needs the columns of a location's earlier table first."""
    try:
        return recover(ledger, warn)
    except FileGone:
        return ()  # the drain reads them again


def require_agreement(settings: Settings, conn: Connection) -> tuple[Source | None, Source, int | None, SlotState | None]:
    """Return the source as recorded and as it is, the lake's frontier and the slot's state. Changes nothing.

    Raises what `attach` raises if they do not belong together.
    """
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    # The frontier is read first: whoever wrote it had recorded its source before, so the source read next shows another user of the lake.
    frontier, recorded, ours = ledger.frontier(), ledger.source(), _source(settings, conn)
    if recorded is not None:
        _require_same_source(lake, recorded, ours)
        _require_same_history(settings, conn, recorded, ours, None if frontier is None else _durable(ledger, frontier))
        _require_same_publication(conn, recorded, frontier)
    state = slot.inspect(conn, settings.slot)
    if state is not None:
        slot.require_usable(state, ours.database)
    if recorded is None and state is not None:
        raise LakeError(
            f"Slot {settings.slot} exists already, but the lake {lake.uri} has no record of it: another lake may be fed by it. "
            f"Set PGWAL_LAKE to that lake, PGWAL_SLOT to another name, or drop the slot with `pgwal drop` to start again."
        )
    if state is None and frontier is not None:
        raise SlotLost(
            f"Slot {settings.slot} is gone from the source, and with it the WAL after {format_lsn(frontier)}. "
            f"Run `pgwal resnapshot --all` to make it anew and read every table again."
        )
    if state is not None and frontier is not None and state.confirmed_flush_lsn > _durable(ledger, frontier):
        raise SlotLost(
            f"Slot {settings.slot} was advanced to {format_lsn(state.confirmed_flush_lsn)} by someone else, but the lake has changes up to "
            f"{format_lsn(frontier)} only. Run `pgwal resnapshot --all` to read every table again."
        )
    return recorded, ours, frontier, state


def renew(settings: Settings, conn: Connection, *, warn: Callable[[str], None]) -> Attached:
    """Create the slot again if there is or may be a gap, and have every table read again. An intact slot is left as it is.

    There is a gap if the slot is missing, lost or past what the lake has, or if the source was promoted from a server that was behind the
    lake. No stream has the changes between the old frontier and the new slot: until a table has been read again it is not published, and
    its old `current` stays as it was. The caller holds the slot's lock. Raises LakeError if the lake is another source's, SourceRefused if
    the slot of that name is not ours.
    """
    ledger = Ledger(Lake(settings.lake))
    state = slot.inspect(conn, settings.slot)
    frontier = ledger.frontier()
    recorded, ours = ledger.source(), _source(settings, conn)
    if recorded is None:
        return _attach(settings, conn, warn=warn)
    _require_same_source(ledger.lake, recorded, ours)
    if state is not None:
        slot.require_kind(state, ours.database)
    if frontier is None and state is not None and state.lost:
        slot.drop(conn, settings.slot)
    if frontier is not None and _has_gap(settings, conn, ledger, recorded, ours, frontier, state, warn):
        if (end := catalog.insert_lsn(conn)) < frontier:
            raise LakeError(
                f"The source's WAL ends at {format_lsn(end)}, but the lake {settings.lake} is at {format_lsn(frontier)} already, and "
                f"cannot go back. Set PGWAL_LAKE to another place to start again."
            )
        # Once before the new slot exists, so that no drain uses it with the old states; once after, for readings that began meanwhile.
        _read_all_again(ledger)
        if recorded.timeline != ours.timeline:
            _discard_past_fork(settings, ledger, recorded, ours)
        failpoints.hit("renew.before_slot")
        if state is not None:
            slot.drop(conn, settings.slot)
        published = publication.ensure(conn, settings.publication, settings.tables, applied_options.require_fitting(settings, conn, ledger))
        state = slot.create(settings.dsn, settings.slot, blocked_timeout=settings.blocked_timeout, warn=warn)
        failpoints.hit("renew.after_slot")
        ledger.append_window(_origin(settings.slot, state.confirmed_flush_lsn))
        failpoints.hit("renew.after_origin")
        _read_all_again(ledger)
        failpoints.hit("renew.after_tables")
        ledger.record_source(replace(ours, publication_oid=published.oid))
    return _attach(settings, conn, warn=warn)


def note_gap(ledger: Ledger, loss: PublicationMissing | ChangeNotSent) -> None:
    """Record that the stream lacks changes: it met a time without the publication, or a change that the source cannot send.

    The publication's name and oid do not show that.
    """
    source = ledger.source()
    if source is not None:
        ledger.record_source(replace(source, publication_oid=_NOT_SENT if isinstance(loss, ChangeNotSent) else _ABSENT))


def _read_all_again(ledger: Ledger) -> None:
    """Have every followed table read from the start. None is published before that."""
    ledger.amend_tables(
        lambda known: [
            replace(state, state="pending", reason=None, generation=None, reading=None, published=None)
            for state in known.values()
            if state.followed
        ]
    )


def _discard_past_fork(settings: Settings, ledger: Ledger, recorded: Source, ours: Source) -> None:
    """Discard incomplete windows that were read past the LSN at which the source left the recorded timeline."""
    left = left_at(settings.dsn, recorded.timeline, ours.timeline)
    ledger.take_back([window for window in ledger.prepared() if left is None or window.end_lsn > left])
    plan = ledger.plan()
    if plan is not None and (left is None or plan.ends[-1] > left):
        ledger.record_plan(replace(plan, ends=()))
        ledger.forget_reads(plan)


def _source(settings: Settings, conn: Connection) -> Source:
    """Return the source as the ledger records it."""
    identity = catalog.source_identity(conn)
    return Source(
        system_identifier=identity.system_identifier,
        timeline=identity.timeline,
        database_oid=identity.database_oid,
        database=identity.database,
        publication=settings.publication,
        slot=settings.slot,
        format=FORMAT,
    )


def _has_gap(
    settings: Settings,
    conn: Connection,
    ledger: Ledger,
    recorded: Source,
    ours: Source,
    frontier: int,
    state: SlotState | None,
    warn: Callable[[str], None],
) -> bool:
    """Return whether there are, or may be, changes past the frontier that the slot does not send."""
    if state is None or state.lost or state.confirmed_flush_lsn > _durable(ledger, frontier):
        return True
    if recorded.publication_oid not in (0, publication.oid(conn, recorded.publication)):
        return True
    try:
        _require_same_changes(settings, conn, ledger, state, warn)
    except SlotLost:
        return True
    if ours.timeline <= recorded.timeline:
        return False
    left = left_at(settings.dsn, recorded.timeline, ours.timeline)
    return left is None or left < _durable(ledger, frontier)


def _durable(ledger: Ledger, frontier: int) -> int:
    """Return the LSN up to which the slot may be confirmed. Prepared windows are durable, though raw may not name their files yet."""
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


def _require_same_publication(conn: Connection, recorded: Source, frontier: int | None) -> None:
    """Raise SlotLost unless the publication has existed all the time: no stream has the changes of a time without it."""
    now = publication.oid(conn, recorded.publication)
    if frontier is not None and recorded.publication_oid == _NOT_SENT:
        raise SlotLost(
            f"The source failed at a change that slot {recorded.slot} had to send, and the stream has nothing after "
            f"{format_lsn(frontier)}. Fix the cause, or leave the table out of the publication; then run `pgwal resnapshot --all` to make "
            f"the slot anew and read every table again."
        )
    if frontier is not None and recorded.publication_oid not in (0, now):
        what = "was dropped" if now is None else "was dropped, or renamed, and made anew"
        raise SlotLost(
            f"Publication {recorded.publication} {what}, and no stream has the changes of the time without it. "
            f"Run `pgwal resnapshot --all` to read every table again."
        )


def _require_same_history(settings: Settings, conn: Connection, recorded: Source, ours: Source, frontier: int | None) -> None:
    """Raise LakeError or SlotLost unless the source has everything that the lake has: an older copy or a lagging standby does not.

    Two servers on one timeline have the same WAL up to the same LSN. A later timeline has it up to where it left the earlier one.
    """
    if frontier is None:
        return
    holds = f"the lake {settings.lake} has its changes up to {format_lsn(frontier)}"
    end = catalog.flush_lsn(conn)
    if ours.timeline < recorded.timeline or (ours.timeline == recorded.timeline and end < frontier):
        raise LakeError(
            f"PGWAL_SOURCE_DSN leads to an older copy of the source, or to a standby that is behind: it is on timeline {ours.timeline} at "
            f"{format_lsn(end)}, but {holds} on timeline {recorded.timeline}. "
            f"Set the DSN to the source itself, or PGWAL_LAKE to another place."
        )
    if ours.timeline == recorded.timeline:
        return
    left = left_at(settings.dsn, recorded.timeline, ours.timeline)
    if left is None or left < frontier:
        was = recorded.timeline
        how = f"does not come from timeline {was}" if left is None else f"left timeline {was} at {format_lsn(left)}"
        raise SlotLost(
            f"The source was promoted or restored: its timeline {ours.timeline} {how}, but {holds}, some of which the source never had. "
            f"Run `pgwal resnapshot --all` to make the slot anew and read every table again."
        )


def _origin(slot_name: str, lsn: int) -> Window:
    """Return the empty window at which a new slot begins: the ledger has a frontier from then on."""
    return Window(key=window_key(lsn), slot=slot_name, start_lsn=lsn, end_lsn=lsn, state="complete")

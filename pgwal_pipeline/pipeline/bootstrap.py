"""What a lake and a source must agree on before anything is read: identity, publication, slot, and which tables are followed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Source, Window
from pgwal_pipeline.messages.errors import ChangeNotSent, FileGone, LakeError, PublicationMissing, SlotLost
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

_NEVER, _NOT_SENT = -1, -2  # oids of no publication: the stream met a time without it, or a change that the source cannot send


@dataclass(frozen=True)
class Attached:
    """A source and a lake that belong together: every table the stream carries, and where the slot stands.

    `recovered`: windows that a drain before had left prepared and that had to be completed at once.
    """

    server_version: int
    slot: SlotState
    tables: dict[TableName, CatalogEntry]
    skipped: dict[TableName, str]
    recovered: tuple[Window, ...] = ()


def attach(settings: Settings, conn: Connection, *, warn: Callable[[str], None], proven: bool = False) -> Attached:
    """Make sure that publication and slot exist and are this lake's, and record in the ledger which tables they carry.

    With `proven` the source is known to be the same as a moment ago: what its slot sends again is not compared.

    To be called by the holder of the slot's lock only. Raises LakeError for another source's lake, SlotLost where the slot is gone, stands
    beyond the frontier, or the source was promoted from a server that was behind the lake, or set back to an older copy of itself; with
    PGWAL_ON_SLOT_LOSS=resnapshot the slot is made anew then, and every table read again.
    """
    try:
        return _attach(settings, conn, warn=warn, proven=proven)
    except SlotLost as loss:
        if settings.on_slot_loss == "stop":
            raise
        warn(f"{loss} That is done now, as PGWAL_ON_SLOT_LOSS=resnapshot says.")
        return renew(settings, conn, warn=warn)


def _attach(settings: Settings, conn: Connection, *, warn: Callable[[str], None], proven: bool = False) -> Attached:
    """The source's record is written before the slot is made: a slot that a crash leaves behind is then known as ours."""
    ledger = Ledger(Lake(settings.lake))
    recorded, ours, frontier, state = require_agreement(settings, conn)
    published = publication.ensure(conn, settings.publication, settings.tables)
    ours = replace(ours, publication_oid=published.oid)
    if recorded != ours:
        if recorded is not None and recorded.timeline != ours.timeline:
            _forget_what_never_was(settings, ledger, recorded, ours)
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
    found = catalog_entries(conn, settings.publication)
    for table, reason in record_tables(ledger, conn, found, published.skipped).items():
        warn(f"Table {table}: {reason}.")
    if not found:
        warn(_nothing_to_follow(settings, conn, ours=published.ours))
    return Attached(conn.info.server_version, state, found, dict(published.skipped), recovered)


def _nothing_to_follow(settings: Settings, conn: Connection, *, ours: bool) -> str:
    """The warning that there is no table to follow, with what there is."""
    schemas = catalog.user_schemas(conn)
    there = f"the database has tables in {', '.join(schemas)}" if schemas else "the database has no tables"
    if not ours:
        return f"Publication {settings.publication} holds no table, so there is nothing to follow; {there}. ALTER PUBLICATION … ADD TABLE."
    return f"No table that can be published matches PGWAL_TABLES={settings.tables}, so there is nothing to follow; {there}."


def _require_same_changes(settings: Settings, conn: Connection, ledger: Ledger, state: SlotState, warn: Callable[[str], None]) -> None:
    """See that what the slot sends again, where it stands before the frontier, is what the lake has. Raises SlotLost."""
    frontier = ledger.frontier()
    again = None if frontier is None else history.to_be_sent_again(ledger, state.confirmed_flush_lsn, frontier)
    if frontier is not None and again is not None:
        start, expected = again
        with slot_stream(settings, start, conn.info.server_version) as stream:
            history.require_same(stream, start, frontier, expected, HeldBack(settings.dsn, settings.slot, warn))


def _completed(ledger: Ledger, warn: Callable[[str], None]) -> tuple[Window, ...]:
    """Complete what is prepared before the tables are looked at: raw takes the columns of an earlier table of a place first."""
    try:
        return recover(ledger, warn)
    except FileGone:
        return ()  # the drain reads it again


def require_agreement(settings: Settings, conn: Connection) -> tuple[Source | None, Source, int | None, SlotState | None]:
    """The source as the ledger has it and as it is, the lake's frontier and the slot, where they belong together; changes nothing.

    Raises what `attach` raises where they do not.
    """
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    # The source is written down before the frontier: whoever takes the lake meanwhile is found by it.
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
            f"Set PGWAL_LAKE to that lake, PGWAL_SLOT to another name, or drop the slot with `pgwal drop` to start anew."
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
    """Make a slot anew that is missing, lost, or stands past what the lake holds, and have every table read again.

    So it is where the source was promoted from a server that was behind the lake. An intact slot is left as it is. Otherwise nothing
    between the old frontier and the new slot is in any stream: until a table has been read again it is not published, and its old
    `current` stays as it was. To be called by the holder of the slot's lock only. Raises LakeError for another source's lake, SourceRefused
    where somebody else's slot has the name.
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
    if frontier is not None and _gap(settings, conn, ledger, recorded, ours, frontier, state, warn):
        if (end := catalog.insert_lsn(conn)) < frontier:
            raise LakeError(
                f"The source's WAL ends at {format_lsn(end)}, but the lake {settings.lake} stands at {format_lsn(frontier)} already, and "
                f"cannot go back. Set PGWAL_LAKE to another place to begin anew."
            )
        # Before the new slot is there, so that nobody goes on from it with the tables of before; and after it, for what began meanwhile.
        _read_all_again(ledger)
        if recorded.timeline != ours.timeline:
            _forget_what_never_was(settings, ledger, recorded, ours)
        failpoints.hit("renew.before_slot")
        if state is not None:
            slot.drop(conn, settings.slot)
        published = publication.ensure(conn, settings.publication, settings.tables)
        state = slot.create(settings.dsn, settings.slot, blocked_timeout=settings.blocked_timeout, warn=warn)
        failpoints.hit("renew.after_slot")
        ledger.append_window(_origin(settings.slot, state.confirmed_flush_lsn))
        failpoints.hit("renew.after_origin")
        _read_all_again(ledger)
        failpoints.hit("renew.after_tables")
        ledger.record_source(replace(ours, publication_oid=published.oid))
    return _attach(settings, conn, warn=warn)


def note_gap(ledger: Ledger, loss: PublicationMissing | ChangeNotSent) -> None:
    """Write down that the slot does not bring every change: it met a time without the publication, or one that the source cannot send.

    Neither the publication's name nor its oid tells of that.
    """
    source = ledger.source()
    if source is not None:
        ledger.record_source(replace(source, publication_oid=_NOT_SENT if isinstance(loss, ChangeNotSent) else _NEVER))


def _read_all_again(ledger: Ledger) -> None:
    """Have every followed table read from the start; none is published until it has been."""
    ledger.amend_tables(
        lambda known: [
            replace(state, state="pending", reason=None, generation=None, reading=None, published=None)
            for state in known.values()
            if state.followed
        ]
    )


def _forget_what_never_was(settings: Settings, ledger: Ledger, recorded: Source, ours: Source) -> None:
    """Give up what was read from past where the source left the timeline that it was read on, and does not count yet."""
    left = left_at(settings.dsn, recorded.timeline, ours.timeline)
    ledger.take_back([window for window in ledger.prepared() if left is None or window.end_lsn > left])
    plan = ledger.plan()
    if plan is not None and (left is None or plan.ends[-1] > left):
        ledger.record_plan(replace(plan, ends=()))
        ledger.forget_reads(plan)


def _source(settings: Settings, conn: Connection) -> Source:
    """The source as the ledger writes it down."""
    identity = catalog.source_identity(conn)
    return Source(
        system_identifier=identity.system_identifier,
        timeline=identity.timeline,
        database_oid=identity.database_oid,
        database=identity.database,
        publication=settings.publication,
        slot=settings.slot,
    )


def _gap(
    settings: Settings,
    conn: Connection,
    ledger: Ledger,
    recorded: Source,
    ours: Source,
    frontier: int,
    state: SlotState | None,
    warn: Callable[[str], None],
) -> bool:
    """Whether there are, or may be, changes behind the frontier that the slot does not bring."""
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


def _require_same_publication(conn: Connection, recorded: Source, frontier: int | None) -> None:
    """See that the publication has been there all the time: the changes of a time without it are in no stream."""
    now = publication.oid(conn, recorded.publication)
    if frontier is not None and recorded.publication_oid == _NOT_SENT:
        raise SlotLost(
            f"The source failed at a change that slot {recorded.slot} had to send, and nothing behind {format_lsn(frontier)} is in the "
            f"stream. Mend the cause, or leave the table out of the publication; then run `pgwal resnapshot --all` to make the slot "
            f"anew and read every table again."
        )
    if frontier is not None and recorded.publication_oid not in (0, now):
        what = "was dropped" if now is None else "was dropped, or renamed, and made anew"
        raise SlotLost(
            f"Publication {recorded.publication} {what}, and the changes of the time without it are in no stream. "
            f"Run `pgwal resnapshot --all` to read every table again."
        )


def _require_same_history(settings: Settings, conn: Connection, recorded: Source, ours: Source, frontier: int | None) -> None:
    """See that the source still has all that the lake has: an older copy has not, nor has a standby that was promoted too early.

    Two servers with one timeline and one LSN have the same WAL up to there; a later timeline has it up to where it left the earlier one.
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
        how = "does not come from" if left is None else f"left, at {format_lsn(left)},"
        raise SlotLost(
            f"The source was promoted or restored: its timeline {ours.timeline} {how} timeline {recorded.timeline}, of which {holds}: "
            f"some of them it never had. Run `pgwal resnapshot --all` to make the slot anew and read every table again."
        )


def _origin(slot_name: str, lsn: int) -> Window:
    """The empty window at which a new slot begins, so that there is a frontier from the start."""
    return Window(key=window_key(lsn), slot=slot_name, start_lsn=lsn, end_lsn=lsn, state="complete")

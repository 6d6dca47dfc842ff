"""Find out what changed in a table between two publishes: from which versions of which tables it can be told.

Net changes come from two places. `current` has the newest values: each row there says at which LSN it last changed. Raw says which keys had
a row before and have none now. Where either lacks what is needed the answer is the whole table, with the reason: never a hole.
"""

from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads

from pgwal_pipeline.lake.delta import open_table
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import Publish, TablePointer, TableState
from pgwal_pipeline.lake.schema import names_in_raw
from pgwal_pipeline.lake.standing import GENERATION, open_current
from pgwal_pipeline.messages.errors import LakeError, PgwalError
from pgwal_pipeline.published import net
from pgwal_pipeline.published.changes import Changes
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn, window_key
from pgwal_pipeline.values.own_columns import COMMIT_LSN, OP, WINDOW
from pgwal_pipeline.values.relation import TableName


def find_changes(
    settings: Settings, ledger: Ledger, until: Publish, name: TableName, newer: TablePointer, since: int | None, history: bool
) -> Changes:
    """Find out what is needed to read the changes of a table, of which `until` has the version `newer`.

    Raises PgwalError if `since` is past `until`.
    """
    lake, state = ledger.lake, ledger.tables().get(name)
    key = () if state is None or state.relation is None else state.relation.key

    def changes(from_lsn: int | None, reason: str | None = None, **found: Any) -> Changes:
        return Changes(
            table=str(name),
            since=None if from_lsn is None else format_lsn(from_lsn),
            until=format_lsn(until.lsn),
            complete=reason is not None,
            reason=reason,
            history=history and reason is None,
            key=key,
            until_lsn=until.lsn,
            since_lsn=from_lsn,
            settings=settings,
            newer=newer,
            **found,
        )

    if since is None:
        return changes(None, "nothing of this table was read before")
    if since > until.lsn:
        raise PgwalError(f"Changes since {format_lsn(since)} cannot be read from the publish at {format_lsn(until.lsn)}, which is older.")
    before = ledger.publish_before(since)
    if before is None:
        return changes(since, f"the lake has no publish at or before {format_lsn(since)} any more (PGWAL_AS_OF_RETENTION)")
    since = before.lsn
    if since == until.lsn and not history:
        return changes(since)
    older = next((at for at in before.tables.values() if at.path == newer.path), None)
    reason = _why_unknown(ledger, state, key, before, older, newer, until, history)
    raw = None if state is None else _raw_as_it_is(lake, lake.raw(state.location))
    if reason is None and raw is None:
        reason = "it has no raw table"
    if reason is not None:
        return changes(since, reason)
    assert raw is not None
    span = net.Span(since, until.lsn, window_key(since), _last_window(ledger, until.lsn))
    truncates = _truncates(raw, span)
    return changes(
        since,
        raw=raw,
        older=older if truncates is not None and not history else None,
        span=net.Span(span.since, span.until, span.first_window, span.last_window, truncates),
    )


def _why_unknown(
    ledger: Ledger,
    state: TableState | None,
    key: tuple[str, ...],
    before: Publish,
    older: TablePointer | None,
    newer: TablePointer,
    until: Publish,
    history: bool,
) -> str | None:
    """Why the changes of a table between two publishes cannot be determined; None if they can."""
    at = format_lsn(before.lsn)
    if state is None or older is None:
        return f"it was not published at {at}"
    if not key and not history:
        return "it has no key"
    if state.raw_from > before.lsn:
        return f"its changes were not followed from {at} on"
    pruned = any(window.state == "pruned" and window.start_lsn < until.lsn for window in ledger.windows(before.lsn))
    if pruned:
        return f"its changes since {at} have been pruned from raw (PGWAL_RAW_RETENTION)"
    try:
        built_on = _generation(older)
    except LakeError:
        return f"its rows at {at} cannot be read any more"
    return None if built_on == _generation(newer) else f"it has been read again since {at}"


def _generation(at: TablePointer) -> str | None:
    """The reading that a version of a `current` table is built on."""
    table = open_current(at.path, at.version)
    return None if table is None else table.metadata().configuration.get(GENERATION)


def _raw_as_it_is(lake: Lake, path: str) -> TablePointer | None:
    """The raw table as it is now: pruning it meanwhile does no harm."""
    table = open_table(lake, path)
    return None if table is None else TablePointer(path, table.version())


def _last_window(ledger: Ledger, until: int) -> str:
    """The key of the last window with changes below `until`."""
    return max((window.key for window in ledger.windows(until - 1) if window.start_lsn < until), default=window_key(until))


def _truncates(raw: TablePointer, span: net.Span) -> tuple[int, int] | None:
    found = TableDataset(raw.path, raw.version).to_table(columns=[COMMIT_LSN], filter=rows_of_span(span) & (pads.field(OP) == "T"))
    at = found[COMMIT_LSN].to_pylist()
    return (min(at), max(at)) if at else None


def rows_of_span(span: net.Span) -> pads.Expression:
    """Return the condition of raw's rows that belong to a span."""
    window, lsn = pads.field(WINDOW), pads.field(COMMIT_LSN)
    return (window > span.first_window) & (window <= span.last_window) & (lsn >= span.since) & (lsn < span.until)


def held_in_raw(raw: pa.Schema, newer: TableDataset, key: tuple[str, ...]) -> dict[str, str]:
    """The names that the key's columns have in raw: another one where raw has a column of that name with another type."""
    kinds = newer.delta_types
    held = {}
    for column in key:
        wanted = newer.schema.field(column).type
        names = [name for name in names_in_raw(column, kinds[column]) if name in raw.names and raw.field(name).type == wanted]
        if not names:
            raise LakeError(f"Raw has no column for {column!r} of the key, although it has the table's changes.")
        held[column] = names[0]
    return held

"""Change a table's state in the ledger while its rows are read."""

import uuid
from collections.abc import Iterable
from dataclasses import replace

from pgwal_pipeline.lake.records import TableState
from pgwal_pipeline.postgres.catalog import PublishedTable
from pgwal_pipeline.values.relation import TableName


def first_of(states: Iterable[TableState]) -> dict[TableName, TableState]:
    """Return the table that has each location now; a concurrent drain may have found a new name of it."""
    return {state.location: state for state in reversed(list(states)) if state.oid}


def begun_state(seen: TableState, published: PublishedTable) -> TableState:
    """Return the state of a table of which a new reading begins."""
    # A table in error must not be published meanwhile: the changes that raw lacks are only in its new rows.
    visible = "ready" if seen.published is not None and seen.state != "error" else "snapshotting"
    relation = published.relation
    begun = replace(seen, state=visible, reason=None, reading=uuid.uuid4().hex, joined_xid=None, relation=relation, key=relation.key)
    return begun.cleaned("snapshot")


def altered(known: TableState, seen: TableState) -> bool:
    """Return whether a concurrent drain has recorded a change of a table since `seen`."""
    return (known.oid, known.state, known.reason, known.storage, known.joined_xid) != (
        seen.oid,
        seen.state,
        seen.reason,
        seen.storage,
        seen.joined_xid,
    )


def begun(known: TableState, state: TableState) -> TableState:
    """Return the table's state once its reading has begun; what a drain has recorded meanwhile stays."""
    return replace(
        known,
        state=state.state,
        reason=state.reason,
        reading=state.reading,
        joined_xid=state.joined_xid,
        relation=state.relation,
        key=state.key,
        unclean=state.unclean,
    )


def whole(known: TableState, state: TableState, required_lsn: int) -> TableState:
    """Return the table's state once every chunk has been read; what a drain has recorded of its columns meanwhile stays."""
    whole = replace(known.without_error(), state="ready", reading=None, joined_xid=None)
    return replace(whole, generation=state.reading, required_lsn=required_lsn)

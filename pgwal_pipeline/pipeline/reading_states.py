"""What becomes of a table's state in the ledger while its rows are read."""

from collections.abc import Iterable
from dataclasses import replace

from pgwal_pipeline.lake.records import TableState
from pgwal_pipeline.values.relation import TableName


def first_of(states: Iterable[TableState]) -> dict[TableName, TableState]:
    """Return the table that stands at each location now, whatever a drain beside has found it to be called."""
    return {state.location: state for state in reversed(list(states)) if state.oid}


def altered(known: TableState, seen: TableState) -> bool:
    """Whether a drain beside has found something about a table since it was looked up for a reading."""
    return (known.oid, known.state, known.reason, known.storage, known.joined_xid) != (
        seen.oid,
        seen.state,
        seen.reason,
        seen.storage,
        seen.joined_xid,
    )


def begun(known: TableState, state: TableState) -> TableState:
    """The table's state from when its reading has begun; what the stream has said of it meanwhile stays."""
    return replace(
        known,
        state=state.state,
        reason=state.reason,
        reading=state.reading,
        joined_xid=state.joined_xid,
        relation=state.relation,
        key=state.key,
    )


def whole(known: TableState, state: TableState, required_lsn: int) -> TableState:
    """The table's state once every chunk is there; what the stream has said of its columns meanwhile stays."""
    whole = replace(known.mended(), state="ready", reading=None, joined_xid=None)
    return replace(whole, generation=state.reading, required_lsn=required_lsn)

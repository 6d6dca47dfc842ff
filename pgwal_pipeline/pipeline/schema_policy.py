"""What becomes of a table that the source has altered, by its option `on_schema_change`.

The ledger keeps the definition that was accepted. All else about the table is recorded as ever, so that nothing is lost: a table that is
held back is only neither read nor merged, and a frozen one is merged with fewer columns.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from pgwal_pipeline.decode.types import column_type, copy_schema
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.schema import schema_json
from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.pipeline.alterations import CatalogEntry, read_again
from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName, quote_ident
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.table_options import EXCLUDED, FREEZE, PROPAGATE, STOP

_INTEGERS = (pa.int16(), pa.int32(), pa.int64())


@dataclass(frozen=True, slots=True)
class Difference:
    """A column that is not as it was accepted: its type then (None if it is new), and its type now (None if it is gone)."""

    column: str
    was: str | None
    now: str | None

    def __str__(self) -> str:
        name = quote_ident(self.column)
        if self.was is None:
            return f"column {name} {self.now} is new"
        return f"column {name} is gone" if self.now is None else f"column {name} was {self.was} and is {self.now}"


@dataclass(frozen=True, slots=True)
class Taken:
    """What `current` takes of a table: `relation` has only the columns that it takes, with the types that it keeps.

    `arriving` are the same columns with the types that they have in raw and snapshots, None if these are the same. `keep` are columns that
    `current` has and that get no values any more; those of them that `relation` has may have some from before. `order` is the order of all
    of them, empty for the usual one.
    """

    relation: Relation
    keep: tuple[str, ...]
    arriving: Relation | None = None
    order: tuple[str, ...] = ()

    @property
    def schema_json(self) -> str:
        """The Delta schema of `relation`, as requests take it."""
        return schema_json(copy_schema(self.relation))

    @property
    def arriving_json(self) -> str | None:
        """The same of `arriving`."""
        return None if self.arriving is None else schema_json(copy_schema(self.arriving))


def differences(accepted: Relation, relation: Relation) -> tuple[Difference, ...]:
    """Return the columns that differ between two definitions of a table, those that are new last."""
    was, now = _by_name(accepted), _by_name(relation)
    found = [
        Difference(name, column.type.name, None if name not in now else now[name].type.name)
        for name, column in was.items()
        if name not in now or _plain(column) != _plain(now[name])
    ]
    return (*found, *(Difference(name, None, column.type.name) for name, column in now.items() if name not in was))


def taken(state: TableState) -> Taken:
    """Return what `current` takes of a table that has been described."""
    assert state.relation is not None
    if state.accepted is None or state.policy != FREEZE:
        return Taken(state.relation, state.dropped)
    now = _by_name(state.relation)
    # Rows that were written before a column was gone may be merged after that. Rows without a key are told apart by what they have now.
    whole = bool(state.relation.key)
    columns = [(column, now.get(column.name, column)) for column in state.accepted.columns if whole or column.name in now]
    kept = replace(state.relation, columns=tuple(was for was, _ in columns))
    arriving = replace(state.relation, columns=tuple(found for _, found in columns))
    left = [name for name in state.accepted.column_names if name not in now]
    return Taken(
        kept,
        tuple(dict.fromkeys((*left, *state.dropped))),
        arriving if any(column_type(was) != column_type(found) for was, found in columns) else None,
        state.accepted.column_names,
    )


def begun(state: TableState, entry: CatalogEntry) -> TableState:
    """Return the state of a known table with the definition that it keeps from now on, before a new catalog entry is applied.

    A table begins to keep its definition once it has been published. One that was frozen is read again when it is frozen no longer, for
    `current` lacks what it did not take.
    """
    policy, accepted = entry.options.on_schema_change, state.accepted
    if accepted is None and policy != PROPAGATE and state.published is not None:
        accepted = state.relation
    if state.policy == FREEZE and policy != FREEZE and _lacks(state) and state.is_read:
        state = read_again(state, entry, "its columns are not frozen any more")
    return replace(state, accepted=None if policy == PROPAGATE else accepted)


def judged(state: TableState, entry: CatalogEntry) -> TableState:
    """Return the state that a catalog entry has led to, held back if the table's option says so."""
    held = None
    if state.accepted is not None and entry.options.on_schema_change == STOP:
        held = _stopped(state.accepted, entry.relation)
    elif state.accepted is not None and entry.options.on_schema_change == FREEZE:
        held = _unkept(state.accepted, entry.relation)
    return replace(state, held=held)


def otherwise_protected(accepted: Relation | None, entry: CatalogEntry) -> Relation | None:
    """Return the definition to keep of a table that is read again because other columns are protected: no layer may keep what it has.

    A table that stops at a change takes the definition as it is then; one that was held back could not be cleaned.
    """
    if accepted is None or entry.options.on_schema_change != FREEZE:
        return None
    now = _by_name(entry.relation)
    columns = [
        replace(column, protection=now[column.name].protection) if column.name in now else column
        for column in accepted.columns
        if entry.options.treatment(column.name) != EXCLUDED
    ]
    kept = replace(accepted, columns=tuple(columns))
    return None if _unkept(kept, entry.relation) is not None else kept


def compared(state: TableState, entry: CatalogEntry) -> tuple[Relation | None, Storage | None, CatalogEntry]:
    """Return definition, storage and catalog entry of a known table as far as `current` depends on them.

    Of a frozen table these have only the columns that it keeps: a new one is not there, and one that was renamed is gone.
    """
    if state.accepted is None or entry.options.on_schema_change != FREEZE:
        return state.relation, state.storage, entry
    names = set(state.accepted.column_names)
    return (
        None if state.relation is None else narrowed(state.relation, names),
        None if state.storage is None else _stored(state.storage, names),
        replace(entry, relation=narrowed(entry.relation, names), storage=_stored(entry.storage, names)),
    )


def narrowed(relation: Relation, names: Collection[str]) -> Relation:
    """Return a definition with only the columns `names`."""
    return replace(relation, columns=tuple(column for column in relation.columns if column.name in names))


def frozen_difference(state: TableState) -> tuple[Difference, ...]:
    """Return how the source's columns differ from those that a frozen table keeps; empty for other tables."""
    if state.accepted is None or state.relation is None or state.policy != FREEZE:
        return ()
    return differences(state.accepted, state.relation)


def summary(found: Iterable[Difference]) -> str:
    """Return differences as one line."""
    return ", ".join(map(str, found))


def accept(ledger: Ledger, tables: Collection[TableName]) -> dict[TableName, tuple[tuple[Difference, ...], bool]]:
    """Let `tables` take their definitions as they were last recorded; return for each what that changes, and whether it is read again.

    Raises SourceRefused for a table that is not followed, before any is changed.
    """
    found: dict[TableName, tuple[tuple[Difference, ...], bool]] = {}

    def decide(known: Mapping[TableName, TableState]) -> list[TableState]:
        found.clear()
        changed = []
        for table in tables:
            state = known.get(table)
            if state is None or not state.followed:
                why = f": {state.reason}" if state is not None and state.reason else ""
                raise SourceRefused(f"Table {table} is not followed{why}; `pgwal status` lists the tables that are.")
            released = _accepted(state)
            told = () if state.accepted is None or state.relation is None else differences(state.accepted, state.relation)
            found[table] = told, released.state == "pending" or (released.reading is not None and released.state != "error")
            if released != state:
                changed.append(released)
        return changed

    ledger.amend_tables(decide)
    return found


def read_anew(ledger: Ledger, tables: Collection[TableName]) -> None:
    """Let those of `tables` that stop at a change take the definition that they are about to be read with."""
    ledger.amend_tables(
        lambda known: [
            replace(state, accepted=None, held=None)
            for table in tables
            if (state := known.get(table)) is not None and state.accepted is not None and (state.policy == STOP or state.held is not None)
        ]
    )


def _accepted(state: TableState) -> TableState:
    lacks = state.policy == FREEZE and _lacks(state)
    released = replace(state, accepted=None, held=None)
    if not lacks or not state.is_read or state.relation is None or state.storage is None:
        return released
    entry = CatalogEntry(state.relation, state.storage)
    return read_again(released, entry, "the columns that it did not take were accepted")


def _lacks(state: TableState) -> bool:
    """Return whether a frozen table's `current` has not all that one of its definition now would have."""
    if state.accepted is None or state.relation is None:
        return False
    return any(found.now is not None for found in differences(state.accepted, state.relation))


def _stopped(accepted: Relation, relation: Relation) -> str | None:
    """Return why a table that stops at a change is held back, None if nothing has changed."""
    told = [str(found) for found in differences(accepted, relation)]
    if accepted.key != relation.key:
        told.append(f"the key was ({', '.join(accepted.key)}) and is ({', '.join(relation.key)})")
    if not told:
        return None
    return _held(relation, f"its schema has changed and on_schema_change is stop: {', '.join(told)}")


def _unkept(accepted: Relation, relation: Relation) -> str | None:
    """Return why a frozen table cannot keep its columns, None if it can."""
    was, now = _by_name(accepted), _by_name(relation)
    for name in relation.key:
        if name not in was:
            return _held(relation, f"its columns are frozen, and the column {quote_ident(name)} of its key is not among them")
        if column_type(was[name]) != column_type(now[name]):
            types = f"{was[name].type.name} and is {now[name].type.name}"
            return _held(relation, f"its columns are frozen, and the column {quote_ident(name)} of its key was {types}")
    for name, column in was.items():
        if name in now and not _castable(column_type(now[name]), column_type(column)):
            types = f"{now[name].type.name} cannot be kept as {column.type.name}"
            return _held(relation, f"its columns are frozen, and column {quote_ident(name)} of type {types}")
    return None


def _held(relation: Relation, why: str) -> str:
    return (
        f"it is held back: {why}. Its current stays as it was, and raw has its changes; `pgwal accept '{relation.table}'` takes the new "
        f"schema"
    )


def _castable(now: pa.DataType, kept: pa.DataType) -> bool:
    """Return whether values of one type can be kept in a column of another, but for single values, whose text is kept."""
    if now == kept:
        return True
    if now in _INTEGERS:
        return kept in _INTEGERS or kept in (pa.string(), pa.float64()) or pa.types.is_decimal(kept)
    if pa.types.is_decimal(now):
        return kept in _INTEGERS or pa.types.is_decimal(kept)
    if now == pa.string():
        return kept in _INTEGERS or kept == pa.date32() or pa.types.is_decimal(kept)
    return (now, kept) in ((pa.float32(), pa.float64()), (pa.date32(), pa.string()))


def _by_name(relation: Relation) -> dict[str, Column]:
    return {column.name: column for column in relation.columns}


def _plain(column: Column) -> tuple[PgType, str | None]:
    """What makes a column another one: its type, without the name that people gave it, and its protection."""
    return _unnamed(column.type), column.protection


def _unnamed(declared: PgType) -> PgType:
    return replace(declared, name="", element=None if declared.element is None else _unnamed(declared.element))


def _stored(storage: Storage, names: Collection[str]) -> Storage:
    return replace(storage, columns=tuple(column for column in storage.columns if column.name in names))

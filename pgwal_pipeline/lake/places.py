"""Where in the lake each table stands, whatever it is called: a table keeps its place when it is renamed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from pgwal_pipeline.lake.records import TableState
from pgwal_pipeline.relation import Relation, TableName


def free_place(table: TableName, oid: int, taken: Collection[TableName]) -> TableName:
    """The place of a table that is new: the one of its name or, where another table has that, one with its oid behind."""
    place = table
    while place in taken:
        place = TableName(place.schema, f"{place.name}_{oid}")
    return place


@dataclass(frozen=True, slots=True)
class Places:
    """Which table of the stream belongs where, as the ledger knew the tables when the stream began to be read.

    `by_oid` are the tables that are known, `open_names` the places of names whose table has not been read yet, so that what another one of
    that name left behind does it no harm; `taken` those of all others.
    """

    by_oid: Mapping[int, TableState] = field(default_factory=dict)
    open_names: Mapping[TableName, TableName] = field(default_factory=dict)
    taken: Collection[TableName] = ()

    @classmethod
    def of(cls, states: Mapping[TableName, TableState]) -> Self:
        """The places of the tables as the ledger has them."""
        # Of two with one oid, one has gone and come back under another name.
        known = sorted((state for state in states.values() if state.oid), key=lambda state: state.followed)
        open_names = {state.table: state.place for state in known if not (state.followed and state.is_read)}
        return cls(
            by_oid={state.oid: state for state in known},
            open_names=open_names,
            taken=frozenset(state.place for state in known if open_names.get(state.table) != state.place or state.place != state.table),
        )

    def find(self, relation: Relation) -> tuple[TableName, TableName]:
        """The place of the table that the stream shows, and what the table is called."""
        state = self.by_oid.get(relation.oid)
        if state is not None:
            return state.place, state.table
        named = self.open_names.get(relation.table)
        return free_place(relation.table, relation.oid, self.taken) if named is None else named, relation.table

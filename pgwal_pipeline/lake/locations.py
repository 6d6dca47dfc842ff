"""Where in the lake each table stands, whatever it is called: a table keeps its location when it is renamed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from pgwal_pipeline.lake.records import TableState
from pgwal_pipeline.values.relation import Relation, TableName


def free_location(table: TableName, oid: int, taken: Collection[TableName]) -> TableName:
    """The location of a table that is new: the one of its name or, where another table has that, one with its oid behind."""
    location = table
    while location in taken:
        location = TableName(location.schema, f"{location.name}_{oid}")
    return location


@dataclass(frozen=True, slots=True)
class Locations:
    """Which table of the stream belongs where, as the ledger knew the tables when the stream began to be read.

    `by_oid` are locations and names of the tables that are known, `left` the locations of names whose table has gone, where others of that
    name may stand; into the locations and names in `taken` nobody else's rows may come. `left_out` are the oids of tables whose changes raw
    does not take.
    """

    by_oid: Mapping[int, tuple[TableName, TableName]] = field(default_factory=dict)
    left: Mapping[TableName, TableName] = field(default_factory=dict)
    taken: Collection[TableName] = ()
    left_out: Collection[int] = ()

    @classmethod
    def of(cls, states: Mapping[TableName, TableState]) -> Self:
        """The locations of the tables as the ledger has them."""
        # Of two with one oid, one has gone and come back under another name.
        known = sorted((state for state in states.values() if state.oid), key=lambda state: state.followed)
        earlier = {oid: (state.location, state.table) for state in known for oid in state.earlier}
        return cls(
            by_oid=earlier | {state.oid: (state.location, state.table) for state in known},
            left={state.table: state.location for state in known if not state.followed},
            taken=frozenset([*(state.location for state in known), *(state.table for state in known if state.followed)]),
            left_out=frozenset(state.oid for state in known if state.left_out),
        )

    def find(self, relation: Relation) -> tuple[TableName, TableName]:
        """The location of the table that the stream shows, and what the table is called."""
        if relation.oid in self.by_oid:
            return self.by_oid[relation.oid]
        left = self.left.get(relation.table)
        return free_location(relation.table, relation.oid, self.taken) if left is None else left, relation.table

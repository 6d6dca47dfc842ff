"""Find each table's location in the lake. A table that is renamed keeps its location."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from pgwal_pipeline.lake.records import TableState
from pgwal_pipeline.values.relation import Relation, TableName


def free_location(table: TableName, oid: int, taken: Collection[TableName]) -> TableName:
    """Return the location for a new table: its name or, if another table has that location, its name with the oid appended."""
    location = table
    while location in taken:
        location = TableName(location.schema, f"{location.name}_{oid}")
    return location


@dataclass(frozen=True, slots=True)
class Locations:
    """The locations of the stream's tables, as the ledger had them when the stream was opened.

    `by_oid` has the location and name of each known table. `left` has, by name, the locations of tables that are no longer followed; a new
    table of that name takes the location over. A new table may not have a location or name in `taken`. `left_out` are the oids of tables
    whose changes raw does not take.
    """

    by_oid: Mapping[int, tuple[TableName, TableName]] = field(default_factory=dict)
    left: Mapping[TableName, TableName] = field(default_factory=dict)
    taken: Collection[TableName] = ()
    left_out: Collection[int] = ()

    @classmethod
    def of(cls, states: Mapping[TableName, TableState]) -> Self:
        """Return the locations of the tables in the ledger's `states`."""
        # If two states have one oid, that table was gone and came back under another name.
        known = sorted((state for state in states.values() if state.oid), key=lambda state: state.followed)
        earlier = {oid: (state.location, state.table) for state in known for oid in state.earlier}
        return cls(
            by_oid=earlier | {state.oid: (state.location, state.table) for state in known},
            left={state.table: state.location for state in known if not state.followed},
            taken=frozenset([*(state.location for state in known), *(state.table for state in known if state.followed)]),
            left_out=frozenset(state.oid for state in known if state.left_out),
        )

    def find(self, relation: Relation) -> tuple[TableName, TableName]:
        """Return the location of the table with this `relation`, and the table's name in the ledger."""
        if relation.oid in self.by_oid:
            return self.by_oid[relation.oid]
        left = self.left.get(relation.table)
        return free_location(relation.table, relation.oid, self.taken) if left is None else left, relation.table

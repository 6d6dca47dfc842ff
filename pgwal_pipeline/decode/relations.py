"""The definition of each table at each message of the stream: a Relation message holds until the next one for the same table."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.decode.ragged import UnreadableError
from pgwal_pipeline.decode.types import Target, change_schema, target_for
from pgwal_pipeline.decode.vectors import Ints
from pgwal_pipeline.messages.errors import TableWorkFailed
from pgwal_pipeline.values.protection import Protection
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline.values.table_options import EXCLUDED

Describe = Callable[[RelationMessage], Relation | None]
"""Returns the definition of the table that a Relation message describes; None for a table whose changes are not wanted.

The definition has the columns of the message but for those that the protection leaves out.
"""

_INDEX_BITS = 31  # of a message's index; with the 32 bits of an oid it makes one positive 64-bit number


@dataclass(frozen=True, slots=True)
class Layout:
    """What is needed to decode a table's rows.

    A row has `width` columns, of which those at `places` are wanted; `key` are the places of its key columns. `schema` is the schema of its
    changes.
    """

    relation: Relation
    targets: tuple[Target, ...]
    places: tuple[int, ...]
    width: int
    key: tuple[int, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, relation: Relation, places: tuple[int, ...], width: int, key: bytes) -> "Layout":
        """Return the layout of a table's changes, whose columns are at `places` of a row; `key` is the key of hashes."""
        names = relation.column_names
        targets = tuple(target_for(column, key) for column in relation.columns)
        return cls(relation, targets, places, width, tuple(places[names.index(name)] for name in relation.key), change_schema(relation))

    @property
    def protects(self) -> bool:
        """Whether a value of the stream's rows must not be shown or kept as it is."""
        return self.width > len(self.places) or self.relation.is_protected


class KnownRelations:
    """The tables that the stream has described, in versions. A version is one definition of one table, in force from some message on."""

    def __init__(self, describe: Describe, protection: Protection) -> None:
        self._describe = describe
        self._protection = protection
        self._latest: dict[int, Layout | None] = {}
        self._layouts: list[Layout | None] = []
        self._since = np.empty(0, np.int64)  # for each version its oid and the message from which it is in force, as one number
        self._settled = True  # every version is in force from the start of a batch
        self._widths = np.empty(0, np.int64)
        self._left_out: set[int] = set()

    def leave_out(self, oid: int) -> None:
        """Stop decoding the changes of a table, whatever the stream says of it later."""
        self._left_out.add(oid)
        self._latest[oid] = None
        self._settled = False

    def latest(self) -> dict[int, Layout | None]:
        """Return the newest version of each table by oid, for `restore`."""
        return dict(self._latest)

    def restore(self, latest: dict[int, Layout | None]) -> None:
        """Go back to what was known before a batch, so that it can be read again; tables left out since then stay left out."""
        self._latest = latest | dict.fromkeys(self._left_out)
        self._settled = False

    def relation(self, oid: int) -> Relation | None:
        """Return the newest definition of a table; None if there is none or its changes are not wanted."""
        layout = self._latest.get(oid)
        return None if layout is None else layout.relation

    def guards(self, oid: int) -> bool:
        """Return whether a table's messages must not be shown or kept, as a column of it is protected, or may be."""
        layout = self._latest.get(oid)
        return self._protection.options.protects if layout is None else layout.protects

    def learn(self, messages: dict[int, RelationMessage]) -> dict[int, Relation]:
        """Add the Relation messages of a batch, by their index in it; return the new or changed definitions by the same index.

        Versions that only earlier batches needed are dropped. Raises UnreadableError for a message with another number of columns than the
        definition, TableWorkFailed if the definition cannot be read or used.
        """
        if not messages and self._settled:
            return {}
        versions = {oid << _INDEX_BITS: layout for oid, layout in self._latest.items()}
        changed = {}
        for index, message in messages.items():
            relation = self._described(message)
            places = self._places(message)
            if relation is not None and len(relation.columns) != len(places):
                raise UnreadableError(index, f"it has {len(message.columns)} columns, the table's definition {len(relation.columns)}")
            known = self._latest.get(message.oid)
            if message.oid in self._latest and _same(relation, places, known):
                continue
            layout = None if relation is None else self._layout_of(relation, places, len(message.columns))
            self._latest[message.oid] = versions[message.oid << _INDEX_BITS | index] = layout
            if relation is not None:
                changed[index] = relation
        ordered = sorted(versions)
        self._layouts = [versions[since] for since in ordered]
        self._since = np.array(ordered, np.int64)
        self._settled = not messages
        self._widths = np.array([-1 if layout is None else layout.width for layout in self._layouts], np.int64)
        return changed

    def _described(self, message: RelationMessage) -> Relation | None:
        if message.oid in self._left_out:
            return None
        name = str(TableName(message.schema or "pg_catalog", message.name))
        try:
            failpoints.at("describe", name)
            return self._describe(message)
        except Exception as error:
            raise TableWorkFailed(message.oid, name, "describe") from error

    def _places(self, message: RelationMessage) -> tuple[int, ...]:
        """Return the places of the columns that are wanted of a row."""
        options = self._protection.options.of(TableName(message.schema or "pg_catalog", message.name))
        if not options.exclude:
            return tuple(range(len(message.columns)))
        return tuple(place for place, column in enumerate(message.columns) if options.treatment(column.name) != EXCLUDED)

    def _layout_of(self, relation: Relation, places: tuple[int, ...], width: int) -> Layout:
        try:
            return Layout.of(relation, places, width, self._protection.key)
        except Exception as error:
            raise TableWorkFailed(relation.oid, str(relation.table), "describe") from error

    def versions(self, oids: Ints, indices: Ints) -> Ints:
        """Return the version in force of each table at each message, by pairs. Raises UnreadableError for a table not described before."""
        found = np.searchsorted(self._since, oids << _INDEX_BITS | indices, "right") - 1
        unknown = (found < 0) | (self._since[found] >> _INDEX_BITS != oids) if len(self._since) else np.ones(len(oids), np.bool_)
        if unknown.any():
            index = int(unknown.argmax())
            raise UnreadableError(index, f"the table with oid {oids[index]} has not been described before")
        return found

    def layout(self, version: int) -> Layout:
        """Return the layout of a version, whose changes must be wanted."""
        layout = self._layouts[version]
        assert layout is not None
        return layout

    @property
    def widths(self) -> Ints:
        """The number of columns that a row of each version is sent with; -1 if the table's changes are not wanted."""
        return self._widths


def _same(relation: Relation | None, places: tuple[int, ...], known: Layout | None) -> bool:
    """Return whether a table is described as it is known."""
    if relation is None or known is None:
        return relation is None and known is None
    return relation == known.relation and places == known.places

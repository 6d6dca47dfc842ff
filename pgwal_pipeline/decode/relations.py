"""The tables of the stream as they are at each of its messages: a Relation message holds until the next one for the same table."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgwal_pipeline import failpoints
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.decode.ragged import UnreadableError
from pgwal_pipeline.decode.types import Target, change_schema, target_of
from pgwal_pipeline.decode.vectors import Ints
from pgwal_pipeline.errors import TableWorkFailed
from pgwal_pipeline.relation import Relation, TableName

Describe = Callable[[RelationMessage], Relation | None]
"""Turns what the stream says of a table into its definition; None for a table whose changes are not wanted."""

_INDEX_BITS = 31  # a message's index; an oid has 32 bits, so both make one positive 64-bit number


@dataclass(frozen=True, slots=True)
class Layout:
    """What decoding a table's rows takes. `key` are the indices of its key's columns; `schema` is that of its changes."""

    relation: Relation
    targets: tuple[Target, ...]
    key: tuple[int, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, relation: Relation) -> "Layout":
        """The layout of a table's changes."""
        names = relation.column_names
        targets = tuple(target_of(column.type) for column in relation.columns)
        return cls(relation, targets, tuple(names.index(name) for name in relation.key), change_schema(relation))


class KnownRelations:
    """The tables that the stream has described, in versions: a version is one definition of one table from some message of a run on."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self._latest: dict[int, Layout | None] = {}
        self._layouts: list[Layout | None] = []
        self._since = np.empty(0, np.int64)  # by oid and the message from which the version holds
        self._settled = True  # every version holds from the start of a run
        self._widths = np.empty(0, np.int64)
        self._left_out: set[int] = set()

    def leave_out(self, oid: int) -> None:
        """Have the changes of a table unwanted from here on, however it is described."""
        self._left_out.add(oid)
        self._latest[oid] = None
        self._settled = False

    def latest(self) -> dict[int, Layout | None]:
        """The newest version of each table, by oid: what `restore` takes."""
        return dict(self._latest)

    def restore(self, latest: dict[int, Layout | None]) -> None:
        """Go back to what was known before a run, so that it may be read again; tables left out meanwhile stay so."""
        self._latest = latest | dict.fromkeys(self._left_out)
        self._settled = False

    def relation(self, oid: int) -> Relation | None:
        """The newest definition of a table whose changes are wanted."""
        layout = self._latest.get(oid)
        return None if layout is None else layout.relation

    def learn(self, messages: dict[int, RelationMessage]) -> dict[int, Relation]:
        """Take in the Relation messages of a run, by their index in it; give the definitions that are new or changed, likewise.

        Versions that only earlier runs could need are forgotten. Raises UnreadableError for a message that its definition disagrees with,
        TableWorkFailed where a table's definition cannot be had or used.
        """
        if not messages and self._settled:
            return {}
        versions = {oid << _INDEX_BITS: layout for oid, layout in self._latest.items()}
        changed = {}
        for index, message in messages.items():
            relation = self._described(message)
            if relation is not None and len(relation.columns) != len(message.columns):
                raise UnreadableError(index, f"it has {len(message.columns)} columns, the table's definition {len(relation.columns)}")
            known = self._latest.get(message.oid)
            if message.oid in self._latest and relation == (known and known.relation):
                continue
            layout = None if relation is None else self._layout_of(relation)
            self._latest[message.oid] = versions[message.oid << _INDEX_BITS | index] = layout
            if relation is not None:
                changed[index] = relation
        ordered = sorted(versions)
        self._layouts = [versions[since] for since in ordered]
        self._since = np.array(ordered, np.int64)
        self._settled = not messages
        self._widths = np.array([-1 if layout is None else len(layout.targets) for layout in self._layouts], np.int64)
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

    @staticmethod
    def _layout_of(relation: Relation) -> Layout:
        try:
            return Layout.of(relation)
        except Exception as error:
            raise TableWorkFailed(relation.oid, str(relation.table), "describe") from error

    def versions(self, oids: Ints, indices: Ints) -> Ints:
        """The version in force for a table at a message, for each pair. Raises UnreadableError for a table not described before."""
        found = np.searchsorted(self._since, oids << _INDEX_BITS | indices, "right") - 1
        unknown = (found < 0) | (self._since[found] >> _INDEX_BITS != oids) if len(self._since) else np.ones(len(oids), np.bool_)
        if unknown.any():
            index = int(unknown.argmax())
            raise UnreadableError(index, f"the table with oid {oids[index]} has not been described before")
        return found

    def layout(self, version: int) -> Layout:
        """What decoding rows of a version takes; it must be wanted."""
        layout = self._layouts[version]
        assert layout is not None
        return layout

    @property
    def widths(self) -> Ints:
        """How many columns each version has; -1 where the table's changes are not wanted."""
        return self._widths

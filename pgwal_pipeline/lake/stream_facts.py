"""Stream facts: what a window's stream told of the tables besides their rows, with its merge and its JSON form in the ledger."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pgwal_pipeline.lake.records import Window, relation_from_json, relation_to_json
from pgwal_pipeline.values.relation import Relation

_VERSION = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a window has no changes of a table: its oid, the stage that failed, the error's message, and the LSN where the gap begins."""

    oid: int
    stage: str
    reason: str
    lsn: int


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What the stream told of the tables besides their rows.

    `relations`: a table's definitions by its oid, in the order in which each came last. `truncated`: the 32-bit xids of the transactions
    that truncated a table, by its oid. `refilled`: the oids of tables that one transaction both truncated and wrote rows to. `partitions`:
    the oids of partitions whose rows came as rows of a table, by the table's oid. `lacking`: the oids of tables with an insert that left
    out values. `refused`: the tables that the window had to leave out, by their locations.
    """

    relations: Mapping[int, tuple[Relation, ...]] = field(default_factory=dict)
    truncated: Mapping[int, frozenset[int]] = field(default_factory=dict)
    refilled: frozenset[int] = frozenset()
    partitions: Mapping[int, frozenset[int]] = field(default_factory=dict)
    lacking: frozenset[int] = frozenset()
    refused: Mapping[str, Refusal] = field(default_factory=dict)

    @classmethod
    def merged(cls, parts: Iterable["StreamFacts"]) -> "StreamFacts":
        """Merge the facts of windows that follow one another, given in their order."""
        relations: dict[int, tuple[Relation, ...]] = {}
        truncated: dict[int, frozenset[int]] = {}
        partitions: dict[int, frozenset[int]] = {}
        refilled, lacking = frozenset[int](), frozenset[int]()
        refused: dict[str, Refusal] = {}
        for part in parts:
            for oid, versions in part.relations.items():
                relations[oid] = relations.get(oid, ()) + versions
            for known, told in ((truncated, part.truncated), (partitions, part.partitions)):
                for oid, numbers in told.items():
                    known[oid] = known.get(oid, frozenset()) | numbers
            refilled |= part.refilled
            lacking |= part.lacking
            refused = {**part.refused, **refused}  # the earliest refusal has the LSN where the gap begins
        return cls(relations, truncated, refilled, partitions, lacking, refused)

    def to_json(self) -> str:
        """Return the facts as JSON text for `from_json`."""
        return json.dumps(
            {
                "version": _VERSION,
                "relations": [relation_to_json(relation) for versions in self.relations.values() for relation in versions],
                "truncated": {str(oid): sorted(xids) for oid, xids in self.truncated.items()},
                "refilled": sorted(self.refilled),
                "partitions": {str(oid): sorted(oids) for oid, oids in self.partitions.items()},
                "lacking": sorted(self.lacking),
                "refused": {location: asdict(refusal) for location, refusal in self.refused.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "StreamFacts":
        """Return the facts from the JSON text of `to_json`, also of an earlier version."""
        found: dict[str, Any] = json.loads(text)
        relations: dict[int, tuple[Relation, ...]] = {}
        for relation in map(relation_from_json, found["relations"]):
            relations[relation.oid] = (*relations.get(relation.oid, ()), relation)
        return cls(
            relations,
            _by_oid(found["truncated"]),
            frozenset(found.get("refilled", ())),
            _by_oid(found.get("partitions", {})),
            frozenset(found.get("lacking", ())),
            {location: _refusal(refusal) for location, refusal in found["refused"].items()},
        )


@dataclass(frozen=True, slots=True)
class Read:
    """A window of a plan that has been read: its files are durable but not committed yet. With it the facts that its stream told."""

    window: Window
    facts: StreamFacts


def _by_oid(found: Mapping[str, Iterable[int]]) -> dict[int, frozenset[int]]:
    return {int(oid): frozenset(numbers) for oid, numbers in found.items()}


def _refusal(found: Any) -> Refusal:
    if isinstance(found, list):  # the first version: oid and reason
        return Refusal(found[0], "write", found[1], 0)
    return Refusal(**found)

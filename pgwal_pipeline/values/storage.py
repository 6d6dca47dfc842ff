"""How a table is stored: what its rows depend on but the stream does not tell.

A Relation message has names and types alone. A column that was dropped and made again, a default that old rows carry without being written,
a rewrite, a partition that came with rows in it: all of them show here, and only here. `postgres.storage` reads it from the catalog.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_VERSION = 2


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column as it is stored. `number` is its attnum, never used twice; `type_oid` its declared type.

    `default_of_old`: rows written before the column was added have a value that is kept in the catalog (`atthasmissing`).
    """

    number: int
    name: str
    type_oid: int
    default_of_old: bool


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A table or leaf partition with rows of its own: its relfilenode, and the transaction (32 bits) that last wrote its pg_class row.

    `attached` are the transactions that attached it, or a partition that it is part of: those that were made before they became partitions,
    or may have been, so that they may have brought rows with them. `altered`: a column of the table was altered by the transaction that
    last wrote the pg_class row, or by a later one.
    """

    oid: int
    node: int
    xid: int
    attached: tuple[int, ...] = ()
    altered: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """How a table is stored and published.

    `membership` are the ids of what puts the table into the publication, and the transaction that last altered the publication: where they
    differ, changes may have gone by unpublished. `shown` are the columns that the table had, in their order, where the stream has been read
    up to; none while that is not known.
    """

    columns: tuple[StoredColumn, ...]
    files: tuple[StoredFile, ...]
    membership: tuple[int, ...]
    shown: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write it as compact JSON, with the version of its form."""
        found = {
            "version": _VERSION,
            "columns": [[column.number, column.name, column.type_oid, column.default_of_old] for column in self.columns],
            "files": [[file.oid, file.node, file.xid, file.attached, file.altered] for file in self.files],
            "membership": self.membership,
            "shown": self.shown,
        }
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Storage":
        """Read what `to_json` wrote, or the text of the first version: a list of the same without names."""
        found = json.loads(text)
        if isinstance(found, list):
            found = dict(zip(("columns", "files", "membership", "shown"), found, strict=False))
        return cls(
            columns=tuple(StoredColumn(*column) for column in found["columns"]),
            files=tuple(map(stored_file, found["files"])),
            membership=tuple(found["membership"]),
            shown=tuple(found.get("shown", ())),
        )


def stored_file(found: Sequence[Any]) -> StoredFile:
    """Make a file of its fields in their order; those that an earlier version lacked may be missing at the end."""
    oid, node, xid, attached, *altered = found
    return StoredFile(oid, node, xid, tuple(attached) if isinstance(attached, list) else (), *altered)

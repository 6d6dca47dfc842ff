"""How a table is stored in Postgres: facts that its rows depend on and the stream does not tell.

A Relation message has only names and types. A column that was dropped and added again, a default that old rows have without being
rewritten, a rewrite, a partition attached with rows in it: these show only here. `postgres.storage` reads this from the catalog.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_VERSION = 2


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column as it is stored. `number` is its attnum, which is never used again; `type_oid` is its declared type.

    `default_of_old`: rows from before the column was added have a value that only the catalog has (`atthasmissing`).
    """

    number: int
    name: str
    type_oid: int
    default_of_old: bool


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A table or leaf partition with rows of its own. `node` is its relfilenode, `xid` the transaction that last wrote its pg_class row.

    Xids have 32 bits. `attached` are the transactions that attached it, or a partition that contains it, if that existed (or may have
    existed) before it became a partition, so that it may have brought rows with it. `altered`: a column of the table was altered by the
    transaction that last wrote the pg_class row, or by a later one.
    """

    oid: int
    node: int
    xid: int
    attached: tuple[int, ...] = ()
    altered: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """How a table is stored and published.

    `membership` are the ids of the catalog rows that put the table into the publication, and the transaction that last altered the
    publication: if they differ from before, changes may not have been published. `shown` are the table's columns, in their order, at the
    LSN up to which the stream has been read; empty if unknown.
    """

    columns: tuple[StoredColumn, ...]
    files: tuple[StoredFile, ...]
    membership: tuple[int, ...]
    shown: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return it as compact JSON with the version of the format."""
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
        """Read the JSON of `to_json`, or of the first version, which was a list of the same values without names."""
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
    """Return a StoredFile from its fields in their order. Fields that an earlier version lacked may be missing at the end."""
    oid, node, xid, attached, *altered = found
    return StoredFile(oid, node, xid, tuple(attached) if isinstance(attached, list) else (), *altered)

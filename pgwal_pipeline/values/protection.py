"""What the options make of a table's definition: the columns that are left out, and those of which only a hash or a mask arrives.

A protected column keeps its type, which says how Postgres writes its values; what arrives is a string. How a column is protected is written
as `hash:` with the fingerprint of the key, or as `mask:` with the mask.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pgwal_pipeline.values.relation import Column, Relation, TableName
from pgwal_pipeline.values.table_options import EXCLUDED, HASHED, TableOptions

_FINGERPRINT = b"pgwal_pipeline fingerprint of a key"
_HASH, _MASK = "hash:", "mask:"


@dataclass(frozen=True)
class Protection:
    """How the columns of all tables are protected. `key` is the key of hashes; it is in no text of this object."""

    options: TableOptions = field(default_factory=TableOptions)
    key: bytes = field(default=b"", repr=False)

    @property
    def fingerprint(self) -> str:
        """What tells the key from others, and from which it cannot be found."""
        return hmac.digest(self.key, _FINGERPRINT, hashlib.sha256).hex()[:16]

    def of(self, table: TableName, column: str) -> str | None:
        """Return how a column is protected, EXCLUDED if it is left out, None if it arrives as it is."""
        treatment = self.options.of(table).treatment(column)
        if treatment is None or treatment == EXCLUDED:
            return treatment
        return f"{_HASH}{self.fingerprint}" if treatment == HASHED else f"{_MASK}{treatment}"

    def relation(self, relation: Relation) -> Relation:
        """Return the table's definition without excluded columns, and with the protection of the others."""
        if not self.options.of(relation.table).protects:
            return relation
        found = [(column, self.of(relation.table, column.name)) for column in relation.columns]
        return replace(
            relation, columns=tuple(replace(column, protection=how) if how else column for column, how in found if how != EXCLUDED)
        )

    def misused(self, relation: Relation) -> str | None:
        """Return why the options do not fit a table, given as the source has it, as a sentence's rest after its name; None if they do."""
        if not self.options.of(relation.table).protects:
            return None
        for name in relation.key:
            how = self.of(relation.table, name)
            if how is not None and not is_hashed(how):
                what = "excluded" if how == EXCLUDED else "masked"
                return f"cannot have its column {name!r} {what}, as it is part of the key that tells rows apart; hash it instead"
        if relation.columns and not self.relation(relation).columns:
            return "cannot have all of its columns excluded; leave it out of PGWAL_TABLES instead"
        return None


def is_hashed(protection: str | None) -> bool:
    """Return whether a column's protection is a hash."""
    return protection is not None and protection.startswith(_HASH)


def mask_of(protection: str) -> str | None:
    """Return the mask of a column's protection, None if it is a hash."""
    return protection.removeprefix(_MASK) if protection.startswith(_MASK) else None


def other_key(columns: Iterable[Column], fingerprint: str) -> bool:
    """Return whether a column was hashed with another key than the one of this fingerprint."""
    return any(is_hashed(column.protection) and column.protection != f"{_HASH}{fingerprint}" for column in columns)


NO_PROTECTION = Protection()

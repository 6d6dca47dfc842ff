"""The options of tables: which columns must not arrive as they are, and which rows are wanted.

They are parsed once, from the mapping that PGWAL_TABLE_OPTIONS holds. Keys are `schema.table` globs. Where several match a table, the later
one wins, option by option.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from pgwal_pipeline.values.globs import TABLE_GLOBS, matcher, name_matches
from pgwal_pipeline.values.relation import TableName

MASKS = ("last4",)
"""The masks that `mask` takes."""

DROP, KEEP = "drop", "keep"
"""What becomes of deleted rows: `current` loses them, or keeps them with when they were deleted."""

HISTORIES = (True, "every_change")
"""What `history` takes besides False."""

EXCLUDED, HASHED = "exclude", "hash"
"""What becomes of a column that is left out, or hashed; one that is masked has the name of its mask."""

PROPAGATE, FREEZE, STOP = "propagate", "freeze", "stop"
"""What a change of a table's columns leads to: they are taken, `current` keeps those it had, or the table waits to be accepted."""

POLICIES = (PROPAGATE, FREEZE, STOP)

_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*\"""")


_WILD = re.compile(r"[*?\[]")


class OptionError(ValueError):
    """Options that cannot be used; the message is the rest of a sentence that begins with where they are from."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one table.

    `exclude` and `hash` are globs of columns, `mask` pairs of a glob and a mask. `rows` is the SQL condition of the rows that are wanted,
    None for all. `deletes` is KEEP, or None for DROP. `history` is None or one of HISTORIES: whether versions of rows are kept, and with
    `every_change` also those that ended in the transaction in which they began. `on_schema_change` is one of POLICIES.
    """

    exclude: tuple[str, ...] = ()
    hash: tuple[str, ...] = ()
    mask: tuple[tuple[str, str], ...] = ()
    rows: str | None = None
    deletes: str | None = None
    history: bool | str | None = None
    on_schema_change: str = PROPAGATE

    def treatment(self, column: str) -> str | None:
        """Return what becomes of a column: EXCLUDED, HASHED, a mask, or None if it arrives as it is. The strictest option counts."""
        if any(name_matches(column, glob) for glob in self.exclude):
            return EXCLUDED
        if any(name_matches(column, glob) for glob in self.hash):
            return HASHED
        return next((mask for glob, mask in reversed(self.mask) if name_matches(column, glob)), None)

    @property
    def keeps_deleted(self) -> bool:
        """Whether `current` keeps deleted rows."""
        return self.deletes == KEEP

    @property
    def protects(self) -> bool:
        """Whether the options may keep a column from arriving as it is."""
        return bool(self.exclude or self.hash or self.mask)

    def to_text(self) -> str | None:
        """Return the options that are set as JSON, None if there are none."""
        return json.dumps(self.to_json(), ensure_ascii=False, sort_keys=True) if self != NOTHING else None

    def to_json(self) -> dict[str, Any]:
        """Return the options that are set, as they are written."""
        written = {
            "exclude": list(self.exclude),
            "hash": list(self.hash),
            "mask": dict(self.mask),
            "rows": self.rows,
            "deletes": self.deletes,
            "history": self.history,
            "on_schema_change": None if self.on_schema_change == PROPAGATE else self.on_schema_change,
        }
        return {name: value for name, value in written.items() if value}


NOTHING = Options()


@dataclass(frozen=True)
class TableOptions:
    """The options of all tables: for each glob, in their order, the options that were written for it."""

    rules: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    def of(self, table: TableName) -> Options:
        """Return the options of a table."""
        return _options_of(self.rules, table) if self.rules else NOTHING

    def named(self, table: TableName) -> Iterable[str]:
        """Return the columns that options name for this table alone, neither by a glob of tables nor by one of columns."""
        for glob, given in self.rules:
            if not _WILD.search(glob) and matcher(glob)(table):
                for option, names in given:
                    if option in ("exclude", "hash", "mask"):
                        yield from (name for name in dict.fromkeys(_names(names)) if not _WILD.search(name) and not name.startswith('"'))

    @property
    def hashes(self) -> bool:
        """Whether any table may have hashed columns."""
        return any(name == "hash" and value for _, given in self.rules for name, value in given)

    @property
    def protects(self) -> bool:
        """Whether any table may have a column that must not arrive as it is."""
        return any(name in ("exclude", "hash", "mask") and value for _, given in self.rules for name, value in given)

    def to_json(self) -> str:
        """Return the options as JSON, from which `parse_options` makes the same."""
        return json.dumps({glob: {name: dict(value) if name == "mask" else value for name, value in given} for glob, given in self.rules})


@lru_cache(maxsize=16384)
def _options_of(rules: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...], table: TableName) -> Options:
    given: dict[str, Any] = {}
    for glob, options in rules:
        if matcher(glob)(table):
            given |= dict(options)
    return Options(**given)


def parse_options(found: object) -> TableOptions:
    """Return the options that a mapping of table globs holds, as YAML or JSON gives it. Raises OptionError."""
    if found is None:
        return TableOptions()
    if not isinstance(found, Mapping):
        raise OptionError("is no mapping from tables to their options")
    return TableOptions(tuple((_table_glob(glob), tuple(_parsed(str(glob), options))) for glob, options in found.items()))


def _names(given: Iterable[Any]) -> Iterable[str]:
    return (item if isinstance(item, str) else item[0] for item in given)


def _table_glob(glob: object) -> str:
    if not isinstance(glob, str) or not TABLE_GLOBS.fullmatch(glob.strip()) or not glob.strip().isprintable():
        raise OptionError(f"has the key {glob!r}, which is no schema.table glob such as shop.* or public.orders")
    return glob.strip()


def _parsed(glob: str, options: object) -> Iterable[tuple[str, Any]]:
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise OptionError(f"has no mapping of options for {glob}")
    for name, value in options.items():
        if name in ("exclude", "hash"):
            yield name, _globs(glob, name, value)
        elif name == "mask":
            yield name, _masks(glob, value)
        elif name == "rows":
            yield name, _condition(glob, value)
        elif name == "deletes":
            if value not in (DROP, KEEP, None):
                raise OptionError(f"gives {glob} the option deletes, which takes {DROP} or {KEEP}")
            yield name, KEEP if value == KEEP else None
        elif name == "history":
            yield name, _history(glob, value)
        elif name == "on_schema_change":
            yield name, _policy(glob, value)
        else:
            known = ", ".join([option.name for option in fields(Options)])
            raise OptionError(f"gives {glob} the option {name!r}, which there is not; options are {known}")


def _globs(table: str, option: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(glob, str) and glob for glob in value):
        raise OptionError(f"gives {table} the option {option}, which takes a list of columns or of globs of columns")
    return tuple(value)


def _masks(table: str, value: object) -> tuple[tuple[str, str], ...]:
    right = isinstance(value, Mapping) and all(isinstance(glob, str) and glob and mask in MASKS for glob, mask in value.items())
    if not right:
        raise OptionError(f"gives {table} the option mask, which takes columns or globs of columns, each with {' or '.join(MASKS)}")
    assert isinstance(value, Mapping)
    return tuple(value.items())


def _condition(table: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or "\0" in value or ";" in _QUOTED.sub("", value):
        raise OptionError(f"gives {table} the option rows, which takes one SQL condition such as country = 'CH'")
    return value.strip()


def _history(table: str, value: object) -> bool | str | None:
    if value is None or value is False:
        return None
    if not isinstance(value, bool | str) or value not in HISTORIES:
        raise OptionError(f"gives {table} the option history: {_shown(value)}, which takes true, false or every_change")
    return value


def _policy(table: str, value: object) -> str:
    if value is None:
        return PROPAGATE
    if not isinstance(value, str) or value not in POLICIES:
        raise OptionError(f"gives {table} the option on_schema_change, which takes {', '.join(POLICIES[:-1])} or {POLICIES[-1]}")
    return value


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]

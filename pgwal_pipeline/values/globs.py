"""Globs of names: `*`, `?` and `[…]` as in a shell, matched with the names as the catalog has them; text in double quotes is literal."""

import fnmatch
import glob
import re
from collections.abc import Callable, Iterable

from pgwal_pipeline.values.relation import TableName

TABLE_GLOBS = re.compile(r"[^.]+\..+")
"""What each part of a list of table globs must match as a whole: a schema, a period and a name."""


def matcher(globs: str) -> Callable[[TableName], bool]:
    """Return a function that says whether `globs` (as in PGWAL_TABLES) match a table."""
    patterns = [_parts(part) for part in _split(globs)]

    def matches(table: TableName) -> bool:
        return any(fnmatch.fnmatchcase(table.schema, schema) and fnmatch.fnmatchcase(table.name, name) for schema, name in patterns)

    return matches


def name_matches(name: str, pattern: str) -> bool:
    """Return whether the glob of a single name, such as that of a column, matches."""
    return fnmatch.fnmatchcase(name, _unquoted(pattern))


def _split(globs: str) -> Iterable[str]:
    """Split a list of globs; a comma inside double quotes is part of a name."""
    return (part.strip() for part in re.findall(r'(?:"(?:[^"]|"")*"|[^",])+', globs) if part.strip())


def _parts(pattern: str) -> tuple[str, str]:
    match = re.fullmatch(r'("(?:[^"]|"")*"|[^."]+)\.(.+)', pattern, re.DOTALL)
    if match is None:
        return pattern, "*"
    schema, name = map(_unquoted, match.groups())
    return schema, name


def _unquoted(part: str) -> str:
    return glob.escape(part[1:-1].replace('""', '"')) if re.fullmatch(r'".*"', part, re.DOTALL) else part

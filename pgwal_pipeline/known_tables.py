"""The list of the source's tables for Dagster's definitions, kept so that they load while the source is down.

The code server asks the source each time it loads and writes the answer to a file under DAGSTER_HOME, one for each source and publication.
It reads that file when the source is down. Nothing is written into the package's folder.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import PgType, Relation, TableName

CONNECT_TIMEOUT = 5  # seconds; a code location must not wait long for a source that is down
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class KnownColumn:
    """A column, with its type as Postgres shows it (`numeric(10,2)`) and as Delta does (`decimal(10,2)`), and its COMMENT."""

    name: str
    type: str
    lake_type: str
    nullable: bool = True
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table that is published, or will be.

    `key` is empty if the table has none. `kept_as` is its location in the lake, None if that is its name. `comment` is its COMMENT.
    """

    table: TableName
    columns: tuple[KnownColumn, ...]
    key: tuple[str, ...] = ()
    kept_as: TableName | None = None
    oid: int = 0
    comment: str | None = None

    @property
    def location(self) -> TableName:
        """Its location: the name of its Delta tables in the lake."""
        return self.kept_as or self.table


def fetch(settings: Settings) -> tuple[KnownTable, ...]:
    """Read the tables of the publication, and those that our publication would take in, from the source; ordered by name.

    Raises SettingError if no source is named, SourceUnavailable and SourceRefused as `connect` does.
    """
    from pgwal_pipeline.postgres.dsn import connect
    from pgwal_pipeline.postgres.followed import comments, followed_tables

    with connect(settings.dsn, application="pgwal definitions", connect_timeout=CONNECT_TIMEOUT) as conn:
        found = followed_tables(conn, settings.publication, settings.tables)
        relations = [settings.protection.relation(relation) for relation in found]
        said = comments(conn, [relation.oid for relation in relations])
        return tuple(known(relation, said.get(relation.oid, {})) for relation in relations)


def known(relation: Relation, comments: Mapping[str | None, str]) -> KnownTable:
    """Return what the definitions keep of a table, with the comments of its columns, and under None its own."""
    columns = tuple(
        KnownColumn(
            column.name,
            column.type.name,
            "string" if column.protection is not None else _lake_type(column.type),
            column.nullable,
            comments.get(column.name),
        )
        for column in relation.columns
    )
    return KnownTable(relation.table, columns, relation.key, oid=relation.oid, comment=comments.get(None))


def _lake_type(declared: PgType) -> str:
    from pgwal_pipeline.decode.types import arrow_type

    return _delta_name(str(arrow_type(declared)))


_DELTA_NAMES = {
    "bool": "boolean",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "halffloat": "float",
    "float": "float",
    "double": "double",
    "date32[day]": "date",
    "timestamp[us]": "timestamp_ntz",
    "timestamp[us, tz=UTC]": "timestamp",
}


def _delta_name(arrow: str) -> str:
    """Return the name that Delta's schema gives an Arrow type."""
    if arrow.startswith(("list<", "large_list<")):
        element = re.fullmatch(r"(?:large_)?list<\w+: (.*?)(?: not null)?>", arrow)
        return f"array<{_delta_name(element[1]) if element else '?'}>"
    if arrow.startswith("decimal"):
        return re.sub(r"decimal\d+\((\d+), (\d+)\)", r"decimal(\1,\2)", arrow)
    if arrow.startswith(("string", "large_string")):
        return "string"
    if arrow.startswith(("binary", "large_binary")):
        return "binary"
    return _DELTA_NAMES.get(arrow, arrow)


def state_path(settings: Settings) -> Path:
    """Return the file for the tables of this source and publication. Raises SettingError if no source is named or the DSN is invalid."""
    from pgwal_pipeline.postgres.dsn import describe_dsn

    source = hashlib.sha256(f"{describe_dsn(settings.dsn)}\0{settings.publication}".encode()).hexdigest()[:16]
    name = re.sub(r"[^a-z0-9_]", "-", settings.publication.lower())[:40]
    return _home() / "pgwal" / f"tables-{name}-{source}.json"


def _home() -> Path:
    return Path(os.environ.get("DAGSTER_HOME") or ".dagster").expanduser().absolute()


def refresh(settings: Settings, locations: Mapping[int, TableName] | None = None) -> tuple[KnownTable, ...]:
    """Fetch the tables from the source, write them to the state file and return them. Raises as `fetch` does.

    `locations` are the tables' locations in the lake by oid, which the source does not know. Without it each table keeps the location that
    the last `refresh` wrote. A file that cannot be written, as in a container whose DAGSTER_HOME is read-only, is only missing when the
    source is down.
    """
    tables = _placed(fetch(settings), locations or {known.oid: known.location for known in remembered(settings)})
    path = state_path(settings)
    text = dump(tables)
    with suppress(OSError):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{platform.node()}.{os.getpid()}")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    return tables


def _placed(tables: Iterable[KnownTable], locations: Mapping[int, TableName]) -> tuple[KnownTable, ...]:
    from pgwal_pipeline.lake.locations import free_location

    found, taken = [], set(locations.values())
    for known in tables:
        location = locations.get(known.oid) or free_location(known.table, known.oid, taken)
        found.append(replace(known, kept_as=None if location == known.table else location))
    return tuple(found)


def remembered(settings: Settings) -> tuple[KnownTable, ...]:
    """Return the tables that the last `refresh` wrote; empty if there was none or its file cannot be read. Raises SettingError."""
    try:
        return load(state_path(settings).read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError):
        return ()


def dump(tables: Iterable[KnownTable]) -> str:
    """Return the tables as text for `load`."""
    rows = [
        {
            "schema": known.table.schema,
            "name": known.table.name,
            "key": list(known.key),
            "kept_as": known.kept_as and [known.kept_as.schema, known.kept_as.name],
            "oid": known.oid,
            # Apart from the columns, of which an earlier version takes no other fields.
            "comment": known.comment,
            "comments": {column.name: column.comment for column in known.columns if column.comment is not None},
            "columns": [{name: value for name, value in asdict(column).items() if name != "comment"} for column in known.columns],
        }
        for known in tables
    ]
    return json.dumps({"format": _FORMAT, "tables": rows}, indent=1)


def load(text: str) -> tuple[KnownTable, ...]:
    """Return the tables from the text that `dump` wrote. Raises ValueError for the text of another version."""
    state: dict[str, Any] = json.loads(text)
    if state.get("format") != _FORMAT:
        raise ValueError(f"the tables' state has format {state.get('format')}, not {_FORMAT}")
    return tuple(
        KnownTable(
            TableName(row["schema"], row["name"]),
            tuple(KnownColumn(**column, comment=row.get("comments", {}).get(column["name"])) for column in row["columns"]),
            tuple(row["key"]),
            TableName(*row["kept_as"]) if row.get("kept_as") else None,
            row.get("oid", 0),
            row.get("comment"),
        )
        for row in state["tables"]
    )

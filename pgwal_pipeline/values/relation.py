"""A table as the whole pipeline sees it: its name, its columns with their types, and the key that identifies its rows."""

import re
from dataclasses import dataclass, field
from typing import Literal

# Keywords that quote_ident quotes: all categories of pg_get_keywords() except "unreserved", as of Postgres 18.
_KEYWORDS = frozenset(
    """all analyse analyze and any array as asc asymmetric authorization between bigint binary bit boolean both case cast char character
    check coalesce collate collation column concurrently constraint create cross current_catalog current_date current_role current_schema
    current_time current_timestamp current_user dec decimal default deferrable desc distinct do else end except exists extract false fetch
    float for foreign freeze from full grant greatest group grouping having ilike in initially inner inout int integer intersect interval
    into is isnull join json json_array json_arrayagg json_exists json_object json_objectagg json_query json_scalar json_serialize
    json_table json_value lateral leading least left like limit localtime localtimestamp merge_action national natural nchar none normalize
    not notnull null nullif numeric offset on only or order out outer overlaps overlay placing position precision primary real references
    returning right row select session_user setof similar smallint some substring symmetric system_user table tablesample then time
    timestamp to trailing treat trim true union unique user using values varchar variadic verbose when where window with xmlattributes
    xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable""".split()
)
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*\Z")
_QUALIFIED = re.compile(r'(?:"((?:[^"]|"")+)"|([^".]+))\.(?:"((?:[^"]|"")+)"|([^".]+))\Z', re.DOTALL)


def quote_ident(name: str) -> str:
    """Return `name` as Postgres's quote_ident writes it."""
    if _PLAIN.match(name) and name not in _KEYWORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table's schema and name, as in the catalog. `str()` quotes each part as quote_ident does."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{quote_ident(self.schema)}.{quote_ident(self.name)}"

    @classmethod
    def parse(cls, text: str) -> "TableName":
        """Read `schema.table`, each part quoted or not; unquoted parts fold to lower case as in SQL. Raises ValueError."""
        match = _QUALIFIED.match(text.strip())
        if match is None:
            raise ValueError(f'{text!r} is not a table\'s name; write schema.table, quoted where needed: public."Order Lines"')
        quoted_schema, schema, quoted_name, name = match.groups()
        return cls(
            quoted_schema.replace('""', '"') if quoted_schema else schema.lower(),
            quoted_name.replace('""', '"') if quoted_name else name.lower(),
        )


@dataclass(frozen=True, slots=True)
class PgType:
    """A column's type, with domains resolved to their base types.

    `oid` and `typmod` are those of the base type (`typmod` -1 if it has none). `element` is the element type of an array. `name` is the
    declared type as `format_type` shows it, for people. `delimiter` (typdelim) separates values of this type in the text of an array: a
    comma, except for box and a few extensions' types.
    """

    oid: int
    typmod: int
    name: str
    element: "PgType | None" = None
    delimiter: str = ","


@dataclass(frozen=True, slots=True)
class Column:
    """A published column. `identity`: whether it is part of the replica identity, so that old rows have its value.

    `protection` says how its values are protected before anything is written (`values.protection`); None if they arrive as they are.
    """

    name: str
    type: PgType
    identity: bool = False
    nullable: bool = True
    protection: str | None = None


ReplicaIdentity = Literal["d", "n", "f", "i"]


@dataclass(frozen=True, slots=True)
class Relation:
    """A published table as of some position in the stream.

    `key` names the columns that identify a row of `current`: the primary key, or the index of the replica identity. It is empty for a table
    with replica identity full and no primary key, which is a bag of rows, and for an insert-only table.
    """

    oid: int
    table: TableName
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    key: tuple[str, ...] = field(default=())

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def hides_key(self) -> bool:
        """Whether the values of a key column are protected, so that the source's own must not be written anywhere."""
        return any(column.protection is not None and column.name in self.key for column in self.columns)

    @property
    def is_protected(self) -> bool:
        """Whether the values of some column here are protected. Columns that are left out do not show here."""
        return any(column.protection is not None for column in self.columns)

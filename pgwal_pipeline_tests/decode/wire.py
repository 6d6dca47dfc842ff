"""Messages as a server sends them, put together byte by byte for the tests; knows nothing of the decoder."""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from pgwal_pipeline.decode.batch import decode_copy
from pgwal_pipeline.decode.pgoutput import RelationMessage
from pgwal_pipeline.values.relation import Column, PgType, Relation, ReplicaIdentity, TableName

BOOL, BYTEA, CHAR, NAME, INT8, INT2, INT4, TEXT, OID = (
    PgType(oid, -1, name)
    for oid, name in [
        (16, "boolean"),
        (17, "bytea"),
        (18, '"char"'),
        (19, "name"),
        (20, "bigint"),
        (21, "smallint"),
        (23, "integer"),
        (25, "text"),
        (26, "oid"),
    ]
)
FLOAT4, FLOAT8, DATE, TIMESTAMP, TIMESTAMPTZ, MONEY, UUID, JSONB, BOX = (
    PgType(oid, -1, name)
    for oid, name in [
        (700, "real"),
        (701, "double precision"),
        (1082, "date"),
        (1114, "timestamp without time zone"),
        (1184, "timestamp with time zone"),
        (790, "money"),
        (2950, "uuid"),
        (3802, "jsonb"),
        (603, "box"),
    ]
)
_ARRAYS = {16: 1000, 17: 1001, 20: 1016, 21: 1005, 23: 1007, 25: 1009, 603: 1020, 701: 1022, 1082: 1182, 1184: 1185, 1700: 1231}

Value = str | bytes | None | Literal[False]
"""A column as it is sent: its text, null, or (False) an unchanged TOASTed value that is not sent."""

UNCHANGED: Literal[False] = False


def numeric(precision: int | None = None, scale: int = 0) -> PgType:
    typmod = -1 if precision is None else (precision << 16 | (scale & 0x7FF)) + 4
    return PgType(1700, typmod, "numeric" if precision is None else f"numeric({precision},{scale})")


def array_of(element: PgType) -> PgType:
    return PgType(_ARRAYS.get(element.oid, 99_999), element.typmod, f"{element.name}[]", element)


def table(
    name: str, columns: dict[str, PgType], *, key: Sequence[str] | None = None, identity: ReplicaIdentity = "d", oid: int | None = None
) -> Relation:
    """A table of the schema `shop`; its key is its first column unless `key` says otherwise."""
    key = tuple(columns)[:1] if key is None else tuple(key)
    made = tuple(Column(column, declared, identity=identity == "f" or column in key) for column, declared in columns.items())
    return Relation(oid or 16_384 + sum(name.encode()), TableName("shop", name), identity, made, key)


def describe_from(*relations: Relation):
    """A `describe` that finds the definition by oid and column names, as a catalog would."""

    def describe(message: RelationMessage) -> Relation:
        names = tuple(column.name for column in message.columns)
        return next(relation for relation in relations if relation.oid == message.oid and relation.column_names == names)

    return describe


def _cell(value: Value) -> bytes:
    if value is None:
        return b"n"
    if value is False:
        return b"u"
    octets = value.encode() if isinstance(value, str) else value
    return b"t" + struct.pack(">i", len(octets)) + octets


def row(values: Sequence[Value]) -> bytes:
    return struct.pack(">H", len(values)) + b"".join(map(_cell, values))


@dataclass
class Wire:
    """Collects messages. The WAL position goes up with every message; xids count from 700."""

    messages: list[bytes] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lsn: int = 0x1_0000_1000
    xid: int = 699
    _commit_lsn: int = 0
    _committed_at: int = 0

    def add(self, payload: bytes, lsn: int | None = None) -> "Wire":
        self.lsn += 0x40
        self.messages.append(payload)
        self.positions.append(self.lsn if lsn is None else lsn)
        return self

    def relation(self, relation: Relation) -> "Wire":
        columns = b"".join(
            struct.pack(">B", column.identity) + column.name.encode() + b"\0" + struct.pack(">Ii", column.type.oid, column.type.typmod)
            for column in relation.columns
        )
        head = struct.pack(">I", relation.oid) + relation.table.schema.encode() + b"\0" + relation.table.name.encode() + b"\0"
        return self.add(b"R" + head + relation.replica_identity.encode() + struct.pack(">H", len(relation.columns)) + columns, lsn=0)

    def begin(self, commit_lsn: int | None = None, committed_at: int = 800_000_000_000_000, xid: int | None = None) -> "Wire":
        """Begin a transaction; `committed_at` is in microseconds since 2000."""
        self.xid = self.xid + 1 if xid is None else xid
        self._commit_lsn = self.lsn + 0x10_0000 if commit_lsn is None else commit_lsn
        self._committed_at = committed_at
        return self.add(b"B" + struct.pack(">QqI", self._commit_lsn, committed_at, self.xid))

    def commit(self) -> "Wire":
        self.lsn = max(self.lsn, self._commit_lsn)
        return self.add(b"C" + struct.pack(">BQQq", 0, self._commit_lsn, self._commit_lsn + 0x30, self._committed_at))

    def insert(self, relation: Relation, *values: Value) -> "Wire":
        return self.add(b"I" + struct.pack(">I", relation.oid) + b"N" + row(values))

    def update(self, relation: Relation, *values: Value, key: Sequence[Value] | None = None, old: Sequence[Value] | None = None) -> "Wire":
        before = b"" if key is None else b"K" + row(key)
        before = before if old is None else b"O" + row(old)
        return self.add(b"U" + struct.pack(">I", relation.oid) + before + b"N" + row(values))

    def delete(self, relation: Relation, *values: Value, whole: bool = False) -> "Wire":
        return self.add(b"D" + struct.pack(">I", relation.oid) + (b"O" if whole else b"K") + row(values))

    def truncate(self, *relations: Relation) -> "Wire":
        return self.add(b"T" + struct.pack(">IB", len(relations), 0) + b"".join(struct.pack(">I", relation.oid) for relation in relations))


def copied(rows: Sequence[Sequence[str | bytes | None]]) -> list[bytes]:
    """The blocks of a binary COPY as libpq hands them over: the header with the first row, each row, the trailer."""

    def framed_row(values: Sequence[str | bytes | None]) -> bytes:
        cells = b"".join(
            b"\xff\xff\xff\xff" if value is None else struct.pack(">i", len(octets)) + octets
            for value in values
            for octets in [value.encode() if isinstance(value, str) else value or b""]
        )
        return struct.pack(">h", len(values)) + cells

    blocks = [*map(framed_row, rows), b"\xff\xff"]
    blocks[0] = b"PGCOPY\n\xff\r\n\0" + bytes(8) + blocks[0]
    return blocks


def decoded_copy(messages: Sequence[bytes], relation: Relation, binary: Collection[int] = ()) -> pa.Table:
    """What `decode_copy` makes of these messages."""
    return decode_copy(bytearray(b"".join(messages)), [*map(len, messages)], relation, binary)

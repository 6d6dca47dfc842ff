"""Parsers for the rare messages of pgoutput, which are read one by one.

Transactions and row changes are read by `route` and `tuples`, many at once. Every parser raises ValueError with the reason if the payload
is not exactly one message of its kind.
"""

import struct
from dataclasses import dataclass
from typing import cast, get_args

from pgwal_pipeline.values.relation import ReplicaIdentity


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as a Relation message shows it. `identity`: it is part of the replica identity, so old rows carry it."""

    name: str
    type_oid: int
    typmod: int
    identity: bool


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """A table's definition, sent before its first change and again whenever it may have changed."""

    oid: int
    schema: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TruncateMessage:
    """The tables emptied by one TRUNCATE, by oid."""

    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class TypeMessage:
    """The name of a type that is not built in."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class OriginMessage:
    """The origin of a transaction, on a server that is itself a subscriber."""

    commit_lsn: int
    name: str


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message written by pg_logical_emit_message."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class _Reader:
    """Reads the fields of one payload in turn."""

    def __init__(self, payload: bytes, kind: bytes) -> None:
        if payload[:1] != kind:
            raise ValueError(f"its kind is not {kind.decode()}")
        self._payload = payload
        self._at = 1

    def numbers(self, layout: str) -> tuple[int, ...]:
        """Read big-endian numbers; `layout` is in the notation of `struct`."""
        size = struct.calcsize(">" + layout)
        if self._at + size > len(self._payload):
            raise ValueError("it ends too early")
        values = struct.unpack_from(">" + layout, self._payload, self._at)
        self._at += size
        return values

    def text(self) -> str:
        end = self._payload.find(b"\0", self._at)
        if end < 0:
            raise ValueError("a name in it does not end")
        try:
            value = self._payload[self._at : end].decode()
        except UnicodeDecodeError:
            raise ValueError("a name in it is not UTF-8") from None
        self._at = end + 1
        return value

    def octets(self, size: int) -> bytes:
        if size < 0 or self._at + size > len(self._payload):
            raise ValueError("it ends too early")
        value = self._payload[self._at : self._at + size]
        self._at += size
        return value

    def end(self) -> None:
        if self._at != len(self._payload):
            raise ValueError(f"{len(self._payload) - self._at} bytes follow where it should end")


def _schema(text: str) -> str:
    return text or "pg_catalog"  # pgoutput sends it as an empty string


def parse_relation(payload: bytes) -> RelationMessage:
    """Read a Relation message."""
    reader = _Reader(payload, b"R")
    (oid,) = reader.numbers("I")
    schema, name = _schema(reader.text()), reader.text()
    code, count = reader.numbers("BH")
    identity = chr(code)
    if identity not in get_args(ReplicaIdentity):
        raise ValueError(f"{identity!r} is no replica identity")
    columns = []
    for _ in range(count):
        (flags,) = reader.numbers("B")
        column = reader.text()
        type_oid, typmod = reader.numbers("Ii")
        columns.append(RelationColumn(column, type_oid, typmod, identity=bool(flags & 1)))
    reader.end()
    return RelationMessage(oid, schema, name, cast(ReplicaIdentity, identity), tuple(columns))


def parse_truncate(payload: bytes) -> TruncateMessage:
    """Read a Truncate message."""
    reader = _Reader(payload, b"T")
    count, options = reader.numbers("IB")
    if len(payload) != 6 + 4 * count:
        raise ValueError(f"it is not as long as its {count} tables need")
    return TruncateMessage(reader.numbers(f"{count}I"), cascade=bool(options & 1), restart_identity=bool(options & 2))


def parse_type(payload: bytes) -> TypeMessage:
    """Read a Type message."""
    reader = _Reader(payload, b"Y")
    (oid,) = reader.numbers("I")
    message = TypeMessage(oid, _schema(reader.text()), reader.text())
    reader.end()
    return message


def parse_origin(payload: bytes) -> OriginMessage:
    """Read an Origin message."""
    reader = _Reader(payload, b"O")
    (commit_lsn,) = reader.numbers("Q")
    message = OriginMessage(commit_lsn, reader.text())
    reader.end()
    return message


def parse_logical(payload: bytes) -> LogicalMessage:
    """Read a logical decoding message."""
    reader = _Reader(payload, b"M")
    flags, lsn = reader.numbers("BQ")
    prefix = reader.text()
    (size,) = reader.numbers("I")
    message = LogicalMessage(bool(flags & 1), lsn, prefix, reader.octets(size))
    reader.end()
    return message

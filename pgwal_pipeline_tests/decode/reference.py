"""A decoder that takes one message and one value at a time: slow, plain, and sharing nothing with the one it is compared with."""

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Context, Decimal
from typing import Any

from pgwal_pipeline.values.relation import PgType, Relation

MISFIT = object()
_EPOCH = 946_684_800_000_000


class BrokenError(Exception):
    """The messages are none: every decoder must refuse them."""


class GarbageError(Exception):
    """Framed as it should be, but no text that Postgres writes: a decoder may refuse it or make of it what it can."""


def value_of(octets: bytes, declared: PgType) -> Any:
    """A value as `to_pylist` gives it, or MISFIT."""
    if declared.element is not None:
        return _array(octets, declared.element)
    name = {16: "bool", 17: "bytea", 1082: "date", 1114: "timestamp", 1184: "timestamptz", 1700: "numeric"}.get(declared.oid)
    if declared.oid in (20, 21, 23, 26):
        bits = {20: 64, 21: 16, 23: 32, 26: 64}[declared.oid]
        number = int(_match(rb"-?[0-9]+", octets)[0])
        return number if -(1 << bits - 1) <= number < 1 << bits - 1 else _garbage()
    if declared.oid in (700, 701):
        return _float(octets, declared.oid == 700)
    match name:
        case "bool":
            return _match(rb"[tf]", octets)[0] == b"t"
        case "bytea":
            return bytes.fromhex(_match(rb"\\x((?:[0-9a-f]{2})*)", octets)[1].decode())
        case "numeric" if declared.typmod >= 4:
            return _numeric(octets, declared.typmod)
        case "date":
            return _moment(octets, rb"([0-9]{4})-([0-9]{2})-([0-9]{2})", date)
        case "timestamp":
            return _moment(octets, rb"([0-9]{4})-([0-9]{2})-([0-9]{2}) ([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,6}))?", datetime)
        case "timestamptz":
            return _moment(octets, rb"([0-9]{4})-([0-9]{2})-([0-9]{2}) ([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,6}))?\+00", datetime)
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return MISFIT


def _kept(octets: bytes) -> str:
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return "\\x" + octets.hex()


def _garbage() -> Any:
    raise GarbageError


def _match(pattern: bytes, octets: bytes) -> re.Match[bytes]:
    return re.fullmatch(pattern, octets) or _garbage()


def _float(octets: bytes, single: bool) -> float:
    _match(rb"NaN|-?Infinity|-?[0-9]+(\.[0-9]+)?(e[+-][0-9]+)?", octets)
    number = float(octets)
    try:
        number = struct.unpack("f", struct.pack("f", number))[0] if single else number
    except OverflowError:
        raise GarbageError from None
    return _garbage() if math.isinf(number) and b"I" not in octets else number


def _numeric(octets: bytes, typmod: int) -> Any:
    precision, scale = typmod - 4 >> 16, typmod - 4 & 0x7FF
    if precision > 38 or scale > precision:
        return octets.decode()
    _match(rb"NaN|-?Infinity|-?[0-9]+(\.[0-9]+)?", octets)
    if octets[-1:].isalpha():
        return MISFIT
    whole, _, fraction = octets.decode().partition(".")
    unscaled = int(whole.replace("-", "") + fraction.ljust(scale, "0"))
    if len(fraction) > scale:
        return MISFIT if fraction[scale:].strip("0") else _garbage()  # zeros beyond the scale: as it is, or without them
    if unscaled >= 10**precision:
        return MISFIT
    negative = unscaled and whole.startswith("-")
    return Decimal(-unscaled if negative else unscaled).scaleb(-scale, Context(prec=60))


def _moment(octets: bytes, pattern: bytes, make: Callable[..., Any]) -> Any:
    found = re.fullmatch(pattern, octets)
    if found is None:
        loose = pattern.replace(b"([0-9]{4})", b"[0-9]{4,7}", 1)
        _match(rb"-?infinity|(?:" + loose + rb")(?: BC)?", octets)
        return MISFIT
    parts = [int(part) for part in found.groups(b"0")]
    if len(parts) == 7:
        parts[6] = int((found[7] or b"0").ljust(6, b"0"))
    try:
        return make(*parts)
    except ValueError:
        raise GarbageError from None


def _array(octets: bytes, element: PgType) -> Any:
    if octets.startswith((b"[", b"{{")):
        _match(rb"(?s)\[.*\]=\{.*\}|\{\{.*\}\}", octets)
        _match(rb'(?s)(?:[^"\\]|"(?:[^"\\]|\\.)*")*', octets)
        return MISFIT
    if octets[:1] != b"{" or octets[-1:] != b"}" or len(octets) < 2:
        raise GarbageError
    made, at = [], 1
    if octets == b"{}":
        return made
    while True:
        text, quoted = bytearray(), octets[at : at + 1] == b'"'
        at += quoted
        while at < len(octets):
            letter = octets[at : at + 1]
            if quoted and letter == b'"':
                break
            if not quoted and letter in (b",", b"}"):
                break
            if letter == b"\\" and quoted:
                at += 1
                letter = octets[at : at + 1]
            elif not quoted and letter in (b'"', b"\\", b"{"):
                raise GarbageError
            text += letter
            at += 1
        at += quoted
        if not quoted and not text:
            raise GarbageError
        made.append(None if text == b"NULL" and not quoted else value_of(bytes(text), element))
        if octets[at:] == b"}":
            return MISFIT if any(item is MISFIT for item in made) else made
        if octets[at : at + 1] != b",":
            raise GarbageError
        at += 1


@dataclass
class Reference:
    """Decodes messages one by one. `rows` are (oid, commit LSN, ordinal, op, xid, committed at, values, unchanged, texts)."""

    describe: Callable[[Any], Relation]
    parse_relation: Callable[[bytes], Any]
    start_lsn: int
    end_lsn: int
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    garbage: bool = False
    passed_end: bool = False
    last_end: int | None = None
    _relations: dict[int, Relation] = field(default_factory=dict)
    _transaction: tuple[int, int, int] | None = None
    _last_lsn: int = 0
    _ordinal: int = 0

    def feed(self, message: bytes) -> None:
        if self.passed_end:
            return
        try:
            self._take(message[:1], message)
        except (struct.error, IndexError, KeyError, ValueError):
            raise BrokenError from None

    def _take(self, kind: bytes, payload: bytes) -> None:
        match kind:
            case b"B":
                self._begin(*struct.unpack(">qqI", payload[1:]))
            case b"C":
                _, lsn, end, at = struct.unpack(">Bqqq", payload[1:])
                if self._transaction is None or self._transaction[:2] != (lsn, at) or end <= lsn:
                    raise BrokenError
                self._transaction, self.last_end = None, end
            case b"R":
                self._relations[struct.unpack_from(">I", payload, 1)[0]] = self.describe(self.parse_relation(payload))
            case b"T":
                count, _ = struct.unpack_from(">IB", payload, 1)
                for oid in struct.unpack(f">{(len(payload) - 6) // 4}I", payload[6:]) if len(payload) == 6 + 4 * count else _broken():
                    self._emit(oid, [(b"T", None)])
            case b"I" | b"U" | b"D":
                self._change(kind, payload)
            case b"Y":
                if payload[5:].count(b"\0") != 2 or payload[-1:] != b"\0":
                    raise BrokenError
                payload[5:].decode()
            case b"O":
                if payload[9:].count(b"\0") != 1 or payload[-1:] != b"\0":
                    raise BrokenError
                payload[9:].decode()
            case b"M":
                prefix, _, content = payload[10:].partition(b"\0")
                prefix.decode()
                if struct.unpack_from(">I", content)[0] != len(content) - 4:
                    raise BrokenError
            case _:
                raise BrokenError

    def _begin(self, lsn: int, at: int, xid: int) -> None:
        if self._transaction is not None:
            raise BrokenError
        if lsn >= self.end_lsn:
            self.passed_end = True
            return
        if lsn <= self._last_lsn or at + _EPOCH >= 1 << 63:
            raise BrokenError
        self._transaction, self._last_lsn, self._ordinal = (lsn, at, xid), lsn, 0

    def _change(self, kind: bytes, payload: bytes) -> None:
        if self._transaction is None:
            raise BrokenError
        if self._transaction[0] < self.start_lsn:
            self._ordinal += 1
            return None
        oid = struct.unpack_from(">I", payload, 1)[0]
        relation = self._relations[oid]
        tuples, at = {}, 5
        while at < len(payload):
            tag = payload[at : at + 1]
            if tag in tuples:
                raise BrokenError
            tuples[tag], at = self._tuple(payload, at + 1, relation)
        if list(tuples) not in {b"I": [[b"N"]], b"U": [[b"N"], [b"K", b"N"], [b"O", b"N"]], b"D": [[b"K"], [b"O"]]}[kind]:
            raise BrokenError
        old, new = tuples.get(b"K") or tuples.get(b"O"), tuples.get(b"N")
        if new is None:
            return self._emit(oid, [(kind, old)])
        if old is None:
            return self._emit(oid, [(kind, new)])
        new = [before if after is False and isinstance(before, bytes) else after for before, after in zip(old, new, strict=True)]
        key = [relation.column_names.index(name) for name in relation.key]
        changed = not key or any(old[column] != new[column] for column in key)
        return self._emit(oid, [(b"K", old), (kind, new)] if changed else [(kind, new)])

    def _tuple(self, payload: bytes, at: int, relation: Relation) -> tuple[list[Any], int]:
        (count,) = struct.unpack_from(">H", payload, at)
        if count != len(relation.columns):
            raise BrokenError
        at += 2
        cells: list[Any] = []
        for _ in range(count):
            kind = payload[at]
            at += 1
            if kind == ord("t"):
                (size,) = struct.unpack_from(">I", payload, at)
                at += 4 + size
                if at > len(payload):
                    raise BrokenError
                cells.append(payload[at - size : at])
            else:
                cells.append({ord("n"): None, ord("u"): False}[kind])
        return cells, at

    def _emit(self, oid: int, made: list[tuple[bytes, list[Any] | None]]) -> None:
        if self._transaction is None:
            raise BrokenError
        lsn, at, xid = self._transaction
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        if lsn < self.start_lsn:
            return
        relation = self._relations[oid]
        for op, cells in made:
            values, unchanged, texts = [], [], {}
            for column, cell in zip(relation.columns, cells or [None] * len(relation.columns), strict=True):
                value = cell
                if isinstance(cell, bytes):
                    try:
                        value = value_of(cell, column.type)
                    except GarbageError:
                        self.garbage = True
                    if value is MISFIT:
                        value, texts[column.name] = None, _kept(cell)
                elif cell is False:
                    value = None
                    unchanged.append(column.name)
                values.append(value)
            self.rows.append((oid, lsn, ordinal, op.decode(), xid, at + _EPOCH, values, unchanged or None, texts or None))


def _broken() -> Any:
    raise BrokenError

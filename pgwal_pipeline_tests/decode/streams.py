"""Random tables, rows and transactions for the tests of the decoder, and what the decoder made of them in a form to compare."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from pgwal_pipeline.decode.batch import Decoded
from pgwal_pipeline.values.relation import PgType, Relation, ReplicaIdentity
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.wire import UNCHANGED, Value, Wire, array_of, numeric, table

_words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def _moment(with_zone: str) -> Callable[[datetime], str]:
    def shown(moment: datetime) -> str:
        fraction = f".{moment.microsecond:06d}".rstrip("0") if moment.microsecond else ""
        return f"{moment.year:04d}-{moment:%m-%d %H:%M:%S}{fraction}{with_zone}"

    return shown


def _decimal(scale: int) -> Callable[[int], str]:
    def shown(unscaled: int) -> str:
        digits = f"{abs(unscaled):0{scale + 1}d}"
        return ("-" if unscaled < 0 else "") + (f"{digits[:-scale]}.{digits[-scale:]}" if scale else digits)

    return shown


def _double(number: float) -> str:
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(number)) or repr(number)


def _array(elements: Sequence[str | None]) -> str:
    def shown(element: str | None) -> str:
        if element is None:
            return "NULL"
        plain = element and element.upper() != "NULL" and not any(letter.isspace() or letter in ',{}"\\' for letter in element)
        return element if plain else '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "{" + ",".join(map(shown, elements)) + "}"


def _arrays(elements: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.none() | elements, max_size=4).map(_array) | st.sampled_from(["{}", "{{1,2},{3,4}}", "[0:1]={1,2}"])


_ints = st.integers(-(2**31), 2**31 - 1).map(str)
_dates = st.dates().map(lambda day: f"{day.year:04d}-{day:%m-%d}") | st.sampled_from(
    ["infinity", "-infinity", "0044-03-15 BC", "12345-01-01"]
)
TEXTS: dict[PgType, st.SearchStrategy[str]] = {
    wire.INT4: _ints,
    wire.INT2: st.integers(-(2**15), 2**15 - 1).map(str),
    wire.INT8: st.integers(-(2**63), 2**63 - 1).map(str),
    wire.BOOL: st.sampled_from("tf"),
    wire.TEXT: _words,
    wire.JSONB: _words,
    wire.FLOAT8: st.floats().map(_double),
    wire.BYTEA: st.binary(max_size=12).map(lambda octets: "\\x" + octets.hex()),
    numeric(12, 2): st.integers(-(10**12) + 1, 10**12 - 1).map(_decimal(2)) | st.just("NaN"),
    numeric(30, 10): st.integers(-(10**30) + 1, 10**30 - 1).map(_decimal(10)) | st.just("NaN"),
    numeric(): st.integers().map(str) | st.sampled_from(["NaN", "Infinity", "1.50"]),
    wire.DATE: _dates,
    wire.TIMESTAMP: st.datetimes().map(_moment("")) | st.just("infinity"),
    wire.TIMESTAMPTZ: st.datetimes().map(_moment("+00")) | st.sampled_from(["-infinity", "0001-01-01 00:00:00+00 BC"]),
    array_of(wire.INT4): _arrays(_ints),
    array_of(wire.TEXT): _arrays(_words),
    array_of(wire.DATE): _arrays(_dates),
}


@st.composite
def tables(draw: st.DrawFn) -> Relation:
    """A table with a key of up to two columns, or a bag of rows."""
    number = draw(st.integers(0, 10_000))
    types = draw(st.lists(st.sampled_from(list(TEXTS)), min_size=1, max_size=8))
    key = draw(st.sampled_from([["c0"], ["c0", f"c{len(types) - 1}"], []]))
    identities: list[ReplicaIdentity] = ["d", "f"] if key else ["f"]
    identity = draw(st.sampled_from(identities))
    columns = {f"c{index}": declared for index, declared in enumerate(types)}
    return table(f"t{number}", columns, key=list(dict.fromkeys(key)), identity=identity, oid=20_000 + number)


def _row(draw: st.DrawFn, relation: Relation, *, only: Iterable[str] | None = None, unsent: bool = False) -> list[Value]:
    row: list[Value] = []
    for column in relation.columns:
        if only is not None and column.name not in only:
            row.append(None)
        elif column.name in relation.key:
            row.append(draw(TEXTS[column.type]))
        else:
            kept: st.SearchStrategy[Value] = st.just(UNCHANGED)
            sent: st.SearchStrategy[Value] = st.none() | TEXTS[column.type]
            row.append(draw(sent | kept if unsent else sent))
    return row


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Relation], list[bytes]]:
    """Tables and a stream of transactions over them, whole up to its last message."""
    relations = draw(st.lists(tables(), min_size=1, max_size=4, unique_by=lambda relation: relation.oid))
    sent = Wire()
    known: set[int] = set()
    for _ in range(draw(st.integers(1, 4))):
        sent.begin(xid=draw(st.integers(3, 2**32 - 1)))
        for _ in range(draw(st.integers(0, 12))):
            relation = draw(st.sampled_from(relations))
            if relation.oid not in known or draw(st.integers(0, 20)) == 0:
                sent.relation(relation)
                known.add(relation.oid)
            _change(draw, sent, relation)
        sent.commit()
    return relations, sent.messages


def _change(draw: st.DrawFn, sent: Wire, relation: Relation) -> None:
    whole = relation.replica_identity == "f"
    match draw(st.sampled_from("IIIUUUDT")):
        case "I":
            sent.insert(relation, *_row(draw, relation))
        case "U" if whole:
            sent.update(relation, *_row(draw, relation, unsent=True), old=_row(draw, relation))
        case "U":
            key = draw(st.none() | st.just(_row(draw, relation, only=relation.key)))
            sent.update(relation, *_row(draw, relation, unsent=True), key=key)
        case "D":
            sent.delete(relation, *_row(draw, relation, only=None if whole else relation.key), whole=whole)
        case "T":
            sent.truncate(relation)


def comparable(fed: Iterable[Decoded]) -> list[tuple[Any, ...]]:
    """All rows of some feeds as the reference decoder lays them out, in the order of the stream."""
    made = []
    for decoded in fed:
        for changes in decoded.changes:
            changes.rows.validate(full=True)
            rows = changes.rows.set_column(
                changes.rows.schema.get_field_index("_pgwal_committed_at"),
                "_pgwal_committed_at",
                changes.rows["_pgwal_committed_at"].cast(pa.timestamp("us")).cast(pa.int64()),
            )
            names = changes.relation.column_names
            # Columns of a mutated definition may share a name.
            values = [plain(rows.column(index).to_pylist()) for index in range(len(names))]
            meta = {name: rows[name].to_pylist() for name in rows.schema.names[len(names) :]}
            for number in range(rows.num_rows):
                text = meta["_pgwal_text"][number]
                made.append(
                    (
                        changes.relation.oid,
                        *(meta[f"_pgwal_{name}"][number] for name in ("commit_lsn", "ordinal", "op", "xid", "committed_at")),
                        [column[number] for column in values],
                        meta["_pgwal_unchanged"][number],
                        dict(text) if text else None,
                    )
                )
    return sorted(made, key=lambda row: (row[1], row[2], row[3] != "K"))


def plain(values: list[Any]) -> list[Any]:
    """Timestamps without their zone, which is always UTC."""
    return [value.replace(tzinfo=None) if isinstance(value, datetime) else value for value in values]

"""The decoder against the plain one: random streams, cut into random feeds, whole and damaged."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgwal_pipeline.decode.batch import Decoded, Decoder
from pgwal_pipeline.decode.pgoutput import RelationMessage, parse_relation
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.damage import damaged
from pgwal_pipeline_tests.decode.reference import BrokenError, Reference
from pgwal_pipeline_tests.decode.streams import TEXTS, comparable, streams
from pgwal_pipeline_tests.decode.wire import UNCHANGED, Wire, array_of, describe_from, numeric, table

END = 1 << 62


def refer(messages: Sequence[bytes], describe, start: int = 0, end: int = END) -> Reference:
    reference = Reference(describe, parse_relation, start, end)
    for message in messages:
        reference.feed(message)
    return reference


def cut(messages: Sequence[bytes], places: Sequence[int]) -> list[Sequence[bytes]]:
    bounds = [0, *sorted({place % (len(messages) + 1) for place in places}), len(messages)]
    return [messages[begin:end] for begin, end in pairwise(bounds)]


def decode(feeds: Sequence[Sequence[bytes]], describe, start: int = 0, end: int = END) -> list[Decoded]:
    decoder = Decoder(describe, start, end)
    return [decoder.feed(feed) for feed in feeds]


def same(ours, theirs) -> None:
    """Compare rows by their text, for NaN is not equal to itself."""
    assert list(map(repr, ours)) == list(map(repr, theirs))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(streams(), st.lists(st.integers(0, 200), max_size=5), st.data())
def test_random_streams_in_random_feeds(stream, places: list[int], data: st.DataObject) -> None:
    relations, messages = stream
    describe = describe_from(*relations)
    reference = refer(messages, describe)
    assert not reference.garbage
    whole = decode([messages], describe)
    same(comparable(whole), reference.rows)
    parts = decode(cut(messages, places), describe)
    same(comparable(parts), reference.rows)
    assert sum(part.transactions for part in parts) == whole[0].transactions
    assert sum(part.changes_count for part in parts) == whole[0].changes_count == len([row for row in reference.rows if row[3] != "K"])
    assert max((part.last_commit_end_lsn or 0 for part in parts), default=None) == whole[0].last_commit_end_lsn == reference.last_end
    lsns = sorted({row[1] for row in reference.rows} | {0})
    start, end = data.draw(st.sampled_from(lsns)), data.draw(st.sampled_from(lsns)) + data.draw(st.integers(0, 1))
    window = decode(cut(messages, places), describe, start, end)
    same(comparable(window), [row for row in reference.rows if start <= row[1] < end])


def describe_anything(message: RelationMessage) -> Relation:
    """A definition for whatever a damaged Relation message says, with the types that its oids still name."""
    types = {declared.oid: declared for declared in TEXTS}
    columns = tuple(
        Column(column.name, _retyped(types.get(column.type_oid, wire.TEXT), column.typmod), identity=column.identity)
        for column in message.columns
    )
    key = () if message.replica_identity == "f" else tuple(column.name for column in columns if column.identity)
    return Relation(message.oid, TableName(message.schema, message.name), message.replica_identity, columns, key)


def _retyped(declared: PgType, typmod: int) -> PgType:
    return PgType(declared.oid, typmod, declared.name) if declared.oid == 1700 else declared


def _sample() -> list[bytes]:
    """A stream with every kind of message and shape of row, and values of every kind of type."""
    many = table(
        "many",
        {
            "id": wire.INT4,
            "name": wire.TEXT,
            "price": numeric(12, 2),
            "wide": numeric(30, 10),
            "at": wire.TIMESTAMPTZ,
            "day": wire.DATE,
            "ok": wire.BOOL,
            "score": wire.FLOAT8,
            "data": wire.BYTEA,
            "tags": array_of(wire.TEXT),
            "numbers": array_of(wire.INT4),
        },
        oid=20_001,
    )
    bag = table("bag", {"a": wire.INT8, "b": wire.TEXT}, key=(), identity="f", oid=20_002)
    row = [
        "7",
        "zoë",
        "-12.50",
        "1.5000000000",
        "2024-05-06 07:08:09.25+00",
        "2024-05-06",
        "t",
        "1.5e-07",
        "\\x00ff",
        '{a,"b c",NULL}',
        "{1,-2}",
    ]
    odd = ["8", "", "NaN", "NaN", "infinity", "0044-03-15 BC", "f", "NaN", "\\x", '{"\\"\\\\"}', "{{1},{2}}"]
    sent = Wire().begin().add(b"O" + bytes(8) + b"there\0").relation(many).add(b"Y\0\0\0\7shop\0mood\0")
    sent.insert(many, *row).insert(many, *odd)
    sent.update(many, *row[:8], UNCHANGED, None, "{}").update(many, *odd, key=["7", *[None] * 10]).delete(many, "8", *[None] * 10).commit()
    sent.begin().relation(bag).insert(bag, "1", "x").update(bag, "2", UNCHANGED, old=["1", "x"]).truncate(many, bag)
    sent.add(b"M\1" + bytes(8) + b"pgwal\0\0\0\0\1x").delete(bag, "2", "x", whole=True).insert(many, *row).commit()
    return sent.messages


@pytest.mark.parametrize("seed", range(2))
def test_damaged_streams_are_refused_or_read_as_the_plain_decoder_reads_them(seed: int) -> None:
    sample = _sample()
    chance = random.Random(seed)
    refused = 0
    assert not refer(sample, describe_anything).garbage
    before = pa.total_allocated_bytes()
    for _ in range(150):
        messages, _, _ = damaged(sample, chance)
        try:
            reference = refer(messages, describe_anything)
        except BrokenError:
            reference = None
        try:
            fed = decode(cut(messages, [chance.randrange(30) for _ in range(chance.randrange(3))]), describe_anything)
        except DecodeError as error:
            refused += 1
            assert reference is None or reference.garbage, error
            assert len(str(error)) < 2000
            continue
        assert reference is not None
        if not reference.garbage:
            same(comparable(fed), reference.rows)
    assert 30 < refused < 145
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_noise_is_refused() -> None:
    chance = random.Random(5)
    for size in [*range(60), *(chance.randrange(2000) for _ in range(200))]:
        noise = chance.randbytes(size)
        for message in (noise, chance.choice([b"I", b"U", b"D", b"R", b"T"]) + noise):
            with pytest.raises(DecodeError):
                decode([[*_sample()[:3], message]], describe_anything)

"""What arrives of protected columns, compared with Python's own hmac and a mask written the plain way."""

import hashlib
import hmac
import random

import pyarrow as pa
import pytest

from pgwal_pipeline.decode import binary
from pgwal_pipeline.decode.batch import Decoder, decode_copy
from pgwal_pipeline.decode.protect import protect_with
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline.values.protection import Protection
from pgwal_pipeline.values.table_options import parse_options
from pgwal_pipeline_tests.decode.wire import INT4, TEXT, UNCHANGED, Wire, copied, table

VALUES = ["a@b", None, "", "ümläut", "b" * 300, "NULL", "\t'"]


def octets(values: list[bytes | None]) -> pa.StringArray:
    """Texts that need not be UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize("key", [b"k", b"\0", b"x" * 64, b"x" * 65, "schlüssel".encode()])
@pytest.mark.parametrize("values", [VALUES, [*VALUES, *(["q", None] * 300)], [str(i) for i in range(600)], [None], []])
def test_hashes_are_hmacs(key: bytes, values: list[str | None]) -> None:
    expected = [None if value is None else hmac.new(key, value.encode(), hashlib.sha256).hexdigest() for value in values]
    made = protect_with("hash:f", key)
    texts = pa.array(values, pa.string())
    assert made(texts).to_pylist() == expected
    assert made(texts).type == pa.string()
    assert made(texts.slice(1)).to_pylist() == expected[1:]


def test_text_that_is_not_utf8_has_a_hash_too() -> None:
    expected = hmac.new(b"k", b"\xff\xfe", hashlib.sha256).hexdigest()
    assert protect_with("hash:f", b"k")(octets([b"\xff\xfe", None])).to_pylist() == [expected, None]


def test_the_last_four_characters() -> None:
    pick = random.Random(5)
    values = [None, *("".join(pick.choices("aü€😀1 ", k=size % 9)) for size in range(200))]
    expected = [
        None if value is None else "*" * max(len(value) - 4, 0) + value[-4:] if len(value) > 4 else "*" * len(value) for value in values
    ]
    assert protect_with("mask:last4", b"")(pa.array(values, pa.string())).to_pylist() == expected
    assert protect_with("mask:last4", b"")(octets([b"\xff12345", b"123456", None])).to_pylist() == ["*" * 6, "**3456", None]


SENT = table("t", {"a": INT4, "b": TEXT, "c": TEXT, "d": INT4})
PROTECTION = Protection(parse_options({"shop.t": {"exclude": ["b"], "hash": ["c"]}}), b"k")
RELATION = PROTECTION.relation(SENT)


def decoder() -> Decoder:
    return Decoder(lambda _: RELATION, 0, 1 << 60, protection=PROTECTION)


def test_an_excluded_column_is_passed_over_in_every_kind_of_row() -> None:
    wire = Wire().begin().relation(SENT).insert(SENT, "1", "secret", "x", "10")
    wire.update(SENT, "2", UNCHANGED, UNCHANGED, "11", key=["1", None, None, None]).delete(SENT, "2", None, None, None).commit()
    (changes,) = decoder().feed(wire.messages).changes
    assert changes.relation == RELATION
    assert changes.rows.column_names[:3] == ["a", "c", "d"]
    hashed = hmac.new(b"k", b"x", hashlib.sha256).hexdigest()
    columns = (changes.rows[name].to_pylist() for name in ("_pgwal_op", "a", "c", "d", "_pgwal_unchanged"))
    assert sorted(zip(*columns, strict=True), key=str) == [
        ("D", 2, None, None, None),
        ("I", 1, hashed, 10, None),
        ("K", 1, None, None, None),
        ("U", 2, None, 11, ["c"]),
    ]


@pytest.mark.parametrize("values", [["1", "planted", "planted", "no number"], ["1", "planted", "planted"], ["planted"] * 5])
def test_an_error_shows_nothing_of_a_protected_row(values: list[str]) -> None:
    wire = Wire().begin().relation(SENT).insert(SENT, *values).commit()
    with pytest.raises(DecodeError) as caught:
        decoder().feed(wire.messages)
    assert (caught.value.oid, len(caught.value.payload)) == (SENT.oid, 8)
    assert "planted" not in str(caught.value)
    assert b"planted".hex(" ") not in str(caught.value)


def test_nor_one_of_a_table_that_is_not_known_yet_or_stands_outside_of_a_transaction() -> None:
    for wire in (Wire().begin().insert(SENT, "planted").commit(), Wire().insert(SENT, "planted")):
        with pytest.raises(DecodeError) as caught:
            decoder().feed(wire.messages)
        assert b"planted" not in caught.value.payload
        assert b"planted".hex(" ") not in str(caught.value)


def test_the_sound_table_beside_it_keeps_its_whole_message() -> None:
    other = table("other", {"a": INT4})
    wire = Wire().begin().relation(other).insert(other, "no number").commit()
    with pytest.raises(DecodeError) as caught:
        Decoder(lambda _: other, 0, 1 << 60, protection=PROTECTION).feed(wire.messages)
    assert b"no number" in caught.value.payload


@pytest.mark.parametrize("as_binary", [frozenset[int](), binary.TYPES])
def test_a_copy_is_protected_alike(as_binary: frozenset[int]) -> None:
    """A type that is copied in binary comes as text where it is hashed."""
    relation = Protection(parse_options({"shop.t": {"hash": ["n"], "mask": {"v": "last4"}}}), b"k").relation(
        table("t", {"a": TEXT, "n": INT4, "v": TEXT})
    )
    messages = copied([["x", "12", "1234567"], ["y", None, None]])
    found = decode_copy(bytearray(b"".join(messages)), [len(message) for message in messages], relation, as_binary, b"k")
    assert found["n"].to_pylist() == [hmac.new(b"k", b"12", hashlib.sha256).hexdigest(), None]
    assert found["v"].to_pylist() == ["***4567", None]

import random
import struct
from decimal import Decimal
from itertools import pairwise

import pyarrow as pa
import pytest

from pgwal_pipeline.decode import copy
from pgwal_pipeline.decode.batch import decode_copy
from pgwal_pipeline.decode.types import copy_schema
from pgwal_pipeline.errors import DecodeError
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.wire import array_of, copied, numeric, table

ITEMS = table("items", {"id": wire.INT4, "name": wire.TEXT, "price": numeric(8, 2), "tags": array_of(wire.TEXT), "day": wire.DATE})
ROWS = [
    ["1", "zoë", "1.50", "{a,b}", "2024-01-01"],
    ["2", None, None, None, None],
    ["3", "", "NaN", '{"PGCOPY",NULL}', "infinity"],
    ["-4", "x" * 500, "-0.01", "{}", "0044-03-15 BC"],
]


def test_rows() -> None:
    read = decode_copy(copied(ROWS), ITEMS)
    read.validate(full=True)
    assert read.schema == copy_schema(ITEMS)
    assert read["id"].to_pylist() == [1, 2, 3, -4]
    assert read["name"].to_pylist() == ["zoë", None, "", "x" * 500]
    assert read["price"].to_pylist() == [Decimal("1.50"), None, None, Decimal("-0.01")]
    assert read["tags"].to_pylist() == [["a", "b"], None, ["PGCOPY", None], []]
    assert [str(day) for day in read["day"].to_pylist()] == ["2024-01-01", "None", "None", "None"]
    assert read["_pgwal_text"].to_pylist() == [None, None, [("price", "NaN"), ("day", "infinity")], [("day", "0044-03-15 BC")]]


def test_blocks_cut_anywhere() -> None:
    whole = b"".join(copied(ROWS))
    expected = decode_copy(copied(ROWS), ITEMS)
    assert decode_copy([whole], ITEMS).equals(expected)
    assert decode_copy([memoryview(whole[place : place + 1]) for place in range(len(whole))], ITEMS).equals(expected)
    chance = random.Random(3)
    for _ in range(30):
        bounds = [0, *sorted(chance.sample(range(len(whole)), 6)), len(whole)]
        blocks = [whole[begin:end] for begin, end in pairwise(bounds)]
        assert decode_copy(blocks, ITEMS).equals(expected)


def test_blocks_of_the_middle_have_neither_header_nor_trailer() -> None:
    blocks = copied(ROWS)
    first, rest = decode_copy(blocks[:2], ITEMS), decode_copy(blocks[2:], ITEMS)
    assert pa.concat_tables([first, rest]).equals(decode_copy(blocks, ITEMS))
    assert decode_copy([b"".join(blocks[1:3])], ITEMS).equals(decode_copy(blocks[1:3], ITEMS))


def test_no_rows() -> None:
    for blocks in ([], copied([]), [b"".join(copied([]))], [b"\xff\xff"], [copied([])[0][:19], b"\xff\xff"]):
        assert decode_copy(blocks, ITEMS).equals(copy_schema(ITEMS).empty_table())


def test_values_that_look_like_rows() -> None:
    row = b"".join(copied([["7", "q", None, None, None]])[0][19:] for _ in range(3))
    rows = [["1", row.decode("latin-1").replace("\xff", "\x7f"), None, None, None], ["2", "\0\5" * 40, "1.00", "{}", None]] * 30
    read = decode_copy([b"".join(copied(rows))], ITEMS)
    assert read["name"].to_pylist() == [row[1] for row in rows]
    assert read["id"].to_pylist() == [1, 2] * 30


def test_a_row_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_PIECE", 100)
    whole = b"".join(copied([*ROWS, ["5", "y" * 5000, None, None, None], *ROWS]))
    read = decode_copy([whole[place : place + 10] for place in range(0, len(whole), 10)], ITEMS)
    assert read["id"].to_pylist() == [1, 2, 3, -4, 5, 1, 2, 3, -4]
    assert read["name"].to_pylist()[4] == "y" * 5000


def test_a_table_without_columns() -> None:
    assert decode_copy(copied([[], []]), table("bare", {}, key=())).num_rows == 2


def test_a_longer_header() -> None:
    blocks = copied(ROWS)
    longer = blocks[0][:15] + struct.pack(">I", 5) + b"extra" + blocks[0][19:]
    assert decode_copy([longer, *blocks[1:]], ITEMS).equals(decode_copy(blocks, ITEMS))


def test_rows_that_need_several_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode_copy(copied(ROWS * 20), ITEMS)
    monkeypatch.setattr(copy, "_PIECE", 300)
    read = decode_copy(copied(ROWS * 20), ITEMS)
    assert read["id"].num_chunks > 10
    assert read.equals(expected)


def test_what_is_no_copy_of_the_table() -> None:
    blocks = copied(ROWS)
    for broken, reason in [
        ([*blocks[:1], blocks[1] + b"\0", *blocks[2:]], "Row"),
        ([*blocks[:1], blocks[1][:-1], *blocks[2:]], "Row"),
        ([blocks[0], blocks[1][:20]], "cut off"),
        ([blocks[0][:15]], "header"),
        ([blocks[0][:11] + b"\0\1\0\0" + blocks[0][15:]], "header"),
        ([*blocks, b"\0"], "Row"),
        (copied([["1"]]), "Row 1 .* not 5 columns"),
        (copied([["1", "2", "3", "4", "5", "6"]]), "5 columns"),
        ([struct.pack(">hi", 5, -2)], "Row 1"),
        ([struct.pack(">hi", 5, 2**31 - 1)], "Row 1"),
        ([b"\xff\xfe"], "Row 1"),
        ([b"\0"], "Row 1"),
    ]:
        with pytest.raises(DecodeError, match=reason) as caught:
            decode_copy(broken, ITEMS)
        assert "shop.items" in str(caught.value)


def test_a_value_that_is_none_names_row_and_column() -> None:
    with pytest.raises(DecodeError, match=r"Row 5 of the copy of shop.items .* column 'id'.*'x' is no int32"):
        decode_copy(copied([*ROWS, ["x", None, None, None, None]]), ITEMS)


def test_text_that_is_not_utf8_is_kept_as_bytes() -> None:
    read = decode_copy(copied([ROWS[0], ["1", b"caf\xe9", "NaN", b"{a,\xff}", None]]), ITEMS)
    read.validate(full=True)
    assert read.slice(1).to_pylist() == [
        {"id": 1, "name": None, "price": None, "tags": None, "day": None}
        | {"_pgwal_text": [("name", "\\x636166e9"), ("price", "NaN"), ("tags", "\\x7b612cff7d")]}
    ]


def test_damage_is_refused_or_leaves_a_copy() -> None:
    """Whatever comes, it is a DecodeError or a table with the right columns, never anything else."""
    whole, chance, refused = b"".join(copied(ROWS)), random.Random(11), 0
    for _ in range(400):
        octets = bytearray(whole)
        place = chance.randrange(len(octets))
        match chance.randrange(3):
            case 0:
                octets[place] = chance.randrange(256)
            case 1:
                del octets[place:]
            case 2:
                octets[place : place + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"])
        try:
            read = decode_copy([bytes(octets)] if chance.random() < 0.5 else [bytes(octets[:30]), bytes(octets[30:])], ITEMS)
        except DecodeError:
            refused += 1
        else:
            read.validate(full=True)
            assert read.schema == copy_schema(ITEMS)
    assert 50 < refused < 390

import math
import random
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pgwal_pipeline.decode import binary
from pgwal_pipeline.decode.types import copy_schema
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.wire import array_of, copied, decoded_copy, numeric, table

ITEMS = table("items", {"id": wire.INT4, "name": wire.TEXT, "price": numeric(8, 2), "tags": array_of(wire.TEXT), "day": wire.DATE})
ROWS = [
    ["1", "zoë", "1.50", "{a,b}", "2024-01-01"],
    ["2", None, None, None, None],
    ["3", "", "NaN", '{"PGCOPY",NULL}', "infinity"],
    ["-4", "x" * 500, "-0.01", "{}", "0044-03-15 BC"],
]


def test_rows() -> None:
    read = decoded_copy(copied(ROWS), ITEMS)
    read.validate(full=True)
    assert read.schema == copy_schema(ITEMS)
    assert read["id"].to_pylist() == [1, 2, 3, -4]
    assert read["name"].to_pylist() == ["zoë", None, "", "x" * 500]
    assert read["price"].to_pylist() == [Decimal("1.50"), None, None, Decimal("-0.01")]
    assert read["tags"].to_pylist() == [["a", "b"], None, ["PGCOPY", None], []]
    assert [str(day) for day in read["day"].to_pylist()] == ["2024-01-01", "None", "None", "None"]
    assert read["_pgwal_text"].to_pylist() == [None, None, [("price", "NaN"), ("day", "infinity")], [("day", "0044-03-15 BC")]]


def test_messages_of_the_middle_have_neither_header_nor_trailer() -> None:
    messages = copied(ROWS)
    first, rest = decoded_copy(messages[:2], ITEMS), decoded_copy(messages[2:], ITEMS)
    assert pa.concat_tables([first, rest]).equals(decoded_copy(messages, ITEMS))
    assert decoded_copy([messages[0][:19], messages[0][19:], *messages[1:]], ITEMS).equals(decoded_copy(messages, ITEMS))


def test_no_rows() -> None:
    for messages in ([], copied([]), [copied([])[0][:19]], [b"\xff\xff"], [copied([])[0][:19], b"\xff\xff"]):
        assert decoded_copy(messages, ITEMS).equals(copy_schema(ITEMS).empty_table())


def test_values_that_look_like_rows() -> None:
    row = b"".join(copied([["7", "q", None, None, None]])[0][19:] for _ in range(3))
    rows = [["1", row.decode("latin-1").replace("\xff", "\x7f"), None, None, None], ["2", "\0\5" * 40, "1.00", "{}", None]] * 30
    read = decoded_copy(copied(rows), ITEMS)
    assert read["name"].to_pylist() == [row[1] for row in rows]
    assert read["id"].to_pylist() == [1, 2] * 30


def test_a_table_without_columns() -> None:
    assert decoded_copy(copied([[], []]), table("bare", {}, key=())).num_rows == 2


def test_a_longer_header() -> None:
    blocks = copied(ROWS)
    longer = blocks[0][:15] + struct.pack(">I", 5) + b"extra" + blocks[0][19:]
    assert decoded_copy([longer, *blocks[1:]], ITEMS).equals(decoded_copy(blocks, ITEMS))


def test_what_is_no_copy_of_the_table() -> None:
    blocks = copied(ROWS)
    for broken, reason in [
        ([*blocks[:1], blocks[1] + b"\0", *blocks[2:]], "Row 2 .* follows its last column"),
        ([*blocks[:1], blocks[1][:-1], *blocks[2:]], "Row 2 .* column 5 is cut off"),
        ([blocks[0], blocks[1][:20]], "Row 2 .* cut off"),
        ([b"".join(blocks)], "Row 1 .* follows its last column"),
        ([blocks[0][:15]], "header"),
        ([blocks[0][:18]], "header"),
        ([blocks[0][:15] + b"\0\0\1\0" + blocks[0][19:40]], "header"),
        ([blocks[0][:11] + b"\0\1\0\0" + blocks[0][15:]], "header"),
        ([*blocks, b"\0"], "Row"),
        ([*blocks, blocks[1]], "Row 5 .* does not have 5 columns"),
        (copied([["1"]]), "Row 1 .* does not have 5 columns"),
        (copied([["1", "2", "3", "4", "5", "6"]]), "5 columns"),
        ([struct.pack(">hi", 5, -2)], "Row 1 .* length of -2"),
        ([struct.pack(">hi", 5, 2**31 - 1)], "Row 1"),
        ([b"\xff\xfe"], "Row 1"),
        ([b"\0"], "Row 1"),
        ([blocks[1], b""], "Row 2"),
    ]:
        with pytest.raises(DecodeError, match=reason) as caught:
            decoded_copy(broken, ITEMS)
        assert "shop.items" in str(caught.value)


def test_a_value_that_is_none_names_row_and_column() -> None:
    with pytest.raises(DecodeError, match=r"Row 5 of the copy of shop.items .* column 'id'.*'x' is no int32"):
        decoded_copy(copied([*ROWS, ["x", None, None, None, None]]), ITEMS)


def test_text_that_is_not_utf8_is_kept_as_bytes() -> None:
    read = decoded_copy(copied([ROWS[0], ["1", b"caf\xe9", "NaN", b"{a,\xff}", None]]), ITEMS)
    read.validate(full=True)
    assert read.slice(1).to_pylist() == [
        {"id": 1, "name": None, "price": None, "tags": None, "day": None}
        | {"_pgwal_text": [("name", "\\x636166e9"), ("price", "NaN"), ("tags", "\\x7b612cff7d")]}
    ]


NUMBERS = table(
    "numbers",
    {
        "small": wire.INT2,
        "id": wire.INT4,
        "large": wire.INT8,
        "ref": wire.OID,
        "ratio": wire.FLOAT4,
        "score": wire.FLOAT8,
        "done": wire.BOOL,
        "day": wire.DATE,
        "at": wire.TIMESTAMP,
        "at_zone": wire.TIMESTAMPTZ,
        "raw": wire.BYTEA,
        "name": wire.TEXT,
    },
)
_FORMS = ["h", "i", "q", "I", "f", "d", "?", "i", "q", "q"]


def packed(*values: Any) -> list[bytes | None]:
    """A row of `numbers` in binary form."""
    forms = [*_FORMS, None, None]
    return [value if form is None or value is None else struct.pack(f">{form}", value) for form, value in zip(forms, values, strict=True)]


def test_binary_forms() -> None:
    rows = [
        packed(-(2**15), -(2**31), -(2**63), 2**32 - 1, 0.1, -0.0, True, 0, 0, 0, b"", b"zo\xc3\xab"),
        packed(*[None] * 12),
        packed(
            2**15 - 1, 2**31 - 1, 2**63 - 1, 0, math.inf, math.nan, False, 2921939, 252455615999999999, -63082281600000000, b"\0\xff", b""
        ),
        packed(1, 1, 1, 1, 0.5, 5e-324, True, 2**31 - 1, -(2**63), 2**63 - 1, b"\\x00", b"\xff"),
        packed(1, 1, 1, 1, 0.5, 0.5, True, 2921940, 252455616000000000, -63082281600000001, None, None),
    ]
    read = decoded_copy(copied(rows), NUMBERS, binary.TYPES)
    read.validate(full=True)
    assert read.schema == copy_schema(NUMBERS)
    plain = read.to_pydict()
    assert plain["small"] == [-(2**15), None, 2**15 - 1, 1, 1]
    assert plain["id"] == [-(2**31), None, 2**31 - 1, 1, 1]
    assert plain["large"] == [-(2**63), None, 2**63 - 1, 1, 1]
    assert plain["ref"] == [2**32 - 1, None, 0, 1, 1]
    assert plain["ratio"] == [struct.unpack("f", struct.pack("f", 0.1))[0], None, math.inf, 0.5, 0.5]
    assert repr(plain["score"]) == "[-0.0, None, nan, 5e-324, 0.5]"
    assert plain["done"] == [True, None, False, True, True]
    assert plain["day"] == [date(2000, 1, 1), None, date(9999, 12, 31), None, None]
    assert plain["at"] == [datetime(2000, 1, 1), None, datetime(9999, 12, 31, 23, 59, 59, 999999), None, None]
    assert plain["at_zone"] == [datetime(2000, 1, 1, tzinfo=UTC), None, datetime(1, 1, 1, tzinfo=UTC), None, None]
    assert plain["raw"] == [b"", None, b"\0\xff", b"\\x00", None]
    assert plain["name"] == ["zoë", None, "", None, None]
    assert plain["_pgwal_text"] == [
        None,
        None,
        None,
        [("day", "infinity"), ("at", "-infinity"), ("at_zone", "infinity"), ("name", "\\xff")],
        [("day", "10000-01-01"), ("at", "10000-01-01 00:00:00"), ("at_zone", "0001-12-31 23:59:59.999999+00 BC")],
    ]


def test_a_binary_form_of_another_size_names_row_and_column() -> None:
    row = packed(*[None] * 12)
    for name, index, octets in [("small", 0, b"\0"), ("large", 2, b"\0" * 4), ("done", 6, b""), ("at", 8, b"\0" * 9)]:
        broken = [*row[:index], octets, *row[index + 1 :]]
        with pytest.raises(DecodeError, match=rf"Row 2 of the copy of shop.numbers .* column '{name}'"):
            decoded_copy(copied([row, broken]), NUMBERS, binary.TYPES)


def test_damage_is_refused_or_leaves_a_copy() -> None:
    """Whatever comes, it is a DecodeError or a table with the right columns, never anything else."""
    messages, chance, refused = copied(ROWS), random.Random(11), 0
    for _ in range(400):
        damaged = chance.randrange(len(messages))
        octets = bytearray(messages[damaged])
        place = chance.randrange(len(octets))
        match chance.randrange(3):
            case 0:
                octets[place] = chance.randrange(256)
            case 1:
                del octets[place:]
            case 2:
                octets[place : place + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"])
        try:
            read = decoded_copy([*messages[:damaged], bytes(octets), *messages[damaged + 1 :]], ITEMS)
        except DecodeError:
            refused += 1
        else:
            read.validate(full=True)
            assert read.schema == copy_schema(ITEMS)
    assert 50 < refused < 390

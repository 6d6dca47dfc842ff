import struct

import pytest

from pgwal_pipeline.decode import pgoutput
from pgwal_pipeline.decode.pgoutput import RelationColumn, RelationMessage, TruncateMessage
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.wire import Wire, numeric, table

_items = table("ïtems", {"id": wire.INT4, "price": numeric(12, 2)}, oid=4_000_000_000)
RELATION = Wire().relation(_items).messages[0]
TRUNCATE = b"T" + struct.pack(">IBII", 2, 3, 10, 4_000_000_000)
TYPE = b"Y" + struct.pack(">I", 77) + b"shop\0mood\0"
ORIGIN = b"O" + struct.pack(">Q", 5) + b"elsewhere\0"
LOGICAL = b"M" + struct.pack(">BQ", 1, 9) + b"pgwal\0" + struct.pack(">I", 3) + b"abc"


def test_relation() -> None:
    assert pgoutput.parse_relation(RELATION) == RelationMessage(
        4_000_000_000, "shop", "ïtems", "d", (RelationColumn("id", 23, -1, True), RelationColumn("price", 1700, 786438, False))
    )


def test_a_schema_that_is_not_named_is_the_catalog() -> None:
    assert pgoutput.parse_relation(b"R" + struct.pack(">I", 1) + b"\0t\0f\0\0").schema == "pg_catalog"


def test_the_others() -> None:
    assert pgoutput.parse_truncate(TRUNCATE) == TruncateMessage((10, 4_000_000_000), cascade=True, restart_identity=True)
    assert pgoutput.parse_type(TYPE) == pgoutput.TypeMessage(77, "shop", "mood")
    assert pgoutput.parse_origin(ORIGIN) == pgoutput.OriginMessage(5, "elsewhere")
    assert pgoutput.parse_logical(LOGICAL) == pgoutput.LogicalMessage(True, 9, "pgwal", b"abc")


@pytest.mark.parametrize(
    ("parse", "payload"),
    [
        (pgoutput.parse_relation, RELATION),
        (pgoutput.parse_truncate, TRUNCATE),
        (pgoutput.parse_type, TYPE),
        (pgoutput.parse_origin, ORIGIN),
        (pgoutput.parse_logical, LOGICAL),
    ],
    ids=["relation", "truncate", "type", "origin", "logical"],
)
def test_a_payload_is_one_whole_message_and_no_more(parse, payload: bytes) -> None:
    parse(payload)
    for size in range(len(payload)):
        with pytest.raises(ValueError):
            parse(payload[:size])
    with pytest.raises(ValueError, match=r"follow where it should end|as long as"):
        parse(payload + b"\0")
    with pytest.raises(ValueError, match="kind"):
        parse(b"X" + payload[1:])


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="replica identity"):
        pgoutput.parse_relation(RELATION.replace(b"ms\0d", b"ms\0x"))
    with pytest.raises(ValueError, match="UTF-8"):
        pgoutput.parse_type(b"Y" + struct.pack(">I", 77) + b"sh\xffp\0mood\0")
    with pytest.raises(ValueError, match=r"too early|as long as"):
        pgoutput.parse_truncate(b"T" + struct.pack(">IB", 0xFFFFFFFF, 0))

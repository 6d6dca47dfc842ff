from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgwal_pipeline.decode import frames
from pgwal_pipeline.decode.batch import Decoded, Decoder, TableChanges
from pgwal_pipeline.decode.types import change_schema
from pgwal_pipeline.messages.errors import DecodeError
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.wire import UNCHANGED, Wire, array_of, describe_from, numeric, table

END = 1 << 62
ITEMS = table("items", {"id": wire.INT4, "name": wire.TEXT, "price": numeric(8, 2)})
ORDERS = table("orders", {"no": wire.INT8, "at": wire.TIMESTAMPTZ}, key=["no"])
BAG = table("bag", {"a": wire.INT4, "b": wire.TEXT}, key=(), identity="f")
WHOLE = table("whole", {"id": wire.INT4, "big": wire.TEXT, "n": wire.INT4}, key=["id"], identity="f")
PAIR = table("pair", {"x": wire.TEXT, "y": wire.TEXT, "z": wire.TEXT}, key=["x", "z"])
ALL = (ITEMS, ORDERS, BAG, WHOLE, PAIR)


def decode(messages: Sequence[bytes], *, start: int = 0, end: int = END) -> Decoded:
    return Decoder(describe_from(*ALL), start, end).feed(messages)


def changes_of(decoded: Decoded, relation: Relation) -> TableChanges:
    (found,) = [changes for changes in decoded.changes if changes.relation == relation]
    assert found.rows.schema == change_schema(relation)
    found.rows.validate(full=True)
    return found


def rows_of(decoded: Decoded, relation: Relation) -> list[tuple[Any, ...]]:
    """Operation, ordinal and source columns of each row, by ordinal with old keys before what replaced them."""
    rows = changes_of(decoded, relation).rows.to_pylist()
    rows.sort(key=lambda row: (row["_pgwal_commit_lsn"], row["_pgwal_ordinal"], row["_pgwal_op"] != "K"))
    return [(row["_pgwal_op"], row["_pgwal_ordinal"], *(row[name] for name in relation.column_names)) for row in rows]


def test_a_transaction() -> None:
    wire = Wire().begin(commit_lsn=0x2_0000_0000, committed_at=800_000_000_123_456, xid=4_294_967_295).relation(ITEMS)
    wire.insert(ITEMS, "1", "one", "1.50").update(ITEMS, "1", None, "2.00").delete(ITEMS, "1", None, None).commit()
    decoded = decode(wire.messages)
    changes = changes_of(decoded, ITEMS)
    assert rows_of(decoded, ITEMS)[0][:4] == ("I", 0, 1, "one")
    assert [str(value) for value in changes.rows["price"].to_pylist()] == ["1.50", "2.00", "None"]
    assert rows_of(decoded, ITEMS)[2] == ("D", 2, 1, None, None)
    assert changes.rows["_pgwal_commit_lsn"].to_pylist() == [0x2_0000_0000] * 3
    assert changes.rows["_pgwal_xid"].to_pylist() == [4_294_967_295] * 3
    committed = datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=800_000_000_123_456)
    assert changes.rows["_pgwal_committed_at"].to_pylist() == [committed] * 3
    assert changes.rows["_pgwal_unchanged"].null_count == changes.rows["_pgwal_text"].null_count == 3
    assert (changes.inserts, changes.updates, changes.deletes, changes.truncates, changes.key_changes) == (1, 1, 1, 0, 0)
    assert not changes.unchanged
    assert (decoded.transactions, decoded.changes_count) == (1, 3)
    assert decoded.last_commit_end_lsn == 0x2_0000_0030
    assert not decoded.in_transaction
    assert not decoded.passed_end
    assert decoded.relations == (ITEMS,)
    assert (decoded.min_xid, decoded.max_xid) == (4_294_967_295, 4_294_967_295)


def test_nothing() -> None:
    assert decode([]) == Decoded()
    assert decode(Wire().begin().commit().messages[:1]) == Decoded(in_transaction=True)
    empty = decode(Wire().begin(commit_lsn=0x2_0000_0000).commit().messages)
    assert empty == Decoded(last_commit_end_lsn=0x2_0000_0030)


def test_several_transactions_and_tables_in_one_feed() -> None:
    wire = Wire().begin().relation(ITEMS).insert(ITEMS, "1", "a", "1.00").relation(ORDERS).insert(ORDERS, "7", "2024-01-01 00:00:00+00")
    wire.insert(ITEMS, "2", "b", "2.00").commit()
    wire.begin().commit()
    wire.begin(xid=9).update(ORDERS, "7", "2024-01-02 00:00:00+00").insert(ITEMS, "3", "c", "3.00").commit()
    decoded = decode(wire.messages)
    assert [(op, ordinal, row) for op, ordinal, row, *_ in rows_of(decoded, ITEMS)] == [("I", 0, 1), ("I", 2, 2), ("I", 1, 3)]
    assert [(op, ordinal, row) for op, ordinal, row, *_ in rows_of(decoded, ORDERS)] == [("I", 1, 7), ("U", 0, 7)]
    assert len(set(changes_of(decoded, ITEMS).rows["_pgwal_commit_lsn"].to_pylist())) == 2
    assert (decoded.transactions, decoded.changes_count) == (2, 5)
    assert (decoded.min_xid, decoded.max_xid) == (9, 700)


def test_rows_of_small_tables_do_not_hold_the_memory_of_all() -> None:
    wire = Wire().begin().relation(ITEMS).relation(ORDERS).insert(ORDERS, "7", None)
    for number in range(2000):
        wire.insert(ITEMS, str(number), "x" * 200, "1.00")
    decoded = decode(wire.commit().messages)
    assert changes_of(decoded, ORDERS).rows.get_total_buffer_size() < 1000


def test_a_transaction_that_spans_feeds() -> None:
    wire = Wire().begin(commit_lsn=0x2_0000_0000).relation(ITEMS).insert(ITEMS, "1", "a", "1.00").insert(ITEMS, "2", "b", "1.00")
    wire.truncate(ITEMS).delete(ITEMS, "2", None, None).commit()
    decoder = Decoder(describe_from(*ALL), 0, END)
    fed = [decoder.feed([message]) for message in wire.messages]
    ordinals = [(op, ordinal) for decoded in fed if decoded.changes for op, ordinal, *_ in rows_of(decoded, ITEMS)]
    assert ordinals == [("I", 0), ("I", 1), ("T", 2), ("D", 3)]
    assert [decoded.in_transaction for decoded in fed] == [True] * 6 + [False]
    assert [decoded.transactions for decoded in fed] == [0] * 6 + [1]
    assert fed[-1].last_commit_end_lsn == 0x2_0000_0030
    assert {decoded.changes[0].rows["_pgwal_commit_lsn"][0].as_py() for decoded in fed if decoded.changes} == {0x2_0000_0000}


def test_transactions_before_the_window_are_skipped_whole() -> None:
    wire = Wire().begin(commit_lsn=0x2_0000_0000).relation(ITEMS).insert(ITEMS, "1", "a", "1.00").truncate(ITEMS).commit()
    wire.begin(commit_lsn=0x2_0000_1000).insert(ITEMS, "2", "b", "1.00").commit()
    decoded = decode(wire.messages, start=0x2_0000_1000)
    assert rows_of(decoded, ITEMS)[0][:3] == ("I", 0, 2)
    assert (decoded.transactions, decoded.changes_count, decoded.min_xid) == (1, 1, 701)
    assert decoded.relations == ()  # the window before told of it; it is not sent again
    assert [changes.relation for changes in decoded.changes] == [ITEMS]
    decoded = decode(wire.messages, start=0x2_0000_1001)
    assert decoded.changes == ()
    assert (decoded.transactions, decoded.changes_count, decoded.min_xid) == (0, 0, None)
    assert decoded.last_commit_end_lsn == 0x2_0000_1030
    # Nor does it matter what is in them, or where a feed ends.
    decoder = Decoder(describe_from(*ALL), 0x2_0000_1000, END)
    broken = [message.replace(b"\x01a", b"\x01\xff") for message in wire.messages]
    assert sum(decoder.feed([message]).changes_count for message in broken) == 1


def test_the_window_ends_at_the_first_transaction_past_it() -> None:
    wire = Wire().begin(commit_lsn=0x2_0000_0000).relation(ITEMS).insert(ITEMS, "1", "a", "1.00").commit()
    wire.begin(commit_lsn=0x2_0000_1000).insert(ITEMS, "2", "b", "1.00").commit().add(b"?")
    decoder = Decoder(describe_from(*ALL), 0, 0x2_0000_1000)
    decoded = decoder.feed(wire.messages)
    assert decoded.passed_end
    assert (decoded.transactions, decoded.changes_count, decoded.last_commit_end_lsn) == (1, 1, 0x2_0000_0030)
    assert not decoded.in_transaction
    assert decoder.feed(wire.messages) == Decoded(passed_end=True)
    assert not decode(wire.messages[:-1], end=0x2_0000_1001).passed_end
    # In a feed of its own.
    decoder = Decoder(describe_from(*ALL), 0, 0x2_0000_1000)
    assert [decoder.feed([message]).passed_end for message in wire.messages] == [False] * 4 + [True] * 4


def test_a_changed_key_gives_the_old_key_too() -> None:
    wire = Wire().begin().relation(ITEMS).update(ITEMS, "2", "b", "1.00", key=["1", None, None]).insert(ITEMS, "9", None, None).commit()
    decoded = decode(wire.messages)
    rows = rows_of(decoded, ITEMS)
    assert rows[0] == ("K", 0, 1, None, None)
    assert rows[1][:4] == ("U", 0, 2, "b")
    assert rows[2][:3] == ("I", 1, 9)
    assert (changes_of(decoded, ITEMS).key_changes, changes_of(decoded, ITEMS).updates, decoded.changes_count) == (1, 1, 2)


def test_an_old_key_that_is_the_new_one_gives_no_row() -> None:
    """The server sends the old key where it has a TOASTed part, changed or not; that part need not be in the new row."""
    wire = Wire().begin().relation(PAIR)
    wire.update(PAIR, "x1", "y", UNCHANGED, key=["x1", None, "z1"])
    wire.update(PAIR, "x2", UNCHANGED, UNCHANGED, key=["x1", None, "z1"])
    wire.update(PAIR, "x1", "y", "z2", key=["x1", None, "z1"])
    wire.update(PAIR, "ab", "y", "z2", key=["ac", None, "z2"])
    decoded = decode(wire.commit().messages)
    assert rows_of(decoded, PAIR) == [
        ("U", 0, "x1", "y", "z1"),
        ("K", 1, "x1", None, "z1"),
        ("U", 1, "x2", None, "z1"),
        ("K", 2, "x1", None, "z1"),
        ("U", 2, "x1", "y", "z2"),
        ("K", 3, "ac", None, "z2"),
        ("U", 3, "ab", "y", "z2"),
    ]
    assert [row for row in changes_of(decoded, PAIR).rows["_pgwal_unchanged"].to_pylist() if row] == [["y"]]


def test_replica_identity_full_with_a_key() -> None:
    wire = Wire().begin().relation(WHOLE)
    wire.update(WHOLE, "1", "new", "2", old=["1", "old", "1"])
    wire.update(WHOLE, "2", UNCHANGED, "2", old=["1", "big", "1"])
    wire.update(WHOLE, "2", UNCHANGED, None, old=["2", None, "1"])
    wire.delete(WHOLE, "2", "big", None, whole=True)
    decoded = decode(wire.commit().messages)
    assert rows_of(decoded, WHOLE) == [
        ("U", 0, 1, "new", 2),
        ("K", 1, 1, "big", 1),
        ("U", 1, 2, "big", 2),
        ("U", 2, 2, None, None),
        ("D", 3, 2, "big", None),
    ]
    # What no row of the message has stays marked.
    unchanged = changes_of(decoded, WHOLE).rows
    assert [row["_pgwal_ordinal"] for row in unchanged.to_pylist() if row["_pgwal_unchanged"] == ["big"]] == [2]


def test_a_table_without_a_key_always_gives_the_old_row() -> None:
    wire = Wire().begin().relation(BAG)
    wire.update(BAG, "1", "x", old=["1", "x"]).update(BAG, "2", "x", old=["1", "x"]).delete(BAG, "2", "x", whole=True)
    decoded = decode(wire.commit().messages)
    assert rows_of(decoded, BAG) == [
        *[("K", 0, 1, "x"), ("U", 0, 1, "x"), ("K", 1, 1, "x"), ("U", 1, 2, "x"), ("D", 2, 2, "x")],
    ]
    assert (decoded.changes_count, changes_of(decoded, BAG).key_changes) == (3, 2)


def test_truncate() -> None:
    wire = Wire().begin().relation(ITEMS).relation(ORDERS).insert(ITEMS, "1", "a", "1.00").truncate(ITEMS, ORDERS).truncate(ORDERS)
    wire.insert(ORDERS, "2", None)
    decoded = decode(wire.commit().messages)
    assert rows_of(decoded, ITEMS)[1] == ("T", 1, None, None, None)
    assert rows_of(decoded, ORDERS) == [("T", 2, None, None), ("T", 3, None, None), ("I", 4, 2, None)]
    assert (changes_of(decoded, ORDERS).truncates, decoded.changes_count) == (2, 5)
    assert decode(Wire().begin().relation(ITEMS).truncate(ITEMS).commit().messages).transactions == 1


def test_values_that_were_not_sent() -> None:
    wire = (
        Wire()
        .begin()
        .relation(ITEMS)
        .update(ITEMS, "1", UNCHANGED, UNCHANGED)
        .update(ITEMS, "2", "b", UNCHANGED)
        .update(ITEMS, "3", "c", None)
    )
    decoded = decode(wire.commit().messages)
    changes = changes_of(decoded, ITEMS)
    assert changes.rows["_pgwal_unchanged"].to_pylist() == [["name", "price"], ["price"], None]
    assert changes.rows["name"].to_pylist() == [None, "b", "c"]
    assert changes.unchanged


def test_values_that_do_not_fit() -> None:
    odd = table("odd", {"id": wire.INT4, "day": wire.DATE, "n": numeric(4, 1), "days": array_of(wire.DATE), "day2": wire.DATE})
    sent = Wire().begin().relation(odd)
    sent.insert(odd, "1", "infinity", "NaN", "{{2024-01-01}}", "2024-01-01").insert(odd, "2", "2024-01-02", "1.5", "{}", None)
    sent.insert(odd, "3", None, None, "{2024-01-01,-infinity}", "0044-03-15 BC").delete(odd, "4", None, None, None, None)
    decoded = Decoder(describe_from(odd), 0, END).feed(sent.commit().messages)
    assert changes_of(decoded, odd).rows["_pgwal_text"].to_pylist() == [
        [("day", "infinity"), ("n", "NaN"), ("days", "{{2024-01-01}}")],
        None,
        [("days", "{2024-01-01,-infinity}"), ("day2", "0044-03-15 BC")],
        None,
    ]
    assert changes_of(decoded, odd).rows["day"].null_count == 3


def test_a_definition_that_changes_in_the_middle() -> None:
    wider = table("items", {"id": wire.INT4, "name": wire.TEXT, "price": numeric(8, 2), "colour": wire.TEXT})
    sent = (
        Wire()
        .begin()
        .relation(ITEMS)
        .relation(ORDERS)
        .insert(ITEMS, "1", "a", "1.00")
        .relation(wider)
        .insert(wider, "2", "b", "2.00", "red")
    )
    sent.insert(ORDERS, "1", None).relation(ITEMS).relation(ITEMS).insert(ITEMS, "3", "c", "3.00").commit()
    decoder = Decoder(describe_from(ITEMS, wider, ORDERS), 0, END)
    decoded = decoder.feed(sent.messages)
    assert decoded.relations == (ITEMS, ORDERS, wider, ITEMS)
    of_items = [(changes.relation, changes.rows["id"].to_pylist()) for changes in decoded.changes if changes.relation.oid == ITEMS.oid]
    assert of_items == [(ITEMS, [1]), (wider, [2]), (ITEMS, [3])]
    assert rows_of(decoded, ORDERS) == [("I", 2, 1, None)]
    # The last one holds on, and what came before is forgotten.
    later = Wire(lsn=sent.lsn).begin().insert(ITEMS, "4", "d", "4.00").relation(ITEMS).insert(ITEMS, "5", "e", None).commit()
    decoded = decoder.feed(later.messages)
    assert decoded.relations == ()
    assert [row[2] for row in rows_of(decoded, ITEMS)] == [4, 5]


def test_a_key_that_changes_without_the_columns() -> None:
    """A primary key added under replica identity full does not show in the message; the catalog tells."""
    keyed = table("bag", {"a": wire.INT4, "b": wire.TEXT}, key=["a"], identity="f")
    definitions = iter([BAG, keyed])
    sent = Wire().begin().relation(BAG).update(BAG, "1", "y", old=["1", "x"]).relation(BAG).update(BAG, "1", "z", old=["1", "y"]).commit()
    decoded = Decoder(lambda _: next(definitions), 0, END).feed(sent.messages)
    assert decoded.relations == (BAG, keyed)
    assert [(changes.relation, changes.key_changes) for changes in decoded.changes] == [(BAG, 1), (keyed, 0)]


def test_a_table_that_is_not_wanted_is_left_out() -> None:
    sent = (
        Wire()
        .begin()
        .relation(ITEMS)
        .relation(ORDERS)
        .insert(ITEMS, "1", "a", "1.00")
        .insert(ORDERS, "1", None)
        .truncate(ITEMS, ORDERS)
        .commit()
    )
    decoder = Decoder(lambda message: None if message.oid == ITEMS.oid else ORDERS, 0, END)
    decoded = decoder.feed(sent.messages)
    assert decoded.relations == (ORDERS,)
    assert [changes.relation for changes in decoded.changes] == [ORDERS]
    assert rows_of(decoded, ORDERS) == [("I", 1, 1, None), ("T", 3, None, None)]
    assert decoded.changes_count == 2


def test_messages_that_change_nothing() -> None:
    sent = Wire().begin().add(b"O" + bytes(8) + b"there\0").add(b"Y" + bytes(4) + b"shop\0mood\0").relation(ITEMS)
    sent.add(b"M\x01" + bytes(8) + b"pgwal\0" + bytes(4)).insert(ITEMS, "1", "a", "1.00").commit().add(
        b"M\x00" + bytes(8) + b"x\0" + bytes(4)
    )
    decoded = decode(sent.messages)
    assert rows_of(decoded, ITEMS)[0][:3] == ("I", 0, 1)
    assert decoded.transactions == 1
    only_emitted = Wire().begin().add(b"M\x01" + bytes(8) + b"pgwal\0" + bytes(4)).commit()
    assert decode(only_emitted.messages).transactions == 0


def test_tables_without_columns() -> None:
    bare = table("bare", {}, key=(), identity="f")
    sent = Wire().begin().relation(bare).insert(bare).insert(bare).update(bare, old=[]).delete(bare, whole=True).truncate(bare).commit()
    decoded = Decoder(describe_from(bare), 0, END).feed(sent.messages)
    assert sorted(changes_of(decoded, bare).rows["_pgwal_op"].to_pylist()) == ["D", "I", "I", "K", "T", "U"]


def test_columns_of_a_kind_are_told_apart() -> None:
    """Columns that are cast together, of rows with and without old tuples, end up where they belong."""
    wide = table("wide", {f"c{number}": wire.INT4 if number % 2 else wire.TEXT for number in range(40)}, key=["c1"])
    sent = Wire().begin().relation(wide).relation(ITEMS)
    rows = [[str(row * 100 + column) for column in range(40)] for row in range(30)]
    for number, row in enumerate(rows):
        sent.insert(ITEMS, str(number), "a", None)
        if number % 3:
            sent.update(wide, *row, key=[None, "5", *[None] * 38])
        else:
            sent.insert(wide, *row)
    decoded = Decoder(describe_from(wide, ITEMS), 0, END).feed(sent.commit().messages)
    made = [row[2:] for row in rows_of(decoded, wide) if row[0] != "K"]
    assert made == [tuple(int(text) if column % 2 else text for column, text in enumerate(row)) for row in rows]
    assert changes_of(decoded, wide).key_changes == 20


def test_feeds_that_need_several_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Wire().begin().relation(ITEMS).relation(ORDERS)
    for number in range(50):
        sent.insert(ITEMS, str(number), "x" * 50, "1.00").insert(ORDERS, str(number), None)
    whole = decode(sent.commit().messages)
    monkeypatch.setattr(frames, "PORTION", 500)
    parted = decode(sent.messages)
    assert len(parted.changes) == 2
    assert parted.changes[0].rows["id"].num_chunks > 5
    assert rows_of(parted, ITEMS) == rows_of(whole, ITEMS)
    assert rows_of(parted, ORDERS) == rows_of(whole, ORDERS)
    assert (parted.transactions, parted.changes_count, parted.relations) == (1, 100, (ITEMS, ORDERS))
    assert [changes.inserts for changes in parted.changes] == [50, 50]


def refused(messages: Sequence[bytes]) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        decode(messages)
    return caught.value


def started() -> Wire:
    return Wire().begin().relation(ITEMS).insert(ITEMS, "1", "a", "1.00")


def test_an_error_names_what_is_wrong_and_where() -> None:
    sent = started().insert(ITEMS, "2", "b", "2.00").insert(ITEMS, "x", "b", "2.00").commit()
    with pytest.raises(DecodeError) as caught:
        Decoder(describe_from(*ALL), 0, END).feed(sent.messages, sent.positions)
    error = caught.value
    assert "shop.items" in str(error)
    assert "'id'" in str(error)
    assert "'x' is no int32" in str(error)
    assert "1/1140" in str(error)
    assert "49 00 00" in str(error)
    assert error.lsn == 0x1_0000_1140
    assert error.payload == sent.messages[4]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"Z", "no message of this kind"),
        (b"b" + bytes(40), "no message of this kind"),
        (b"", "no payload"),
        (b"B" + bytes(19), "its size is wrong for its kind"),
        (b"C" + bytes(26), "its size is wrong for its kind"),
        (b"B" + bytes(20), "before the previous one has ended"),
        (b"C" + bytes(25), "does not match the Begin"),
        (b"I", "too short"),
        (b"I" + bytes(4) + b"N\0\0", "has not been described"),
        (b"T\0\0\0\1\0\0\0\0\1", "has not been described"),
        (b"T\0\0\0\2\0\0\0\0\1", "as long as"),
        (b"R" + bytes(9), "replica identity"),
        (b"Y\0", "too early"),
    ],
)
def test_messages_that_are_none(payload: bytes, reason: str) -> None:
    error = refused(started().add(payload).messages)
    assert reason in str(error)
    assert error.payload == payload


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"N\0\3", "goes on past"),
        (b"N\0\3nn", "goes on past"),
        (b"N\0\3nnt", "goes on past"),
        (b"N\0\3nnt\0\0\0\5aaaa", "goes on past"),
        (b"N\0\3nnt\xff\xff\xff\xffaaaa", "goes on past"),
        (b"N\0\3nnnn", "end 1 bytes before"),
        (b"N\0\3nbn", "marked 'b'"),
        (b"N\0\2nn", "2 columns"),
        (b"N\xff\xffnnn", "65535 columns"),
        (b"X\0\3nnn", "not marked"),
    ],
)
def test_rows_that_are_none(tail: bytes, reason: str) -> None:
    oid = ITEMS.oid.to_bytes(4)
    for kind in (b"I", b"U"):
        error = refused(started().add(kind + oid + tail).insert(ITEMS, "3", "c", "3.00").commit().messages)
        assert reason in str(error)
        assert error.payload == kind + oid + tail
        assert "shop.items" in str(error)
    after = tail if reason != "not marked" else b"X\0\3nnn"
    error = refused(started().add(b"U" + oid + b"K\0\3nnn" + after).insert(ITEMS, "3", "c", "3.00").commit().messages)
    assert "shop.items" in str(error)


def test_tuples_that_do_not_belong_to_their_kind() -> None:
    oid = ITEMS.oid.to_bytes(4)
    for payload in (b"I" + oid + b"K\0\3nnn", b"D" + oid + b"N\0\3nnn", b"U" + oid + b"K\0\3nnn", b"U" + oid + b"O\0\3nnnK\0\3nnn"):
        refused(started().add(payload).messages)


def test_transactions_that_do_not_follow_each_other() -> None:
    assert "outside of a transaction" in str(refused(Wire().relation(ITEMS).insert(ITEMS, "1", "a", "1.00").messages))
    assert "outside of a transaction" in str(refused(started().commit().insert(ITEMS, "1", "a", "1.00").messages))
    assert "outside of a transaction" in str(refused(started().commit().truncate(ITEMS).messages))
    assert "did not begin" in str(refused(Wire().begin().commit().commit().messages))
    assert "before the previous one" in str(refused(started().begin().messages))
    again = Wire().begin(commit_lsn=0x2_0000_0000).commit().begin(commit_lsn=0x2_0000_0000).commit()
    assert "not in commit order" in str(refused(again.messages))
    decoder = Decoder(describe_from(*ALL), 0, END)
    with pytest.raises(DecodeError, match="not in commit order"):
        for message in again.messages:
            decoder.feed([message])
    decoder = Decoder(describe_from(*ALL), 0, 0x3_0000_0000)
    decoder.feed(started().messages)
    with pytest.raises(DecodeError, match="before the previous one"):
        decoder.feed(Wire().begin(commit_lsn=0x3_0000_0000).messages)


def test_a_time_that_no_column_holds() -> None:
    latest = (1 << 63) - 1 - 946_684_800_000_000
    assert (
        len(
            changes_of(
                decode(Wire().begin(committed_at=latest).relation(ITEMS).insert(ITEMS, "1", "a", None).commit().messages), ITEMS
            ).rows
        )
        == 1
    )
    with pytest.raises(DecodeError, match="its commit time is out of range"):
        decode(Wire().begin(committed_at=latest + 1).relation(ITEMS).insert(ITEMS, "1", "a", None).commit().messages)


def test_a_definition_that_disagrees_with_the_message() -> None:
    with pytest.raises(DecodeError, match="3 columns, the table's definition 2"):
        Decoder(lambda _: ORDERS, 0, END).feed(Wire().begin().relation(ITEMS).messages)


def test_a_message_that_has_no_position_is_named_by_the_one_before() -> None:
    sent = started().relation(ITEMS).add(b"R" + bytes(9), lsn=0)
    assert sent.positions[-2:] == [0, 0]
    with pytest.raises(DecodeError) as caught:
        Decoder(describe_from(*ALL), 0, END).feed(sent.messages, sent.positions)
    assert caught.value.lsn == sent.positions[2] > 0


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_partitions_whose_rows_come_as_the_tables(size: int) -> None:
    """A table is described before its partition; what is truncated is described as well, and comes as itself."""
    whole, part, other = (table(name, {"id": wire.INT4}) for name in ("whole", "part", "other"))
    sent = Wire().begin().relation(whole).relation(part).insert(whole, "1").relation(other).insert(other, "2").commit()
    sent.begin().relation(whole).relation(other).truncate(whole, other).relation(part).delete(whole, "1").commit()
    decoder = Decoder(describe_from(whole, part, other), 0, END)
    feeds = [decoder.feed(sent.messages[first : first + size]) for first in range(0, len(sent.messages), size)]
    found = {pair for decoded in feeds for pair in decoded.partitions}
    assert found == {(whole.oid, part.oid)}

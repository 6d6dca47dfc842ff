"""What is gathered of a window, feed by feed, from messages as a server sends them."""

from collections.abc import Iterable

from pgwal_pipeline.decode.batch import Decoder
from pgwal_pipeline.decode.route import MARKS
from pgwal_pipeline.lake.stream_facts import Refusal
from pgwal_pipeline.pipeline.tally import Tally, WindowRead
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.wire import UNCHANGED, Wire, describe_from, table

ITEMS = table("items", {"id": wire.INT4, "name": wire.TEXT})
WIDER = table("items", {"id": wire.INT4, "name": wire.TEXT, "n": wire.INT4})
ORDERS = table("orders", {"no": wire.INT8})


def tallied(*feeds: Iterable[bytes]) -> WindowRead:
    decoder, tally = Decoder(describe_from(ITEMS, WIDER, ORDERS), 0, 1 << 62), Tally()
    for feed in feeds:
        tally.add(decoder.feed([*feed]))
    return tally.read(10, 20, (), {}, 1.5)


def test_nothing() -> None:
    read = tallied()
    assert (read.transactions, read.changes, read.min_xid, read.max_xid, read.marks) == (0, 0, None, None, ())
    assert read.facts == type(read.facts)()


def test_a_table_that_was_described_in_a_window_before() -> None:
    """The server describes it once in a session: its definition is told by its rows then, and goes before those described later."""
    decoder, tally = Decoder(describe_from(ITEMS, WIDER), 0, 1 << 62), Tally()
    decoder.feed(Wire().begin().relation(ITEMS).insert(ITEMS, "1", "a").commit().messages)
    later = Wire(xid=800).begin(commit_lsn=0x2_0000_0000).insert(ITEMS, "2", "b").commit()
    later.begin(commit_lsn=0x2_0000_1000).relation(WIDER).insert(WIDER, "3", "c", "1").commit()
    tally.add(decoder.feed(later.messages))
    assert tally.read(10, 20, (), {}, 0).facts.relations == {ITEMS.oid: (ITEMS, WIDER)}


def test_a_definition_that_comes_back_is_the_last_one() -> None:
    """What counts is the order in which each came last."""
    sent = Wire().begin().relation(ITEMS).insert(ITEMS, "1", "a").relation(WIDER).insert(WIDER, "2", "b", "1")
    sent.relation(ITEMS).insert(ITEMS, "3", "c").commit()
    assert tallied(sent.messages).facts.relations == {ITEMS.oid: (WIDER, ITEMS)}


def test_emptied_and_filled_by_one_transaction_or_by_two() -> None:
    sent = Wire().begin(xid=701).relation(ITEMS).relation(ORDERS).insert(ORDERS, "1").truncate(ITEMS, ORDERS).commit()
    sent.begin(xid=702).insert(ITEMS, "1", "a").commit()
    facts = tallied(sent.messages).facts
    assert facts.truncated == {ITEMS.oid: frozenset({701}), ORDERS.oid: frozenset({701})}
    assert facts.refilled == {ORDERS.oid}, "which transaction wrote is told, not whether before or after"
    apart = Wire().begin(xid=701).relation(ITEMS).truncate(ITEMS).insert(ITEMS, "1", "a").commit()
    assert tallied(*([message] for message in apart.messages)).facts.refilled == {ITEMS.oid}, "in another feed"


def test_only_an_insert_may_lack_values_by_fault() -> None:
    updated = Wire().begin().relation(ITEMS).update(ITEMS, "1", UNCHANGED).insert(ITEMS, "2", "b").commit()
    assert tallied(updated.messages).facts.lacking == frozenset()
    inserted = Wire().begin().relation(ITEMS).insert(ITEMS, "1", UNCHANGED).commit()
    assert tallied(inserted.messages).facts.lacking == {ITEMS.oid}


def test_only_the_last_transactions_are_marked_and_all_are_counted() -> None:
    sent = Wire().begin().relation(ORDERS).insert(ORDERS, "0").commit()
    for number in range(MARKS + 2):
        sent.begin().insert(ORDERS, str(number)).commit()
    read = tallied(*([message] for message in sent.messages))
    assert (read.transactions, len(read.marks)) == (MARKS + 3, MARKS)
    assert [mark.xid for mark in read.marks] == [*range(703, 703 + MARKS)]
    assert (read.min_xid, read.max_xid) == (700, 702 + MARKS)


def test_what_was_refused_is_told() -> None:
    refusal = Refusal(ITEMS.oid, "write", "It could not be written.", 15)
    assert Tally().read(10, 20, (), {"shop.items": refusal}, 0).facts.refused == {"shop.items": refusal}

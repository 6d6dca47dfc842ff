"""What two looks at a table and the stream say of it: whether its rows are known, or have to be read again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.lake.stream_facts import StreamFacts
from pgwal_pipeline.pipeline.alterations import CatalogEntry, altered, dropped, rewritten, swapped_names
from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName
from pgwal_pipeline.values.storage import Storage, StoredColumn, StoredFile
from pgwal_pipeline.values.xid import Snapshot

OID = 16_384
INT, TEXT = PgType(23, -1, "integer"), PgType(25, -1, "text")
TYPES = {kind.oid: kind for kind in (INT, TEXT)}
FILE = StoredFile(OID, node=OID, xid=700)


def column(number: int, name: str, kind: PgType = TEXT, *, default_of_old: bool = False) -> StoredColumn:
    return StoredColumn(number, name, kind.oid, default_of_old)


def entry(*columns: StoredColumn, key: Sequence[str] = ("id",), files: Sequence[StoredFile] = (FILE,)) -> CatalogEntry:
    made = tuple(Column(stored.name, TYPES[stored.type_oid]) for stored in columns)
    return CatalogEntry(Relation(OID, TableName("public", "t"), "d", made, tuple(key)), Storage(columns, tuple(files), (1, 2)))


ID, V = column(1, "id", INT), column(2, "v")
BEFORE = entry(ID, V)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (BEFORE, None),
        (entry(ID), None),
        (entry(ID, V, column(3, "w")), None),
        (entry(ID, V, key=("v",)), "its key changed from (id) to (v)"),
        (entry(ID, column(2, "w")), "its column v was renamed to w"),
        (entry(ID, column(2, "v", INT)), "its column v has another type"),
        (entry(ID, V, column(3, "w", default_of_old=True)), "w was added with a default"),
        (entry(ID, column(3, "v")), "its column v was dropped and added again"),
        (entry(ID, column(3, "V")), "its column V was dropped and added again"),
        (entry(ID, V, column(4, "gone")), "its column gone was dropped and added again"),
        (
            entry(ID, V, column(3, "w"), files=[replace(FILE, node=99)]),
            "its column w was added and every row rewritten with a value for it",
        ),
        (entry(ID, V, files=[replace(FILE, node=99)]), None),
    ],
)
def test_altered(now: CatalogEntry, reason: str | None) -> None:
    found = altered(BEFORE.relation, BEFORE.storage, now, ["Gone"])
    assert (found is None) == (reason is None), found
    assert (reason or "") in (found or "")


def test_a_column_that_was_not_published_before() -> None:
    known = replace(BEFORE.relation, columns=BEFORE.relation.columns[:1])
    assert altered(known, BEFORE.storage, BEFORE, ()) == "its column v was not published before"


def test_dropped_names_stay_until_they_are_taken_again() -> None:
    state = TableState(TableName("public", "t"), OID, "ready", dropped=("old", "Other"))
    assert dropped(state, BEFORE.storage, entry(ID).storage) == ("old", "Other", "v")
    assert dropped(state, BEFORE.storage, entry(ID, column(3, "other")).storage) == ("old", "v")
    assert dropped(state, BEFORE.storage, entry(ID, column(3, "v")).storage) == ("old", "Other")
    assert dropped(replace(state, dropped=("v",)), BEFORE.storage, entry(ID).storage) == ("v",), "once"


def shown(*names: str) -> Relation:
    return Relation(OID, TableName("public", "t"), "d", tuple(Column(name, TEXT) for name in names), names[:1])


@pytest.mark.parametrize(
    ("before", "versions", "now", "mixed"),
    [
        ("id a b", [], "id a b", False),
        ("id a b", ["id b a", "id a b"], "id a b", True),
        ("id a b", ["id x b", "id a b"], "id a b", True),  # what has a name now had another one for a while
        ("id a", ["id a c"], "id a c", False),
        ("id a", ["id c", "id a"], "id a c", True),
        ("id a b", ["id a"], "id a", False),
        ("id a b", ["id b"], "id b c", False),
        ("id a b", ["id b a"], "id", True),
    ],
)
def test_columns_that_had_each_others_names(before: str, versions: list[str], now: str, mixed: bool) -> None:
    found = swapped_names(before.split(), [shown(*version.split()) for version in versions], [shown(*now.split())])
    assert found is mixed


PART = StoredFile(20_000, node=20_000, xid=690)
SEES = Snapshot(800, 800)


@pytest.mark.parametrize(
    ("before", "now", "facts", "reason"),
    [
        ([FILE], [FILE], StreamFacts(), None),
        ([FILE], [replace(FILE, node=2, xid=750)], StreamFacts(), "it was rewritten"),
        ([FILE], [replace(FILE, node=2, xid=750)], StreamFacts(truncated={OID: frozenset({750})}), None),
        ([FILE], [replace(FILE, node=2, xid=750)], StreamFacts(truncated={OID: frozenset({749})}), "it was rewritten"),
        ([FILE], [replace(FILE, node=2, xid=750, altered=True)], StreamFacts(truncated={OID: frozenset({750})}), "it was rewritten"),
        ([PART], [], StreamFacts(), "a partition was detached or dropped"),
        ([], [PART], StreamFacts(), None),
        ([], [replace(PART, attached=(750,))], StreamFacts(), "a partition was attached"),
        ([replace(PART, attached=(700,))], [replace(PART, attached=(750,))], StreamFacts(), "a partition was detached and attached again"),
        ([PART], [PART], StreamFacts(partitions={OID: frozenset({PART.oid, 20_001})}), "a partition was added and removed again"),
        ([FILE], [FILE], StreamFacts(refilled=frozenset({OID})), None),
        ([PART], [PART], StreamFacts(refilled=frozenset({OID})), "one transaction truncated and filled it"),
    ],
)
def test_rewritten(before: list[StoredFile], now: list[StoredFile], facts: StreamFacts, reason: str | None) -> None:
    found, storage = rewritten(OID, Storage((), tuple(before), ()), Storage((), tuple(now), ()), facts, SEES)
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)
    assert storage.files == tuple(now)


@pytest.mark.parametrize("ended", [None, Snapshot(750, 751, frozenset({750}))], ids=["the stream goes on", "it had not ended"])
def test_a_new_file_of_a_transaction_that_may_still_be_told_of_is_left_for_the_next_look(ended: Snapshot | None) -> None:
    new = replace(FILE, node=2, xid=750)
    assert rewritten(OID, Storage((), (FILE,), ()), Storage((), (new,), ()), StreamFacts(), ended) == (None, Storage((), (FILE,), ()))

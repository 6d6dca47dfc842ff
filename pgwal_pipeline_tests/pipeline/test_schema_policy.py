"""What a table's option `on_schema_change` makes of a change; the scenarios of options have it with a source and a lake."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.pipeline.alterations import CatalogEntry
from pgwal_pipeline.pipeline.schema_policy import begun, differences, judged, otherwise_protected, summary, taken
from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName
from pgwal_pipeline.values.storage import Storage
from pgwal_pipeline.values.table_options import Options

INT, BIG, TEXT = PgType(23, -1, "integer"), PgType(20, -1, "bigint"), PgType(25, -1, "text")
T = TableName("public", "t")
STORAGE = Storage((), (), ())


def relation(**columns: PgType) -> Relation:
    return Relation(1, T, "d", tuple(Column(name, kind, name == "id") for name, kind in columns.items()), ("id",))


def state(policy: str, now: Relation, accepted: Relation | None) -> TableState:
    options = Options(on_schema_change=policy)
    return TableState(
        T, 1, "ready", relation=now, storage=STORAGE, generation="g", published="g", accepted=accepted, options=options.to_text()
    )


def entry(policy: str, now: Relation) -> CatalogEntry:
    return CatalogEntry(now, STORAGE, Options(on_schema_change=policy))


WAS, NOW = relation(id=INT, a=INT, b=TEXT), relation(id=INT, c=TEXT, a=BIG)


def test_differences() -> None:
    assert summary(differences(WAS, NOW)) == "column a was integer and is bigint, column b is gone, column c text is new"
    renamed_type = replace(WAS, columns=tuple(replace(column, type=replace(column.type, name="mood")) for column in WAS.columns))
    assert differences(WAS, renamed_type) == ()


def test_what_current_takes_of_a_frozen_table() -> None:
    found = taken(state("freeze", NOW, WAS))
    assert found.relation.columns == WAS.columns
    assert found.arriving is not None
    assert [column.type for column in found.arriving.columns] == [INT, BIG, TEXT]
    assert (found.keep, found.order) == (("b",), ("id", "a", "b"))
    bag = taken(state("freeze", replace(NOW, key=()), WAS))
    assert bag.relation.column_names == ("id", "a")
    assert taken(state("propagate", NOW, None)).relation == NOW
    assert taken(state("stop", NOW, WAS)).relation == NOW


@pytest.mark.parametrize(
    ("was", "policy", "accepted", "reason"),
    [
        ("propagate", "stop", WAS, None),
        ("propagate", "freeze", WAS, None),
        ("stop", "propagate", None, None),
        ("freeze", "stop", WAS, "it is read again: its columns are not frozen any more"),
        ("freeze", "propagate", None, "it is read again: its columns are not frozen any more"),
        ("stop", "freeze", WAS, None),
    ],
)
def test_the_option_changes(was: str, policy: str, accepted: Relation | None, reason: str | None) -> None:
    before = state(was, WAS if was == "propagate" else NOW, None if was == "propagate" else WAS)
    found = begun(before, entry(policy, NOW))
    assert (found.accepted, found.reason) == (accepted, reason)


def test_who_is_held_back() -> None:
    assert judged(state("stop", NOW, WAS), entry("stop", WAS)).held is None
    assert judged(state("stop", NOW, None), entry("stop", NOW)).held is None
    assert "`pgwal accept 'public.t'`" in (judged(state("stop", NOW, WAS), entry("stop", NOW)).held or "")
    assert judged(state("freeze", NOW, WAS), entry("freeze", NOW)).held is None
    other_key = replace(NOW, key=("c",))
    assert "the column c of its key is not among them" in (judged(state("freeze", NOW, WAS), entry("freeze", other_key)).held or "")
    wide_key = relation(id=BIG, a=INT, b=TEXT)
    assert "the column id of its key was integer" in (judged(state("freeze", WAS, WAS), entry("freeze", wide_key)).held or "")
    lists = relation(id=INT, a=PgType(1007, -1, "integer[]", INT), b=TEXT)
    assert "integer[] cannot be kept as integer" in (judged(state("freeze", WAS, WAS), entry("freeze", lists)).held or "")


def test_other_protection() -> None:
    masked = replace(NOW, columns=tuple(replace(column, protection="mask:last4") for column in NOW.columns if column.name != "a"))
    options = Options(exclude=("a",), mask=(("c", "last4"),), on_schema_change="freeze")
    kept = otherwise_protected(replace(WAS, key=()), CatalogEntry(replace(masked, key=()), STORAGE, options))
    assert kept is not None
    assert kept.column_names == ("id", "b")
    assert otherwise_protected(WAS, entry("stop", NOW)) is None


def test_a_table_in_error_that_is_held_back_too() -> None:
    failed = replace(state("stop", NOW, WAS).failed("merge", "It failed.", datetime.now(UTC)), held="it is held back: why")
    assert failed.trouble == "It failed. Table public.t: it is held back: why."
    assert replace(failed, held=None).trouble == "It failed."
    assert replace(failed, state="ready").trouble == "Table public.t: it is held back: why."
    assert replace(failed, state="ready", held=None).trouble is None

"""What the options make of a table's definition."""

from pgwal_pipeline.lake.records import relation_from_json, relation_to_json
from pgwal_pipeline.values.protection import NO_PROTECTION, Protection, other_key
from pgwal_pipeline.values.table_options import parse_options
from pgwal_pipeline_tests.decode.wire import INT4, TEXT, table

PEOPLE = table("people", {"id": INT4, "ssn": TEXT, "email": TEXT, "phone": TEXT, "name": TEXT})
OPTIONS = parse_options({"shop.people": {"exclude": ["ssn"], "hash": ["email"], "mask": {"phone": "last4"}}})


def test_a_definition_as_its_options_make_it() -> None:
    protection = Protection(OPTIONS, b"the key")
    found = protection.relation(PEOPLE)
    assert found.column_names == ("id", "email", "phone", "name")
    assert [column.protection for column in found.columns] == [None, f"hash:{protection.fingerprint}", "mask:last4", None]
    assert protection.relation(found) == found
    assert relation_from_json(relation_to_json(found)) == found
    assert NO_PROTECTION.relation(PEOPLE) is PEOPLE
    assert found.is_protected
    assert not found.hides_key


def test_the_key_shows_nowhere() -> None:
    protection = Protection(OPTIONS, b"the key")
    texts = [repr(protection), str(protection), relation_to_json(protection.relation(PEOPLE)), protection.fingerprint]
    assert [text for text in texts if "the key" in text] == []


def test_another_key_is_found() -> None:
    one, other = Protection(OPTIONS, b"one"), Protection(OPTIONS, b"other")
    columns = one.relation(PEOPLE).columns
    assert not other_key(columns, one.fingerprint)
    assert other_key(columns, other.fingerprint)
    assert not other_key(PEOPLE.columns, other.fingerprint)


def misused(options: dict[str, object]) -> str | None:
    return Protection(parse_options({"shop.*": options}), b"k").misused(PEOPLE)


def test_what_does_not_fit_a_table() -> None:
    assert misused({"exclude": ["s*"], "hash": ["*"]}) is None
    assert misused({"exclude": ["id"]}) == (
        "cannot have its column 'id' excluded, as it is part of the key that tells rows apart; hash it instead"
    )
    assert misused({"mask": {"*": "last4"}}) == (
        "cannot have its column 'id' masked, as it is part of the key that tells rows apart; hash it instead"
    )
    bag = table("people", {"a": TEXT}, key=())
    everything = Protection(parse_options({"shop.*": {"exclude": ["*"]}}))
    assert everything.misused(bag) == "cannot have all of its columns excluded; leave it out of PGWAL_TABLES instead"

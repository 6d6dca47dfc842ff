"""How options are parsed, which of them a table gets, and what is said of those that cannot be used."""

import json
from typing import Any

import pytest

from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import NOTHING, OptionError, Options, TableOptions, parse_options

ORDERS = TableName("shop", "orders")


def test_the_later_glob_wins_option_by_option() -> None:
    found = parse_options(
        {
            "*.*": {"exclude": ["ssn"], "hash": ["email"], "rows": "a = 1"},
            "shop.*": {"exclude": ["pin"], "mask": {"phone": "last4"}},
            "shop.orders": {"rows": None},
            "other.*": {"exclude": []},
        }
    )
    assert found.of(ORDERS) == Options(("pin",), ("email",), (("phone", "last4"),), None)
    assert found.of(TableName("other", "x")) == Options((), ("email",), (), "a = 1")
    assert found.of(TableName("public", "x")).to_json() == {"exclude": ["ssn"], "hash": ["email"], "rows": "a = 1"}
    assert found.hashes
    assert found.protects
    assert parse_options({"a.b": {"rows": "x = 1"}}).protects is False


def test_globs_of_columns() -> None:
    options = parse_options({"shop.*": {"exclude": ["ssn", "*_secret"], "hash": ["e*", '"a*b"'], "mask": {"*": "last4"}}}).of(ORDERS)
    treated = {name: options.treatment(name) for name in ("ssn", "Ssn", "x_secret", "email", "e_secret", "a*b", "aab")}
    assert treated == {
        "ssn": "exclude",
        "Ssn": "last4",
        "x_secret": "exclude",
        "email": "hash",
        "e_secret": "exclude",
        "a*b": "hash",
        "aab": "last4",
    }
    assert NOTHING.treatment("ssn") is None


def test_a_table_in_quotes_is_literal() -> None:
    found = parse_options({'"Odd.One"."A*"': {"exclude": ["x"]}})
    assert found.of(TableName("Odd.One", "A*")).protects
    assert not found.of(TableName("Odd.One", "AB")).protects


def test_columns_that_are_named_for_one_table() -> None:
    options = parse_options(
        {"shop.*": {"exclude": ["a"]}, "shop.orders": {"exclude": ["b", "x*", '"y"'], "mask": {"c": "last4"}}, "shop.o": {"hash": ["d"]}}
    )
    assert list(options.named(ORDERS)) == ["b", "c"]


def test_options_go_through_json() -> None:
    found = parse_options(
        {"shop.*": {"exclude": ["a"], "mask": {"b": "last4"}, "rows": "c = ';'"}, "x.y": None, "x.z": {"deletes": "drop"}}
    )
    assert parse_options(json.loads(found.to_json())) == found
    assert parse_options(None) == parse_options({}) == TableOptions()
    assert found.of(TableName("x", "z")) == NOTHING
    assert NOTHING.to_text() is None


def test_deleted_rows_are_dropped_or_kept() -> None:
    found = parse_options({"shop.*": {"deletes": "keep"}, "shop.o": {"deletes": "drop"}})
    assert found.of(ORDERS).keeps_deleted
    assert found.of(ORDERS).to_json() == {"deletes": "keep"}
    assert found.of(TableName("shop", "o")) == NOTHING
    assert not found.protects


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "is no mapping from tables to their options"),
        ("x", "is no mapping from tables to their options"),
        ({"orders": {}}, "has the key 'orders', which is no schema.table glob such as shop.* or public.orders"),
        ({1: {}}, "has the key 1, which is no schema.table glob such as shop.* or public.orders"),
        ({"a.b": ["x"]}, "has no mapping of options for a.b"),
        (
            {"a.b": {"excludes": []}},
            "gives a.b the option 'excludes', which there is not; options are exclude, hash, mask, rows, deletes, on_schema_change",
        ),
        ({"a.b": {"exclude": "ssn"}}, "gives a.b the option exclude, which takes a list of columns or of globs of columns"),
        ({"a.b": {"hash": [1]}}, "gives a.b the option hash, which takes a list of columns or of globs of columns"),
        ({"a.b": {"mask": {"x": "all"}}}, "gives a.b the option mask, which takes columns or globs of columns, each with last4"),
        ({"a.b": {"rows": "a = 1; DROP TABLE x"}}, "gives a.b the option rows, which takes one SQL condition such as country = 'CH'"),
        ({"a.b": {"rows": True}}, "gives a.b the option rows, which takes one SQL condition such as country = 'CH'"),
        ({"a.b": {"history": True}}, "gives a.b the option history: true, which is not supported yet; leave it out"),
        ({"a.b": {"deletes": True}}, "gives a.b the option deletes, which takes drop or keep"),
        ({"a.b": {"on_schema_change": "halt"}}, "gives a.b the option on_schema_change, which takes propagate, freeze or stop"),
        ({"a.b": {"on_schema_change": ["stop"]}}, "gives a.b the option on_schema_change, which takes propagate, freeze or stop"),
    ],
)
def test_what_is_said_of_options_that_cannot_be_used(given: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options(given)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("given", "shown"), [(None, {}), ("propagate", {}), ("freeze", {"on_schema_change": "freeze"}), ("stop", {"on_schema_change": "stop"})]
)
def test_what_a_change_of_columns_leads_to(given: str | None, shown: dict[str, str]) -> None:
    options = parse_options({"*.*": {"on_schema_change": given}})
    assert options.of(ORDERS).to_json() == shown
    assert options.of(ORDERS).on_schema_change == (given or "propagate")
    assert parse_options(json.loads(options.to_json())).of(ORDERS) == options.of(ORDERS)
    assert options.of(ORDERS).protects is False

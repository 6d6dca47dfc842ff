"""Names as Postgres quotes them, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline_tests.support import Source

_names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8) | st.text(
    "aA\"'.0_ ", min_size=1
)


@given(_names, _names)
def test_what_is_written_is_read_back(schema: str, name: str) -> None:
    assert TableName.parse(str(TableName(schema, name))) == TableName(schema, name)


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("Public.Orders", "public", "orders"),
        (" shop.order lines ", "shop", "order lines"),
        ('"A.b"."c""d"', "A.b", 'c"d'),
        ('shop."Orders"', "shop", "Orders"),
    ],
)
def test_unquoted_names_are_folded(text: str, schema: str, name: str) -> None:
    assert TableName.parse(text) == TableName(schema, name)


@pytest.mark.parametrize("text", ["", "orders", "a.b.c", ".b", "a.", '"".b', '"a.b', 'a"b.c', '"a"b.c', '"a".b"'])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a table's name"):
        TableName.parse(text)


@pytest.mark.matrix
def test_quoted_as_the_server_quotes(source_matrix: Source) -> None:
    keywords = [row[0] for row in source_matrix.sql("SELECT word FROM pg_get_keywords()")]
    names = [*keywords, "a", "A", "1a", "a1", "_", "a b", 'a"b', "a.b", "é", "a$"]
    quoted = dict(source_matrix.sql("SELECT n, quote_ident(n) FROM unnest(%s::text[]) n", names))
    reserved_later = {name for name in names if quoted[name] == name and quote_ident(name) == f'"{name}"'}
    assert {name: quote_ident(name) for name in names if name not in reserved_later} == {
        name: text for name, text in quoted.items() if name not in reserved_later
    }
    assert reserved_later <= set(keywords), "what a later server reserves is quoted for all"

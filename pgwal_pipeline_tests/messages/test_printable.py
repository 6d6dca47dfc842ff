"""Names that would act on a terminal or a page, written so that they do not."""

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.known_tables import KnownColumn, KnownTable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.errors import DecodeError, PgwalError, TableError
from pgwal_pipeline.messages.printable import code_span, distinct, printable
from pgwal_pipeline.values.relation import TableName

HOSTILE = [
    "\x1b]0;owned\x07",
    "\x1b[2J\x9b31m",
    "two\nlines\r\n",
    "\u202egpj.exe",
    "`![x](http://evil.example/x.png)`",
    "``[y](javascript:alert(1))",
    "<img src=x onerror=alert(1)>",
    "*a* _b_ #c",
    " ` ",
    "%s{0}[bold]",
]


def test_nothing_acts_on_a_terminal() -> None:
    assert printable("\x1b[31mred\x07 a\nb\u202e\u2028\x9b\ud800") == r"\x1b[31mred\x07 a\nb\u202e\u2028\x9b\ud800"
    assert printable("plain żółw 👩‍👩‍👧 <b> %s {0}") == "plain żółw 👩‍👩‍👧 <b> %s {0}"
    for make in (PgwalError, DecodeError, lambda text: TableError("t", text)):
        assert str(make("a\x1b]0;x\x07\nb")) == r"a\x1b]0;x\x07\nb"


@given(st.text(), st.text())
def test_distinct_texts_stay_distinct(one: str, other: str) -> None:
    assert (one == other) == (distinct(one) == distinct(other))
    assert printable(distinct(one)) == distinct(one)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_name_is_one_piece_of_code_in_markdown(text: str) -> None:
    (block, inline, _) = MarkdownIt("gfm-like", {"linkify": False}).parse(f"Table {code_span(text)} in Postgres.")
    assert (block.type, inline.type) == ("paragraph_open", "inline")
    kinds = [(child.type, child.content) for child in inline.children or ()]
    assert kinds == [("text", "Table "), ("code_inline", printable(text)), ("text", " in Postgres.")]


@pytest.mark.parametrize("text", HOSTILE)
def test_assets_of_hostile_names(text: str) -> None:
    known = KnownTable(TableName(text, text), (KnownColumn(text, "text", "string"),), ())
    specs = AssetSpecs(AssetNames("slot"), Lake("/lake"))
    for spec in (specs.source(known), specs.raw(known), specs.snapshot(known), specs.current(known)):
        assert isinstance(spec, dg.AssetSpec)
        assert printable(spec.key.to_user_string()) == spec.key.to_user_string()
        assert printable(spec.description or "") == spec.description
        types = {token.type for token in MarkdownIt().parse(spec.description or "")[1].children or ()}
        assert types == {"text", "code_inline"}

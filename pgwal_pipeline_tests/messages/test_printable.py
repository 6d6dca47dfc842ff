"""Names that would act on a terminal or a page, written so that they do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pgwal_pipeline.messages.errors import DecodeError, PgwalError, TableError
from pgwal_pipeline.messages.printable import code_span, distinct, plain_markdown, printable
from pgwal_pipeline_tests.messages.hostile import HOSTILE


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


@pytest.mark.parametrize(
    "text", [*HOSTILE, "1. one", "- one", "+ one", "===", "---", "| a | b |", "&amp; &#33;", "    code", "http://a_b_c", "# one"]
)
def test_text_is_shown_as_it_is_in_markdown(text: str) -> None:
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(plain_markdown(text))
    assert [token.type for token in parsed] in (["paragraph_open", "inline", "paragraph_close"], [])
    shown = [child.content for token in parsed for child in token.children or () if child.type != "hardbreak"]
    assert {child.type for token in parsed for child in token.children or ()} <= {"text", "text_special", "hardbreak"}
    assert "".join(shown) == "".join(printable(line.strip()) for line in text.splitlines())

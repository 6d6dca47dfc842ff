import math
from datetime import date, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgwal_pipeline.values.relation import PgType
from pgwal_pipeline_tests.decode import wire
from pgwal_pipeline_tests.decode.casting import MISFIT, check, refused
from pgwal_pipeline_tests.decode.wire import array_of, numeric


def test_arrays() -> None:
    check(
        array_of(wire.INT4),
        [("{1,2,-3}", [1, 2, -3]), ("{}", []), (None, None), ("{NULL}", [None]), ("{NULL,5}", [None, 5]), ("{2147483647}", [2147483647])],
    )
    check(array_of(wire.BOOL), [("{t,f,NULL}", [True, False, None])])
    check(array_of(numeric(6, 2)), [("{1.50,-2.25}", [Decimal("1.50"), Decimal("-2.25")]), ("{}", [])])
    check(array_of(wire.BYTEA), [('{"\\\\x0102",NULL,"\\\\x"}', [b"\x01\x02", None, b""])])
    check(array_of(wire.TIMESTAMP), [('{"2024-05-06 07:08:09"}', [datetime(2024, 5, 6, 7, 8, 9)])])
    check(array_of(wire.FLOAT8), [("{NaN,Infinity,-1.5}", [math.nan, math.inf, -1.5])])
    check(array_of(wire.INT4), [("{}", []), ("{}", [])])
    check(array_of(wire.INT4), [(None, None)])


def test_arrays_of_text() -> None:
    check(
        array_of(wire.TEXT),
        [
            ("{a,b c}", ["a", "b c"]),
            ('{"",NULL,"NULL",nul}', ["", None, "NULL", "nul"]),
            ('{"a,b","{c}","d\\"e","f\\\\g","\\\\","\\\\\\""}', ["a,b", "{c}", 'd"e', "f\\g", "\\", '\\"']),
            ("{}", []),
            (None, None),
            ('{é,"ż,ó",𝄞}', ["é", "ż,ó", "𝄞"]),
            ("{[x]=y}", ["[x]=y"]),
            (b"{\xff}", MISFIT),
        ],
    )


def test_arrays_with_another_delimiter() -> None:
    check(array_of(wire.BOX), [("{(1,1),(0,0);(3,3),(2,2)}", ["(1,1),(0,0)", "(3,3),(2,2)"]), ("{}", [])])
    geometry = PgType(70_000, -1, "geometry", delimiter=":")
    check(PgType(70_001, -1, "geometry[]", geometry), [("{0101:0102}", ["0101", "0102"])])


def test_arrays_of_arrays() -> None:
    """Elements of a domain over an array are arrays' texts in quotes."""
    check(array_of(array_of(wire.INT4)), [('{"{1,2}","{}",NULL}', [[1, 2], [], None]), ("{}", [])])


def test_arrays_of_another_shape_are_kept_as_text() -> None:
    check(
        array_of(wire.TEXT),
        [
            ("{{a,b},{c,d}}", MISFIT),
            ("{a}", ["a"]),
            ("[0:1]={a,b}", MISFIT),
            (None, None),
            ('{"{x}"}', ["{x}"]),
            ("[1:1][-2:-1]={{a,b}}", MISFIT),
            (b"{{\xff}}", MISFIT),
        ],
    )
    check(array_of(wire.INT4), [("{{1},{2}}", MISFIT)])


def test_an_array_with_one_misfit_is_null_as_a_whole() -> None:
    check(
        array_of(wire.DATE),
        [
            *[("{2024-01-01,infinity}", MISFIT), ("{2024-01-02}", [date(2024, 1, 2)]), ("{}", []), (None, None)],
            *[("{infinity,infinity}", MISFIT), ("{NULL,2024-01-03}", [None, date(2024, 1, 3)])],
        ],
    )
    check(array_of(numeric(4, 1)), [("{NaN}", MISFIT), ("{1.5}", [Decimal("1.5")]), ("{{1.5}}", MISFIT)])


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "}",
        "1,2",
        "{1,2",
        "1,2}",
        "{1,,2}",
        "{,1}",
        "{1,}",
        '{"1}',
        '{1"2"}',
        '{"1"2}',
        '{"1""2"}',
        "{1}}",
        "{\\1}",
        "{1}{2}",
        '{"a\\"}',
        "[0:1]=1",
    ],
)
def test_what_is_no_array_is_refused(bad: str) -> None:
    for declared in (wire.TEXT, wire.INT4):
        error = refused(array_of(declared), bad)
        assert error.index == 0
        refused(array_of(declared), "{1}", None, bad, "{2}")
        refused(array_of(declared), "{{1}}", bad)


def test_an_element_that_is_none_is_refused_at_its_row() -> None:
    assert refused(array_of(wire.INT4), "{1,2}", None, "{}", "{3,x}").index == 3


def quoted(value: str | None) -> str:
    """An element as array_out writes it."""
    if value is None:
        return "NULL"
    if value == "" or value.upper() == "NULL" or any(letter in ',{}"\\ \t\n\r\v\f' for letter in value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return value


_hard = st.text(st.sampled_from('a,{}"\\ \nNUL0é'), max_size=6) | st.text(max_size=8)


@given(st.lists(st.none() | st.lists(st.none() | _hard.filter(lambda value: "\0" not in value)), min_size=1))
def test_any_array_of_text(values: list[list[str | None] | None]) -> None:
    check(array_of(wire.TEXT), [(None if row is None else "{" + ",".join(map(quoted, row)) + "}", row) for row in values])

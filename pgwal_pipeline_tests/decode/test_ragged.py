"""String arrays as vectors: whatever slices, nulls and bytes behind nulls the arrays have."""

import numpy as np
import pyarrow as pa
import pytest

from pgwal_pipeline.decode.ragged import Ragged, offsets_of, pick
from pgwal_pipeline_tests.decode.casting import texts

HIDDEN = pa.Array.from_buffers(
    pa.string(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([0, 1, 5, 6], np.int32)), pa.py_buffer(b"ajunkb")]
)
"""A null in the middle that has bytes behind it."""


def shown(ragged: Ragged) -> list[bytes]:
    return [ragged.bytes_at(index) for index in range(len(ragged))]


@pytest.mark.parametrize(
    ("array", "strings"),
    [
        (texts([]), []),
        (texts(["a", "", "bc"]), [b"a", b"", b"bc"]),
        (texts(["a", None, "bc", "d"]).slice(1, 2), [b"", b"bc"]),
        (HIDDEN, [b"a", b"", b"b"]),
        (HIDDEN.slice(1), [b"", b"b"]),
        (pa.nulls(2, pa.string()), [b"", b""]),
    ],
)
def test_the_strings_lie_end_to_end(array: pa.StringArray, strings: list[bytes]) -> None:
    ragged = Ragged.of(array)
    assert shown(ragged) == strings
    assert ragged.octets.tobytes() == b"".join(strings)
    assert ragged.lengths.tolist() == [len(string) for string in strings]
    assert ragged.valid_mask().tolist() == array.is_valid().to_pylist()


def test_a_mask_that_is_given_out_is_the_callers() -> None:
    ragged = Ragged.of(texts(["a", None]))
    ragged.valid_mask()[:] = False
    assert ragged.valid_mask().tolist() == [True, False]


def test_which_string_a_byte_is_of_where_some_are_empty() -> None:
    ragged = Ragged.of(texts(["", "ab", "", None, "c", ""]))
    assert [ragged.row_of(position) for position in range(3)] == [1, 1, 4]
    assert ragged.holding(ragged.octets == ord("c")).tolist() == [False, False, False, False, True, False]
    assert not ragged.holding(ragged.octets == ord("x")).any()


def test_some_made_null_and_some_taken() -> None:
    ragged = Ragged.of(texts(["a", "bc", None, "d"]))
    without = ragged.without(np.array([False, True, False, False]))
    assert (shown(without), without.valid_mask().tolist()) == ([b"a", b"", b"", b"d"], [True, False, False, True])
    assert shown(ragged.only(np.array([3, 0]))) == [b"d", b"a"]


def test_an_error_shows_no_more_than_a_line() -> None:
    error = Ragged.of(texts(["a", b"\xff" + b"x" * 500])).unreadable(1, "int4")
    assert error.index == 1
    assert error.reason.startswith(r"'\\xffxxx")
    assert len(error.reason) < 120


def test_pieces_that_are_picked() -> None:
    bounds = np.array([[0, 2], [2, 2], [4, 5]], np.int32)
    data = np.frombuffer(b"ab--c", np.uint8)
    assert pick(bounds, data, pa.array([4, None, 0, 2])).to_pylist() == ["c", None, "ab", ""]
    assert pick(bounds[:0], data, pa.array([None, None], pa.int64())).to_pylist() == [None, None]
    assert offsets_of(np.array([2, 0, 1])).tolist() == [0, 2, 2, 3]
    assert offsets_of(np.array([], np.int64)).tolist() == [0]

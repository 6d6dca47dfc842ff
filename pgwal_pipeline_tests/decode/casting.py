"""Texts cast together, and what is refused."""

from typing import Any

import pyarrow as pa
import pytest

from pgwal_pipeline.decode.casts import cast_text
from pgwal_pipeline.decode.ragged import UnreadableError
from pgwal_pipeline.decode.types import arrow_type
from pgwal_pipeline.values.relation import PgType

MISFIT = object()


def texts(values: list[str | bytes | None]) -> pa.StringArray:
    """A string array whose bytes nobody has checked, as the decoder makes them."""
    return pa.array([value.encode() if isinstance(value, str) else value for value in values], pa.binary()).view(pa.string())


def check(declared: PgType, cases: list[tuple[str | bytes | None, Any]]) -> None:
    """Cast all texts together, and compare with the values; MISFIT stands for a null that is marked."""
    values, misfits = cast_text(texts([text for text, _ in cases]), declared)
    values.validate(full=True)
    assert values.type == arrow_type(declared)
    marked = [False] * len(cases) if misfits is None else misfits.tolist()
    assert marked == [value is MISFIT for _, value in cases]
    assert misfits is None or any(marked)
    assert [repr(value) for value in values.to_pylist()] == [repr(None if value is MISFIT else value) for _, value in cases]


def refused(declared: PgType, *values: str | bytes | None) -> UnreadableError:
    with pytest.raises(UnreadableError) as caught:
        cast_text(texts(list(values)), declared)
    return caught.value

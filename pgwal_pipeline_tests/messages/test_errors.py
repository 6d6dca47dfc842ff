"""Errors: what one process tells of them another one has whole."""

import json

import pytest

from pgwal_pipeline.lake.fold import Unresolved
from pgwal_pipeline.messages import errors
from pgwal_pipeline.messages.errors import DecodeError, LakeError, PgwalError, SourceUnavailable, TableError, error_from_json, error_to_json
from pgwal_pipeline.pipeline.window import StreamBroke
from pgwal_pipeline.values.relation import TableName

_PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PgwalError) and kind not in (DecodeError, TableError)
]


def carried(error: BaseException) -> PgwalError:
    return error_from_json(json.loads(json.dumps(error_to_json(error))))


@pytest.mark.parametrize("kind", _PLAIN)
@pytest.mark.parametrize("transient", [True, False])
def test_every_kind_arrives_as_it_was(kind: type[PgwalError], transient: bool) -> None:
    error = kind("What happened, to what, and what to do.")
    error.transient = transient
    found = carried(error)
    assert (type(found), str(found), found.transient, found.exit_code) == (kind, str(error), transient, error.exit_code)


def test_what_an_error_knows_arrives_with_it() -> None:
    table = carried(TableError("public.t", "It cannot be written.", 17, "write"))
    assert isinstance(table, TableError)
    assert (table.table, str(table), table.oid, table.stage) == ("public.t", "It cannot be written.", 17, "write")
    decode = carried(DecodeError("It cannot be read.", lsn=5, payload=b"\x00\xff", oid=9))
    assert isinstance(decode, DecodeError)
    assert (decode.lsn, decode.payload, decode.oid) == (5, b"\x00\xff", 9)


def test_a_kind_of_another_module_arrives_as_the_nearest_that_all_know() -> None:
    assert type(carried(StreamBroke(SourceUnavailable("gone"), None))) is SourceUnavailable
    unresolved = Unresolved(TableName("public", "t"), [({"id": 1}, ("v",))], None)
    assert type(carried(unresolved)) is TableError
    assert str(carried(unresolved)) == str(unresolved)


def test_what_is_none_of_the_pipelines_says_what_it_was() -> None:
    found = carried(KeyError("x"))
    assert (type(found), found.transient) == (PgwalError, False)
    assert "KeyError" in str(found)


def test_a_transient_error_of_the_lake_stays_transient() -> None:
    error = LakeError("The store failed for now.")
    error.transient = True
    assert carried(error).transient

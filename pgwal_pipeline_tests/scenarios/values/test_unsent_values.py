"""Values that the source did not send because they did not change: text, jsonb, bytea and arrays, stored out of line, under each replica
identity, through updates, changes of keys and chains of them, within a window and over several: `current` has them as the source does.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import polars as pl
import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.values.comparison import assert_values
from pgwal_pipeline_tests.support import Source

# Each value has more than the 2,000 bytes from which on it is stored out of line, and one of them has a text of its own in the lake.
COLUMNS = {"t": "text", "j": "jsonb", "b": "bytea", "l": "text[]", "d": "date[]"}
_SETUP = """
CREATE FUNCTION t(x text) RETURNS text LANGUAGE sql AS $$ SELECT repeat(md5(x), 80) $$;
CREATE FUNCTION j(x text) RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_build_object('v', repeat(md5(x), 80)) $$;
CREATE FUNCTION b(x text) RETURNS bytea LANGUAGE sql AS $$ SELECT decode(repeat(md5(x), 160), 'hex') $$;
CREATE FUNCTION l(x text) RETURNS text[] LANGUAGE sql AS $$ SELECT array_agg(md5(x || g)) FROM generate_series(1, 80) g $$;
CREATE FUNCTION d(x text) RETURNS date[] LANGUAGE sql AS $$
    SELECT array_agg('2000-01-01'::date + g) || CASE WHEN length(x) % 2 = 0 THEN 'infinity'::date END FROM generate_series(1, 800) g $$
"""
TABLES = {
    "by_key": "ALTER TABLE {t} ADD PRIMARY KEY (id)",
    "by_index": "CREATE UNIQUE INDEX {t}_id ON {t} (id); ALTER TABLE {t} REPLICA IDENTITY USING INDEX {t}_id",
    "in_full": "ALTER TABLE {t} ADD PRIMARY KEY (id); ALTER TABLE {t} REPLICA IDENTITY FULL",
    "bag": "ALTER TABLE {t} REPLICA IDENTITY FULL",
}


def _make(source: Source) -> None:
    source.sql(_SETUP)
    for table, identity in TABLES.items():
        source.sql(f"CREATE TABLE {table} (id int NOT NULL, n int, {', '.join(map(' '.join, COLUMNS.items()))})")
        for column in COLUMNS:
            source.sql(f"ALTER TABLE {table} ALTER {column} SET STORAGE EXTERNAL")
        source.sql(identity.format(t=table))


def _insert(first: int, last: int) -> str:
    return f"INSERT INTO {{t}} SELECT i, 0, {', '.join(f'{name}(i::text)' for name in COLUMNS)} FROM generate_series({first}, {last}) i"


def _moves(*ids: int) -> Iterator[str]:
    """A row that takes one key after the other."""
    for old, new in pairwise(ids):
        yield f"UPDATE {{t}} SET id = {new} WHERE id = {old}"


def _counts(*ids: int) -> Iterator[str]:
    """Updates of another column."""
    for number in ids:
        yield f"UPDATE {{t}} SET n = n + 1 WHERE id = {number}"


def _set(number: int, change: str) -> str:
    return f"UPDATE {{t}} SET {change} WHERE id = {number}"


def _windows(o: int) -> list[list[str]]:
    """What is done to the rows from `o` on, window by window; rows `o + 1` to `o + 20` are there before."""
    return [
        [
            *_counts(o + 1, o + 2, o + 2),
            _set(o + 2, "t = t('new')"),
            *_moves(o + 3, o + 103),
            *_moves(o + 4, o + 104, o + 204),
            *_counts(o + 204),
            *_moves(o + 204, o + 304),
            *_moves(o + 5, o + 105),
            _set(o + 6, "l = l('new'), n = 6"),
            f"BEGIN; DELETE FROM {{t}} WHERE id = {o + 7}; {_insert(o + 7, o + 7)}; {_set(o + 7, 'n = 7')}; COMMIT",
            _set(o + 8, f"id = {o + 108}, j = j('new')"),
            f"BEGIN; {'; '.join((*_moves(o + 9, -1), *_moves(o + 10, o + 9), *_moves(-1, o + 10)))}; COMMIT",
            _set(o + 11, "t = NULL, d = NULL"),
            *_counts(o + 11),
            _set(o + 12, "t = 'small', l = '{}'"),
            *_counts(o + 12),
            _insert(o + 21, o + 26),
            *_counts(o + 21),
            *_moves(o + 22, o + 122, o + 222),
            _set(o + 23, "b = NULL"),
            *_counts(o + 23),
            f"BEGIN; {_set(o + 24, 'n = 24')}; {_set(o + 24, 't = t(t)')}; SAVEPOINT s; {_set(o + 24, 'j = NULL')}; ROLLBACK TO s; COMMIT",
            f"DELETE FROM {{t}} WHERE id = {o + 25}",
            *_moves(o + 26, o + 25),
        ],
        [
            *_moves(o + 105, o + 205),
            *_counts(o + 222, o + 2, o + 25),
            *_moves(o + 1, o + 101),
            _set(o + 6, "b = b('newer')"),
            _insert(o + 1, o + 1),
            *_moves(o + 13, o + 113),
        ],
        [
            *_moves(o + 205, o + 305),
            *_counts(o + 305, o + 25, o + 1),
            _set(o + 101, "d = d('newest')"),
            *_moves(o + 304, o + 404),
            *_moves(o + 103, o + 3),
            f"DELETE FROM {{t}} WHERE id = {o + 113}",
            _insert(o + 13, o + 13),
            *_counts(o + 6, o + 14),
        ],
    ]


def _run(source: Source, statements: Iterable[str]) -> None:
    for statement in statements:
        for table in TABLES:
            source.sql(statement.replace("{t}", table))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_unsent_values(source: Source, pipeline: Pipeline) -> None:
    _make(source)
    _run(source, [_insert(1, 20), _insert(1001, 1020), _insert(2001, 2020)])
    drains.bootstrap(pipeline.settings, progress=Silent())
    # On top of a snapshot that has seen the first of the changes, before anything is published.
    first, *rest = _windows(0)
    _run(source, first[: len(first) // 2])
    pipeline.snapshot()
    _run(source, first[len(first) // 2 :])
    pipeline.drain()
    for window in rest:
        _run(source, window)
        pipeline.drain()
    pipeline.publish()
    _assert(pipeline)
    # Into a table that is there: three windows at once, then each by itself.
    for window in _windows(1000):
        _run(source, window)
        pipeline.drain()
    first, *rest = _windows(2000)
    _run(source, first)
    pipeline.drain()
    pipeline.publish()
    _assert(pipeline)
    _run(source, [statement for window in rest for statement in window])
    _run(source, [*_counts(305, 1014), *_moves(404, 504, 604), *_moves(1404, 1504), *_moves(1305, 1405, 1305), *_counts(1504)])
    pipeline.drain()
    pipeline.publish()
    _assert(pipeline)
    for table in ("by_key", "by_index"):
        unsent = pl.read_delta(pipeline.lake.raw(TableName("public", table)))["_pgwal_unchanged"].explode().drop_nulls()
        assert set(unsent) == set(COLUMNS), "the test tests nothing"


def _assert(pipeline: Pipeline) -> None:
    for table in TABLES:
        assert_values(pipeline, table, ["int4", *COLUMNS.values()], ["n", *COLUMNS])

"""A table's rows a piece at a time, read by a thread that ends with its reader."""

import threading

import pytest

from pgwal_pipeline.pipeline.table_rows import TableRows
from pgwal_pipeline.postgres.copy import ChunkBounds, TableChanged
from pgwal_pipeline_tests.postgres.reading import WHOLE, relation_of
from pgwal_pipeline_tests.support import Source, wait_for


@pytest.fixture
def rows(source: Source) -> TableRows:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO t SELECT i, repeat('v', 1000) FROM generate_series(1, 20000) i")
    return TableRows(source.dsn, relation_of(source), WHOLE)


def reading() -> bool:
    return any(thread.name == "pgwal-copy" for thread in threading.enumerate())


def test_every_row_comes_once_and_the_read_is_told_of_at_the_end(rows: TableRows) -> None:
    pieces = iter(rows)
    found = next(pieces)["id"].to_pylist()
    assert len(found) < 20_000
    assert rows.read is None
    for piece in pieces:
        found += piece["id"].to_pylist()
    assert sorted(found) == [*range(1, 20_001)]
    assert rows.read is not None
    assert rows.read.rows == 20_000
    assert not reading()


def test_a_range_that_no_row_is_in(rows: TableRows) -> None:
    rows.bounds = ChunkBounds(("30000",), None)
    assert sum(piece.num_rows for piece in rows) == 0
    assert rows.read is not None
    assert rows.read.rows == 0


def test_a_writer_that_takes_no_more_leaves_no_thread_and_no_session(source: Source, rows: TableRows) -> None:
    pieces = rows.__iter__()
    next(pieces)
    assert reading()
    pieces.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not reading()
    copying = "SELECT count(*) FROM pg_stat_progress_copy WHERE datname = current_database()"
    wait_for(lambda: source.value(copying) == 0, what="the source to see that nobody reads")


def test_what_reading_raises_comes_to_the_writer(source: Source, rows: TableRows) -> None:
    source.sql("ALTER TABLE t RENAME v TO w")
    with pytest.raises(TableChanged):
        list(rows)
    assert not reading()

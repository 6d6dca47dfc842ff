"""The rows of tables a piece at a time, read by a thread that ends with its reader."""

import threading

import pytest

from pgwal_pipeline.pipeline.table_rows import Range, TableRows
from pgwal_pipeline.postgres.copy import ChunkBounds, TableBusy, TableChanged
from pgwal_pipeline_tests.postgres.reading import WHOLE, relation_of
from pgwal_pipeline_tests.support import Source, wait_for


@pytest.fixture
def rows(source: Source) -> TableRows:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO t SELECT i, repeat('v', 1000) FROM generate_series(1, 20000) i")
    return TableRows(source.dsn, [Range(relation_of(source), WHOLE)])


def small(source: Source, *tables: str) -> TableRows:
    for table in tables:
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY); INSERT INTO {table} SELECT generate_series(1, 10)")
    return TableRows(source.dsn, [Range(relation_of(source, table), WHOLE) for table in tables], most_bytes=1 << 20)


def reading() -> bool:
    return any(thread.name == "pgwal-copy" for thread in threading.enumerate())


def test_every_row_comes_once_and_the_read_is_told_of_at_the_end(rows: TableRows) -> None:
    with rows:
        pieces = rows.pieces(0)
        found = next(pieces)["id"].to_pylist()
        assert len(found) < 20_000
        assert not rows.reads
        for piece in pieces:
            found += piece["id"].to_pylist()
        assert sorted(found) == [*range(1, 20_001)]
        assert rows.reads[0].rows == 20_000
    assert not reading()


def test_a_range_that_no_row_is_in(rows: TableRows) -> None:
    rows.ranges = [Range(rows.ranges[0].relation, ChunkBounds(("30000",), None))]
    with rows:
        assert sum(piece.num_rows for piece in rows.pieces(0)) == 0
        assert rows.reads[0].rows == 0


def test_a_writer_that_takes_no_more_leaves_no_thread_and_no_session(source: Source, rows: TableRows) -> None:
    with rows:
        next(rows.pieces(0))
        assert reading()
    assert not reading()
    copying = "SELECT count(*) FROM pg_stat_progress_copy WHERE datname = current_database()"
    wait_for(lambda: source.value(copying) == 0, what="the source to see that nobody reads")


def test_what_reading_raises_comes_to_the_writer(source: Source, rows: TableRows) -> None:
    source.sql("ALTER TABLE t RENAME v TO w")
    with rows, pytest.raises(TableChanged):
        list(rows.pieces(0))
    assert not reading()


def test_several_tables_share_a_snapshot_and_each_has_its_own_lsn(source: Source) -> None:
    with small(source, "a", "b", "c") as rows:
        found = [[value for piece in rows.pieces(number) for value in piece["id"].to_pylist()] for number in range(3)]
    assert [sorted(values) for values in found] == [[*range(1, 11)]] * 3
    assert len({rows.reads[number].snapshot for number in range(3)}) == 1
    assert rows.reads[0].insert_lsn <= rows.reads[1].insert_lsn <= rows.reads[2].insert_lsn


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_after_an_error_the_others_are_read_in_a_new_transaction(source: Source, broken: int) -> None:
    rows = small(source, "a", "b", "c")
    source.sql(f"ALTER TABLE {'abc'[broken]} RENAME id TO other")
    with rows:
        for number in range(3):
            if number == broken:
                with pytest.raises(TableChanged):
                    list(rows.pieces(number))
            else:
                assert sum(piece.num_rows for piece in rows.pieces(number)) == 10
    assert sorted(rows.reads) == sorted({0, 1, 2} - {broken})


def test_a_locked_table_and_a_large_one_are_busy(source: Source) -> None:
    rows = small(source, "a", "b", "c")
    source.sql("INSERT INTO c SELECT generate_series(100, 100000)")
    holder = source.connect(autocommit=False)
    holder.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
    with rows:
        for number in (0, 2):
            if number:
                assert sum(piece.num_rows for piece in rows.pieces(1)) == 10
            with pytest.raises(TableBusy):
                list(rows.pieces(number))
    holder.close()

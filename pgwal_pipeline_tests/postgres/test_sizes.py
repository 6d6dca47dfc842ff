import time

import pytest

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.postgres.sizes import table_sizes
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.support import Source

PLAIN, ODD, ROOT, GONE = (TableName("public", name) for name in ("plain", 'Od"d', "root", "gone"))


def test_sizes_are_estimates_of_rows_and_bytes_with_partitions(source: Source) -> None:
    source.sql(
        "CREATE TABLE plain (id int PRIMARY KEY, v text); INSERT INTO plain SELECT g, repeat('x', 100) FROM generate_series(1, 1000) g"
    )
    source.sql('CREATE TABLE "Od""d" (id int)')
    source.sql("CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    source.sql("CREATE TABLE leaf1 PARTITION OF root FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id)")
    source.sql("CREATE TABLE leaf11 PARTITION OF leaf1 FOR VALUES FROM (0) TO (10)")
    source.sql("CREATE TABLE leaf2 PARTITION OF root FOR VALUES FROM (10) TO (100); INSERT INTO root SELECT generate_series(0, 49)")
    source.sql("ANALYZE plain; ANALYZE root")
    with source.connect() as conn:
        found = table_sizes(conn, [PLAIN, ODD, ROOT, GONE])
        assert table_sizes(conn, []) == {}
    assert found.keys() == {PLAIN, ODD, ROOT}
    assert (found[PLAIN].rows, found[ROOT].rows, found[ODD].rows) == (1000, 50, None)
    assert found[PLAIN].bytes == source.value("SELECT pg_total_relation_size('plain')") > 100_000
    assert found[ROOT].bytes == source.value("SELECT pg_total_relation_size('leaf11') + pg_total_relation_size('leaf2')")
    assert found[ODD].bytes == 0


def test_a_table_that_is_being_altered_is_not_waited_for(source: Source) -> None:
    source.sql("CREATE TABLE plain (id int)")
    with source.connect() as altering, source.connect() as conn:
        altering.execute(b"BEGIN; LOCK TABLE plain IN ACCESS EXCLUSIVE MODE")
        started = time.monotonic()
        with pytest.raises(PgwalError):
            table_sizes(conn, [PLAIN])
        assert time.monotonic() - started < 10
        altering.execute(b"ROLLBACK")

"""Open transactions that others wait for, as they are named to people."""

import pytest

from pgwal_pipeline.postgres.blockers import Blocker, describe, older_than
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline_tests.support import Source

SESSION = Blocker(7, None, "shop", "app", "psql", 61.0, "idle in transaction", "SELECT 1\n  FROM\tt")


@pytest.mark.parametrize(
    ("blocker", "text"),
    [
        (SESSION, "pid 7, psql, app, shop, open for 61 s, idle in transaction: SELECT 1 FROM t"),
        (Blocker(7, None, "shop", "app", None, 1.0, "active", None), "pid 7, app, shop, open for 1 s"),
        (Blocker(7, None, None, None, None, None, None, None), "pid 7"),
        (Blocker(None, "a 'b'", "shop", "app", None, 1.0, None, None), "the prepared transaction \"a 'b'\" in database shop, open for 1 s"),
    ],
)
def test_what_is_known_of_it_is_told(blocker: Blocker, text: str) -> None:
    assert str(blocker) == text


def test_a_long_statement_is_cut() -> None:
    long = Blocker(7, None, None, None, None, None, None, "x" * 1000)
    assert len(str(long)) < 150


def test_three_are_told_and_how_many_there_are_besides() -> None:
    assert describe([]) == "an open transaction"
    assert describe([SESSION] * 3).count("pid 7") == 3
    assert "more" not in describe([SESSION] * 3)
    assert describe([SESSION] * 5).endswith("; and 2 more")


@pytest.mark.matrix
def test_only_who_has_written_and_for_long_enough(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("CREATE TABLE t (id int)")
    reader, writer, young = (source.connect(autocommit=False) for _ in range(3))
    reader.execute("SELECT * FROM t")
    writer.execute("INSERT INTO t VALUES (1)")
    source.sql("SELECT pg_sleep(0.6)")
    young.execute("INSERT INTO t VALUES (2)")
    with connect(source.dsn) as conn:
        ours = [found for found in older_than(conn, 0.5) if found.database == source.database]
        assert [found.pid for found in ours] == [writer.info.backend_pid]
        assert "INSERT INTO t VALUES (1)" in str(ours[0])
        both = [found.pid for found in older_than(conn, 0) if found.database == source.database]
    assert both == [writer.info.backend_pid, young.info.backend_pid], "the oldest first"

"""Tables that others have locked: found without waiting, waited for with a limit, and named with who has them."""

import threading
import time

import pytest

from pgwal_pipeline.postgres import catalog, dsn
from pgwal_pipeline.postgres.table_locks import TableLocked, lock_free_ones, wait_until_free
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline_tests.postgres.reading import relation_of
from pgwal_pipeline_tests.support import Source


def partitioned(source: Source) -> Relation:
    source.sql("CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE p_1 PARTITION OF p DEFAULT")
    source.sql("CREATE PUBLICATION roots FOR TABLE p WITH (publish_via_partition_root = true)")
    with dsn.connect(source.dsn) as conn:
        return next(relation for relation in catalog.tables_of(conn, "roots") if relation.table.name == "p")


def test_those_that_are_free_are_locked_and_the_others_left_out(source: Source) -> None:
    relations = []
    for name in "abcde":
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY)")
        relations.append(relation_of(source, name))
    source.sql("DROP TABLE a")
    holder = source.connect(autocommit=False)
    holder.execute("LOCK TABLE d IN ACCESS EXCLUSIVE MODE")
    with dsn.connect(source.dsn) as conn, conn.transaction():
        assert [relation.table.name for relation in lock_free_ones(conn, relations)] == ["b", "c", "e"]
        held = "SELECT count(*) FROM pg_locks JOIN pg_class c ON c.oid = relation WHERE pid = %s AND relname IN ('a', 'b', 'c', 'd', 'e')"
        assert source.value(held, conn.info.backend_pid) == 3
    holder.close()


@pytest.mark.parametrize("what", ["table", "partition"])
def test_a_locked_one_is_waited_for_with_a_limit_and_its_holder_is_named(what: str, source: Source) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    relation, locked = (relation_of(source), "t") if what == "table" else (partitioned(source), "p_1")
    with dsn.connect(source.dsn) as conn, source.connect(autocommit=False) as holder:
        wait_until_free(conn, relation, 0.0)
        holder.execute(f"LOCK TABLE {locked} IN ACCESS EXCLUSIVE MODE".encode())
        for seconds in (0.0, 0.3):
            began = time.monotonic()
            with pytest.raises(TableLocked, match=f"pid {holder.info.backend_pid}"):
                wait_until_free(conn, relation, seconds)
            assert seconds <= time.monotonic() - began < seconds + 5
        timer = threading.Timer(0.3, holder.rollback)
        timer.start()
        wait_until_free(conn, relation, 20.0)
        timer.join()


def test_a_prepared_transaction_is_named(source: Source) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    relation = relation_of(source)
    with source.connect(autocommit=False) as holder:
        holder.execute("ALTER TABLE t ADD v text")
        holder.execute("PREPARE TRANSACTION 'locks_t'")
    with dsn.connect(source.dsn) as conn:
        with pytest.raises(TableLocked, match="'locks_t'"):
            wait_until_free(conn, relation, 0.0)
        source.sql("ROLLBACK PREPARED 'locks_t'")
        wait_until_free(conn, relation, 0.0)


def test_a_lock_on_a_table_that_inherits_is_no_matter(source: Source) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE child () INHERITS (t)")
    relation = relation_of(source)
    with dsn.connect(source.dsn) as conn, source.connect(autocommit=False) as holder:
        holder.execute("LOCK TABLE child IN ACCESS EXCLUSIVE MODE")
        wait_until_free(conn, relation, 0.0)


def test_what_else_is_wrong_is_left_to_the_reading(source: Source) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    relation = relation_of(source)
    source.sql("DROP TABLE t")
    with dsn.connect(source.dsn) as conn:
        wait_until_free(conn, relation, 0.0)

"""Which tables a publication of ours may hold, and why it leaves others out. On every server at hand."""

import psycopg2
import pytest

from pgwal_pipeline.postgres import candidates, dsn, publication
from pgwal_pipeline.postgres.catalog import Connection
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.support import Source

pytestmark = pytest.mark.matrix


def reasons(conn: Connection, globs: str = "*.*") -> dict[str, str | None]:
    return {str(candidate.table): candidate.reason for candidate in candidates.candidate_tables(conn, globs)}


def test_globs(conn: Connection, source_matrix: Source) -> None:
    source_matrix.sql('create schema shop; create schema "Odd.One"; create schema pgish')
    for table in ("shop.orders", "shop.order_lines", "public.orders", '"Odd.One"."A,b"', "public.star", "pgish.x"):
        source_matrix.sql(f"create table {table} (id int primary key)")
    everything = {"shop.orders", "shop.order_lines", "public.orders", '"Odd.One"."A,b"', "public.star", "pgish.x"}
    assert set(reasons(conn)) == everything
    assert set(reasons(conn, "shop.*")) == {"shop.orders", "shop.order_lines"}
    assert set(reasons(conn, "*.orders, public.st?r")) == {"shop.orders", "public.orders", "public.star"}
    assert set(reasons(conn, "shop.order[s_]*")) == {"shop.orders", "shop.order_lines"}
    assert set(reasons(conn, '"Odd.One"."A,b"')) == {'"Odd.One"."A,b"'}
    assert set(reasons(conn, '"Odd.One".*')) == {'"Odd.One"."A,b"'}
    assert set(reasons(conn, 'public."st*"')) == set()
    assert set(reasons(conn, "Shop.*")) == set()


def test_what_is_no_user_table_is_not_listed(conn: Connection, source_matrix: Source) -> None:
    source_matrix.sql("create table plain (id int primary key)")
    source_matrix.sql("create view seen as select * from plain; create materialized view kept as select * from plain; create sequence s")
    source_matrix.sql("create temporary table passing (id int primary key)")
    source_matrix.sql("create table of_extension (id int primary key); alter extension plpgsql add table of_extension")
    assert set(reasons(conn)) == {"public.plain"}


def test_no_usable_identity(conn: Connection, source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table good (id int primary key)")
    source.sql("create table wide (id int); alter table wide replica identity full")
    source.sql("create table keyless (id int)")
    source.sql("create table late (id int primary key deferrable)")
    source.sql("create table late_full (id int primary key deferrable); alter table late_full replica identity full")
    source.sql("create table silent (id int primary key); alter table silent replica identity nothing")
    source.sql("create table by_index (id int not null); create unique index bi on by_index (id)")
    source.sql("alter table by_index replica identity using index bi")
    source.sql("create table index_gone (id int not null); create unique index ig on index_gone (id)")
    source.sql("alter table index_gone replica identity using index ig; drop index ig")
    source.sql("create unlogged table fleeting (id int primary key)")
    found = reasons(conn)
    assert {table for table, reason in found.items() if reason is None} == {
        "public.good",
        "public.wide",
        "public.late_full",
        "public.by_index",
    }
    assert "no primary key" in (found["public.keyless"] or "")
    assert "ALTER TABLE public.keyless REPLICA IDENTITY FULL" in (found["public.keyless"] or "")
    assert "deferrable" in (found["public.late"] or "")
    assert "ADD PRIMARY KEY" not in (found["public.late"] or "")
    assert "NOTHING" in (found["public.silent"] or "") and "REPLICA IDENTITY DEFAULT" in (found["public.silent"] or "")
    assert "the index of the replica identity is gone" in (found["public.index_gone"] or "")
    assert "unlogged" in (found["public.fleeting"] or "")


def test_what_is_let_in_can_be_written_to(conn: Connection, source_matrix: Source) -> None:
    """The rule behind the reasons: nothing that we publish makes the source's own UPDATE and DELETE fail."""
    source = source_matrix
    virtual = source.value("show server_version_num") >= "180000"
    source.sql("create table keyless (id int)")
    source.sql("create table late (id int primary key deferrable)")
    source.sql("create table silent (id int primary key); alter table silent replica identity nothing")
    source.sql("create table good (id int primary key, v int)")
    source.sql("create table key_generated (g int generated always as (id + 1) stored primary key, id int)")
    source.sql(
        "create table full_stored (id int, g int generated always as (id + 1) stored); alter table full_stored replica identity full"
    )
    source.sql("create table root (id int primary key) partition by range (id)")
    source.sql("create table leaf partition of root for values from (0) to (100)")
    source.sql("create table bad_root (id int primary key) partition by range (id)")
    source.sql("create table bad_leaf partition of bad_root for values from (0) to (100); alter table bad_leaf replica identity nothing")
    if virtual:
        source.sql("create table full_virtual (id int, g int generated always as (id + 1) virtual)")
        source.sql("alter table full_virtual replica identity full")
    made = publication.ensure(conn, "pgwal", "*.*")
    every = {str(table) for table in (*made.tables, *made.skipped)}
    assert {"public.keyless", "public.late", "public.silent", "public.bad_root"} <= {str(table) for table in made.skipped}
    assert "partition public.bad_leaf" in made.skipped[TableName.parse("public.bad_root")]
    assert (TableName.parse("public.key_generated") in made.tables) == virtual
    if virtual:
        assert TableName.parse("public.full_virtual") in made.skipped
    for table in every:
        source.sql(f"insert into {table} (id) values (1)")
        source.sql(f"update {table} set id = id")
        source.sql(f"delete from {table}")


def test_left_out_tables_really_would_fail(source_matrix: Source) -> None:
    """The other way round: the reasons are no invention."""
    source = source_matrix
    source.sql("create table late (id int primary key deferrable)")
    source.sql("create table root (id int primary key) partition by range (id)")
    source.sql("create table leaf partition of root for values from (0) to (100); alter table leaf replica identity nothing")
    source.sql("create publication theirs for table late, root with (publish_via_partition_root)")
    tables = ["late", "root"]
    if source.value("show server_version_num") >= "180000":
        source.sql("create table full_virtual (id int, g int generated always as (id + 1) virtual)")
        source.sql("alter table full_virtual replica identity full; alter publication theirs add table full_virtual")
        tables.append("full_virtual")
    for table in tables:
        source.sql(f"insert into {table} (id) values (1)")
        with pytest.raises(psycopg2.Error, match="cannot update table"):
            source.sql(f"update {table} set id = id")


def test_partitions(conn: Connection, source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create schema parts")
    source.sql("create table root (id int, v int, primary key (id, v)) partition by range (id)")
    source.sql("create table parts.low partition of root for values from (0) to (10)")
    source.sql("create table parts.high partition of root for values from (10) to (100) partition by range (v)")
    source.sql("create table parts.high_low partition of parts.high for values from (0) to (100)")
    assert reasons(conn) == {"public.root": None}
    # The root is not asked for: its topmost parts that are asked for stand for themselves.
    assert reasons(conn, "parts.*") == {"parts.low": None, "parts.high": None}
    assert reasons(conn, "parts.high*") == {"parts.high": None}
    assert reasons(conn, "parts.high_low") == {"parts.high_low": None}
    source.sql("alter table parts.high_low replica identity full")  # more than is needed does no harm
    assert reasons(conn) == {"public.root": None}
    source.sql("create unique index low_v on parts.low (v); alter table parts.low alter v set not null, replica identity using index low_v")
    assert "partition parts.low: its replica identity lacks columns of the whole table's" in (reasons(conn)["public.root"] or "")
    source.sql("alter table parts.low replica identity default; alter table root replica identity full")
    assert "partition parts.low" in (reasons(conn)["public.root"] or "")
    source.sql("alter table parts.low replica identity full")
    assert reasons(conn) == {"public.root": None}
    source.sql("create table keyless (id int) partition by range (id)")
    source.sql("create table keyed_leaf partition of keyless (primary key (id)) for values from (0) to (10)")
    assert "no primary key" in (reasons(conn)["public.keyless"] or "")
    # Neither the identity of the root nor that of the partitions there are goes to those that come.
    source.sql("alter table keyless replica identity full; alter table keyed_leaf replica identity full")
    assert "partitioned without a primary key" in (reasons(conn)["public.keyless"] or "")


def test_a_foreign_table_is_left_out_as_a_partition_too(conn: Connection, source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create foreign data wrapper nowhere; create server away foreign data wrapper nowhere")
    source.sql("create foreign table far (id int) server away")
    source.sql("create table root (id int) partition by range (id); alter table root replica identity full")
    source.sql("create foreign table part partition of root for values from (0) to (10) server away")
    found = reasons(conn)
    assert "foreign" in (found["public.far"] or "")
    assert (found["public.root"] or "").startswith("partition public.part: a foreign table")


def test_what_may_not_be_read(source_matrix: Source, plain_role: str) -> None:
    source = source_matrix
    source.sql("create schema closed; create table closed.t (id int primary key)")
    source.sql("create table open (id int primary key); grant select on open to plain_role")
    source.sql("create table part (id int primary key, secret text, v int); grant select (id, v) on part to plain_role")
    source.sql("create table by_column (id int primary key, v int); grant select (id, v) on by_column to plain_role")
    with dsn.connect(source.dsn_of(plain_role)) as conn:
        found = reasons(conn)
    assert found["public.open"] is None
    assert found["public.by_column"] is None
    assert "may not read column secret; run GRANT SELECT ON public.part TO plain_role" in (found["public.part"] or "")
    assert "GRANT USAGE ON SCHEMA closed TO plain_role" in (found["closed.t"] or "")

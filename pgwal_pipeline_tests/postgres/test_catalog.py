"""What the catalog is asked: types, keys, tables of a publication, the source's identity. On every server at hand."""

from dataclasses import dataclass

import pytest

from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.postgres import candidates, catalog, dsn
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline_tests.support import Source

pytestmark = pytest.mark.matrix


@dataclass(frozen=True)
class StreamedColumn:
    name: str
    type_oid: int
    typmod: int
    identity: bool


@dataclass(frozen=True)
class StreamedRelation:
    oid: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[StreamedColumn, ...]


def as_streamed(source: Source, table: str, identity: set[str], replica_identity: str = "d") -> StreamedRelation:
    rows = source.sql(
        "select attname::text, atttypid, atttypmod from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped"
        " order by attnum",
        table,
    )
    columns = tuple(StreamedColumn(name, oid, typmod, name in identity) for name, oid, typmod in rows)
    return StreamedRelation(source.value("select %s::regclass::oid", table), "public", table, replica_identity, columns)


def test_types(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create type mood as enum ('a', 'b')")
    source.sql("create domain price as numeric(10, 2)")
    source.sql("create domain dear as price check (value > 100)")
    source.sql("create domain pair as numeric(5, 1)[] check (array_length(value, 1) = 2)")
    source.sql(
        """create table t (a int, b numeric(12, 3), c varchar(7)[], d dear, e pair, f dear[], g pair[], h mood[], i int2vector,
                           j char(3), k box[], l "char", m name)"""
    )
    message = as_streamed(source, "t", set())
    with dsn.connect(source.dsn) as conn:
        found = catalog.resolve_types(conn, [(column.type_oid, column.typmod) for column in message.columns] + [(999_999, -1)])
        assert catalog.resolve_types(conn, []) == {}
    types = {column.name: found[column.type_oid, column.typmod] for column in message.columns}
    assert (types["a"].oid, types["a"].typmod, types["a"].name, types["a"].element) == (23, -1, "integer", None)
    assert (types["b"].oid, types["b"].typmod, types["b"].name) == (1700, (12 << 16 | 3) + 4, "numeric(12,3)")
    varchars = types["c"]
    assert varchars.oid == 1015 and varchars.element is not None
    assert (varchars.element.oid, varchars.element.typmod) == (1043, 7 + 4)
    assert (types["d"].oid, types["d"].typmod, types["d"].name) == (1700, (10 << 16 | 2) + 4, "public.dear")
    assert types["e"].oid == 1231 and types["e"].name == "public.pair" and types["e"].element is not None
    assert (types["e"].element.oid, types["e"].element.typmod) == (1700, (5 << 16 | 1) + 4)
    prices = types["f"].element
    assert prices is not None and (prices.oid, prices.typmod, prices.name) == (1700, (10 << 16 | 2) + 4, "public.dear")
    pairs = types["g"].element
    assert pairs is not None and pairs.element is not None and pairs.element.oid == 1700
    assert types["h"].element is not None and types["h"].element.name == "public.mood"
    assert types["i"].element is None  # its text is no array's
    assert types["j"].typmod == 3 + 4
    assert types["k"].element is not None and types["k"].element.delimiter == ";"
    assert types["l"].oid == 18 and types["m"].oid == 19
    assert found[999_999, -1].name == "???"


def test_primary_key(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table t (a int, b int, c int, primary key (c, a) include (b))")
    source.sql("create table none (a int)")
    source.sql("create table late (a int primary key deferrable)")
    source.sql('create table "Odd, ""names""" ("A b" int primary key)')
    with dsn.connect(source.dsn) as conn:

        def key_of(table: str) -> tuple[str, ...]:
            return catalog.primary_key(conn, source.value("select %s::regclass::oid", table))

        assert key_of("t") == ("c", "a")
        assert key_of("none") == ()
        assert key_of("late") == ()
        assert key_of('"Odd, ""names"""') == ("A b",)
        assert catalog.primary_key(conn, 1) == ()


def test_describe_finds_the_key(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table t (a int, b int not null, c int not null, d text, primary key (c, a))")
    source.sql("create unique index by_b on t (c, b) include (d)")
    source.sql("create table bag (a int, b text)")
    with dsn.connect(source.dsn) as conn:

        def described(table: str, identity: set[str], replica_identity: str) -> Relation:
            return catalog.describe(conn, as_streamed(source, table, identity, replica_identity))

        relation = described("t", {"a", "c"}, "d")
        assert relation.table == TableName("public", "t")
        assert relation.key == ("c", "a")  # the index's order
        assert [column.nullable for column in relation.columns] == [False, False, False, True]
        assert [column.identity for column in relation.columns] == [True, False, True, False]
        assert described("t", {"a", "b", "c", "d"}, "f").key == ("c", "a")
        assert described("bag", {"a", "b"}, "f").key == ()
        assert described("bag", set(), "n").key == ()
        # By an index: the primary key where old rows carry it, else the index's own columns, in its order.
        source.sql("alter table t replica identity using index by_b")
        assert described("t", {"c", "b"}, "i").key == ("c", "b")
        assert described("t", {"a", "b", "c"}, "i").key == ("c", "a")
        # A part of the primary key is not published: it tells rows apart no more.
        message = as_streamed(source, "t", {"a", "b", "c"}, "f")
        cut = StreamedRelation(message.oid, "", "t", "f", message.columns[:2])
        assert catalog.describe(conn, cut).key == ()
        assert catalog.describe(conn, cut).table == TableName("pg_catalog", "t")
        # A message older than the catalog: its own columns count, those that are gone may be null.
        message = as_streamed(source, "t", {"a", "c"}, "d")
        source.sql("alter table t drop column c, add column e int")
        relation = catalog.describe(conn, message)
        assert relation.column_names == ("a", "b", "c", "d")
        assert relation.key == ("a", "c")
        assert relation.columns[2].nullable
        message = as_streamed(source, "t", {"a"}, "d")
        source.sql("drop table t")
        assert catalog.describe(conn, message).key == ("a",)


def test_tables_of_a_publication(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create schema shop")
    source.sql("create table shop.t (id int primary key, v numeric(5, 2), g int generated always as (id * 2) stored)")
    source.sql("create table shop.gone (id int, x int, y text); alter table shop.gone drop column x, replica identity full")
    source.sql("create table shop.root (id int primary key, v text) partition by range (id)")
    source.sql("create table shop.leaf partition of shop.root for values from (0) to (10)")
    source.sql("create table shop.empty ()")
    source.sql("create publication p for table shop.t, shop.gone, shop.root, shop.empty with (publish_via_partition_root)")
    source.sql("create publication leaves for table shop.root")
    source.sql("create publication nothing")
    with dsn.connect(source.dsn) as conn:
        tables = {relation.table.name: relation for relation in catalog.tables_of(conn, "p")}
        assert list(tables) == ["empty", "gone", "root", "t"]
        assert tables["t"].column_names == ("id", "v")
        assert tables["t"].key == ("id",)
        assert tables["t"].oid == source.value("select 'shop.t'::regclass::oid")
        assert tables["t"].columns[1].type.name == "numeric(5,2)"
        assert tables["gone"].column_names == ("id", "y")
        assert tables["gone"].key == () and tables["gone"].replica_identity == "f"
        assert all(column.identity for column in tables["gone"].columns)
        assert tables["empty"].columns == ()
        assert [str(relation.table) for relation in catalog.tables_of(conn, "leaves")] == ["shop.leaf"]
        assert catalog.tables_of(conn, "nothing") == []
        with pytest.raises(SourceRefused, match="no publication nosuch"):
            catalog.tables_of(conn, "nosuch")


def test_column_lists_and_row_filters(source_matrix: Source) -> None:
    source = source_matrix
    if source.value("show server_version_num") < "150000":
        pytest.skip("from 15 on")
    source.sql("create table t (id int primary key, secret text, v int)")
    source.sql("create publication p for table t (id, v) where (id > 10 and v is not null)")
    with dsn.connect(source.dsn) as conn:
        (table,) = catalog.published_tables(conn, "p")
        assert table.relation.column_names == ("id", "v")
        assert table.relation.key == ("id",)
        assert table.row_filter == "((id > 10) AND (v IS NOT NULL))"


def test_published_generated_columns(source_matrix: Source) -> None:
    source = source_matrix
    if source.value("show server_version_num") < "180000":
        pytest.skip("from 18 on")
    source.sql("create table t (id int primary key, s int generated always as (id * 2) stored, v int generated always as (id * 3) virtual)")
    source.sql("create publication p for table t with (publish_generated_columns = stored)")
    source.sql("create publication q for table t")
    with dsn.connect(source.dsn) as conn:
        assert catalog.tables_of(conn, "p")[0].column_names == ("id", "s")
        assert catalog.tables_of(conn, "q")[0].column_names == ("id",)


def test_what_stream_and_catalog_say_is_the_same(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table t (a int, b numeric(9, 1)[], c text not null, primary key (c, a))")
    source.sql("create publication p for table t")
    with dsn.connect(source.dsn) as conn:
        assert catalog.tables_of(conn, "p") == [catalog.describe(conn, as_streamed(source, "t", {"a", "c"}))]


def test_source_identity_and_positions(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("drop role if exists plain_reader")
    source.sql("create role plain_reader login")
    try:
        with dsn.connect(source.dsn_of("plain_reader")) as conn:
            identity = catalog.source_identity(conn)
            assert identity.system_identifier == source.value("select system_identifier from pg_control_system()")
            assert identity.timeline == 1
            assert identity.database == source.database
            assert identity.database_oid == source.value("select oid from pg_database where datname = current_database()")
            assert identity.server_version // 10000 == source.server.installation.version
            before = parse_lsn(source.value("select pg_current_wal_flush_lsn()::text"))
            assert catalog.flush_lsn(conn) >= before
            assert catalog.insert_lsn(conn) >= catalog.flush_lsn(conn) - 64
            xmin, xmax, _ = catalog.running_transactions(conn).split(":")
            assert 0 < int(xmin) <= int(xmax)
    finally:
        source.sql("drop role plain_reader")


def test_three_hundred_tables_cost_a_few_queries(source_matrix: Source) -> None:
    source = source_matrix
    source.sql(
        """do $$ begin for i in 1..300 loop
               execute format('create table t%s (id bigint primary key, a numeric(10,2), b text[], c timestamptz, d varchar(10))', i);
           end loop; end $$"""
    )
    source.sql("create publication p for all tables with (publish_via_partition_root)")
    counted = []
    for _ in range(3):  # autovacuum's own are among them, when it comes by
        with dsn.connect(source.dsn) as conn:
            before = _transactions(source)
            assert len(catalog.tables_of(conn, "p")) == 300
            assert len(candidates.candidate_tables(conn, "*.*")) == 300
            conn.execute("select pg_stat_force_next_flush()")
        counted.append(_transactions(source) - before)
    assert min(counted) < 20, counted  # each query is one


def _transactions(source: Source) -> int:
    source.sql("select pg_stat_force_next_flush()")
    return source.value("select xact_commit from pg_stat_database where datname = current_database()")

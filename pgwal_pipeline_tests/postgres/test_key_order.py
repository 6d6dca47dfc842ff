"""Keys of any kind in the order of their index: chunks by them hold every row once."""

from collections.abc import Iterator

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.postgres import copy, dsn
from pgwal_pipeline.postgres.key_order import key_order
from pgwal_pipeline_tests.postgres.reading import WHOLE, check_chunks, plan, relation_of
from pgwal_pipeline_tests.support import Source, fresh_source

SHUFFLED = "(select i from generate_series(1, 1000) i order by md5(i::text)) g"
KEYS = {
    "sparse int": ("k int primary key", f"select i * i - 500000 from {SHUFFLED}"),
    "bigint with gaps": ("k bigint primary key", f"select case when i > 500 then i::int8 << 40 else i end from {SHUFFLED}"),
    "text": (
        "k text primary key",
        f"select case i % 3 when 0 then upper(md5(i::text)) when 1 then 'é''\\' || i else i::text end from {SHUFFLED}",
    ),
    "text of another collation": ('k text collate "ucs_basic" primary key', f"select md5(i::text) from {SHUFFLED}"),
    "varchar": ("k varchar(40) primary key", f"select md5(i::text) from {SHUFFLED}"),
    "char": ("k char(10) primary key", f"select i::text from {SHUFFLED}"),
    "uuid": ("k uuid primary key", f"select md5(i::text)::uuid from {SHUFFLED}"),
    "composite": ("a int, b text, k int, primary key (b, a)", f"select i % 7, (i / 7)::text, i from {SHUFFLED}"),
    "skewed composite": ("a int, k int, primary key (a, k)", f"select case when i < 900 then 1 else i end, i from {SHUFFLED}"),
    "three columns": (
        "a bool, b date, k float8, primary key (a, b, k)",
        f"select i % 2 = 0, date '2024-01-01' + i % 5, i / 3.0 from {SHUFFLED}",
    ),
    "timestamptz": (
        "k timestamptz primary key",
        "select case i when 1 then 'infinity' when 2 then '-infinity' when 3 then '0044-03-15 BC' "
        f"else '2024-01-01'::timestamptz + i * i * '1.000001 s'::interval end from {SHUFFLED}",
    ),
    "bytea": ("k bytea primary key", f"select decode(md5(i::text), 'hex') from {SHUFFLED}"),
    "numeric": ("k numeric primary key", f"select case i when 1 then 'NaN' else i::numeric ^ 15 / 7 end from {SHUFFLED}"),
    "float8": ("k float8 primary key", f"select case i when 1 then 'NaN' when 2 then '-Infinity' else sqrt(i) end from {SHUFFLED}"),
    "enum": ("k mood, n int, primary key (k, n)", f"select (array['sad', 'ok', 'glad'])[i % 3 + 1]::mood, i from {SHUFFLED}"),
    "domain": ("k positive primary key", f"select i from {SHUFFLED}"),
    "domain over enum": ("k dmood, n int, primary key (k, n)", f"select (array['sad', 'ok', 'glad'])[i % 3 + 1]::mood, i from {SHUFFLED}"),
    "array": ("k int[] primary key", f"select array[i % 10, i] from {SHUFFLED}"),
    "row": ("k pair primary key", f"select row(i % 10, i)::pair from {SHUFFLED}"),
    "range": ("k int4range primary key", f"select int4range(i % 10, i + 10) from {SHUFFLED}"),
    "inet": ("k inet primary key", f"select '10.0.0.0'::inet + i from {SHUFFLED}"),
    "jsonb": ("k jsonb primary key", f"select jsonb_build_object('a', i) from {SHUFFLED}"),
    "interval": ("k interval primary key", f"select i * '1 day 1 s'::interval from {SHUFFLED}"),
    "bit": ("k bit(12) primary key", f"select i::bit(12) from {SHUFFLED}"),
    "name and char": ('k name, c "char", primary key (k, c)', f"select i::text, 'x' from {SHUFFLED}"),
    "odd names": ('"K ""ey" int, "select" int, primary key ("select", "K ""ey")', f"select i, i % 3 from {SHUFFLED}"),
    "key in another order": ("a int, b int, c int, primary key (c, a) include (b)", f"select i % 10, i, i from {SHUFFLED}"),
}


@pytest.fixture(scope="module")
def shared(postgres: Postgres) -> Iterator[Source]:
    """One database for the keys' tests, with some types."""
    with fresh_source(postgres) as fresh:
        fresh.sql("create type mood as enum ('sad', 'ok', 'glad'); create type pair as (a int, b int)")
        fresh.sql("create domain positive as int check (value > 0); create domain dmood as mood")
        yield fresh


@pytest.mark.parametrize("columns, rows", KEYS.values(), ids=KEYS.keys())
def test_chunks_hold_every_row_once(shared: Source, columns: str, rows: str) -> None:
    source = shared
    source.sql(f"drop table if exists t; create table t ({columns})")
    source.sql(f"insert into t {rows}")
    source.sql("analyze t")
    relation = relation_of(source)
    chunks = check_chunks(source, relation)
    assert all(chunk.lower is None or len(chunk.lower) == len(relation.key) for chunk in chunks)
    with dsn.connect(source.dsn) as conn:
        order = key_order(conn, relation)
        assert order is not None
        # A bound is found from the one before it by the index, not by a look at all keys.
        lower = chunks[-1].lower
        assert lower is not None
        shown = copy._set_and_ask(
            conn,
            copy._ALONG_THE_INDEX,
            f"EXPLAIN SELECT {order.columns} FROM ONLY public.t WHERE {order.after(lower)} ORDER BY {order.ascending} LIMIT 100",
        )
    text = "\n".join(row[0] for row in shown)
    if "dmood" not in columns:  # a domain over an enum is compared as the enum, which its index is not of
        assert "Index Cond" in text
        assert "Sort" not in text and "Seq Scan" not in text


@pytest.mark.matrix
def test_chunks_on_every_server(source_matrix: Source) -> None:
    source_matrix.sql("create table t (a int, b text, primary key (a, b))")
    source_matrix.sql("insert into t select i / 13, i from generate_series(1, 1000) i")
    check_chunks(source_matrix, relation_of(source_matrix))


def test_keys_of_extensions(source: Source) -> None:
    """Their operators are not in pg_catalog: by name alone, a comparison would silently be another one."""
    source.sql("create schema ext; create extension citext schema ext")
    source.sql("create table t (k ext.citext primary key)")
    source.sql(f"insert into t select case when i % 2 = 0 then 'a' else 'B' end || i from {SHUFFLED}")
    check_chunks(source, relation_of(source))
    source.sql("create table u (n int, k ext.citext, primary key (k, n))")
    source.sql(f"insert into u select i, case i % 3 when 0 then 'a' when 1 then 'B' else 'c' end from {SHUFFLED}")
    check_chunks(source, relation_of(source, "u"))


def test_identity_indexes(source: Source) -> None:
    source.sql("create table t (a int not null, b text not null)")
    source.sql("insert into t select i, i from generate_series(1, 1000) i")
    for definition, is_order in (
        ("(b text_pattern_ops)", True),
        ("(b text_pattern_ops, a)", True),
        ("(a desc, b desc)", True),
        ("(a desc nulls first)", True),
        ("(a desc, b)", False),
        ("(a nulls first)", False),
    ):
        source.sql(f"create unique index i on t {definition}; alter table t replica identity using index i")
        relation = relation_of(source)
        if is_order:
            check_chunks(source, relation)
        else:
            assert plan(source, relation, 100) == [WHOLE]
        source.sql("alter table t replica identity default; drop index i")

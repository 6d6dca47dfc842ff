"""The demo's shop: the same seed every time."""

from pgwal_pipeline.demo.invariants import TABLES
from pgwal_pipeline.demo.shop import describe, is_seeded, seed
from pgwal_pipeline_tests.demo.invariants_at_source import broken_at_source
from pgwal_pipeline_tests.support import Source


def test_the_seed_is_one_transaction_and_the_same_each_time(source: Source) -> None:
    conn = source.connect()
    assert not is_seeded(conn)
    rows = seed(conn, customers=40, products=12, orders=90)
    assert is_seeded(conn)
    assert rows == sum(source.value(f"select count(*) from shop.{table}") for table in TABLES)
    first = _digest(source)
    source.sql("drop schema shop cascade")
    seed(conn, customers=40, products=12, orders=90)
    assert _digest(source) == first
    assert not any(broken_at_source(source).values())


def test_long_descriptions_are_stored_out_of_line(source: Source) -> None:
    seed(source.connect(), customers=5, products=12, orders=1)
    assert source.value("select pg_table_size(reltoastrelid) from pg_class where oid = 'shop.products'::regclass") > 12 * 4000


def test_a_shop_of_an_earlier_version_gets_its_comments(source: Source) -> None:
    conn = source.connect()
    seed(conn, customers=5, products=12, orders=5)
    comment = "select obj_description('shop.payments'::regclass)"
    told = source.value(comment)
    source.sql("comment on table shop.payments is null")
    describe(conn)
    describe(conn)
    assert source.value(comment) == told
    assert told


def _digest(source: Source) -> list[str]:
    return [source.value(f"select md5(string_agg(t::text, chr(10) order by t::text)) from shop.{table} t") for table in TABLES]

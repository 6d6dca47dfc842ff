"""The demo's shop: the same seed every time, invariants that hold under load and tell when broken, a workload that outlives its server."""

import time
from collections.abc import Callable

import psycopg2
import psycopg2.errors
import pytest

from pgwal_pipeline.demo.invariants import INVARIANTS, TABLES
from pgwal_pipeline.demo.shop import is_seeded, seed
from pgwal_pipeline.demo.workload import DEEDS, Workload
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline_tests.support import Source, wait_for


def broken_at_source(source: Source) -> dict[str, int]:
    """Offending rows by invariant, each asked in one statement of the source."""
    tables = {name: f"shop.{name}" for name in TABLES}
    return {rule.name: len(source.sql(rule.sql.format_map(tables))) for rule in INVARIANTS}


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


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("order totals", "update shop.order_lines set quantity = quantity + 1 where order_id = 7 and line_no = 1"),
        ("money received", "delete from shop.payments where order_id = (select min(order_id) from shop.payments)"),
        ("money moved", "update shop.customers set spent = spent + 0.01 where id = 3"),
        ("stock", "update shop.inventory set on_hand = on_hand - 1 where warehouse = 'lyon'"),
        (
            "references",
            "alter table shop.orders drop constraint orders_customer_id_fkey; update shop.orders set customer_id = 0 where id = 1",
        ),
    ],
)
def test_an_invariant_shows_what_breaks_it(source: Source, name: str, damage: str) -> None:
    conn = source.connect()
    seed(conn, customers=10, products=12, orders=30)
    source.sql(damage)
    assert broken_at_source(source)[name] > 0


def test_every_deed_keeps_the_invariants_under_load(source: Source) -> None:
    conn = source.connect()
    seed(conn, customers=40, products=24, orders=60)
    workload = Workload(source.dsn, rate=3000, threads=4, seed=1)
    workload.start()
    try:
        wait_for(lambda: len(workload.tally().done) == len(DEEDS) or workload.error, what="every deed to be done once", seconds=60)
        for _ in range(5):
            assert not any(broken_at_source(source).values())
    finally:
        assert workload.stop()
    assert workload.error is None
    assert not any(broken_at_source(source).values())
    assert len(INVARIANTS) == len(broken_at_source(source))


def test_the_rate_is_kept(source: Source) -> None:
    seed(source.connect(), customers=10, products=12, orders=30)
    workload = Workload(source.dsn, rate=50, threads=2, seed=1)
    workload.start()
    time.sleep(4)
    assert workload.stop()
    assert 100 <= workload.tally().transactions + workload.tally().rolled_back <= 300


def test_the_workload_outlives_its_server(make_server: Callable[..., Postgres]) -> None:
    server = make_server()
    with plain_session(server.dsn()) as conn:
        seed(conn, customers=10, products=12, orders=30)
    workload = Workload(server.dsn(), rate=200, seed=1)
    workload.start()
    try:
        wait_for(lambda: workload.tally().transactions > 20, what="the first transactions")
        server.kill()
        wait_for(lambda: not workload.tally().connected, what="the workload to notice")
        before = workload.tally().transactions
        server.start()
        wait_for(lambda: workload.tally().transactions > before + 20, what="business to go on")
    finally:
        begin = time.monotonic()
        assert workload.stop()
    assert time.monotonic() - begin < 20
    assert workload.error is None


def test_an_error_of_another_kind_ends_the_workload_and_is_kept(source: Source) -> None:
    workload = Workload(source.dsn, rate=200, threads=1)
    workload.start()
    wait_for(lambda: workload.error, what="the error")
    assert isinstance(workload.error, psycopg2.errors.UndefinedTable)
    assert workload.stop()


def _digest(source: Source) -> list[str]:
    return [source.value(f"select md5(string_agg(t::text, chr(10) order by t::text)) from shop.{table} t") for table in TABLES]

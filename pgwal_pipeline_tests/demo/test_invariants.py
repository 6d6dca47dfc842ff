"""The shop's invariants tell when they are broken."""

import pytest

from pgwal_pipeline.demo.shop import seed
from pgwal_pipeline_tests.demo.invariants_at_source import broken_at_source
from pgwal_pipeline_tests.support import Source


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

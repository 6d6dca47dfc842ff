"""The shop's invariants, which hold between any two transactions, and the queries that find rows breaking them.

Each query joins several tables, so it is only sure to be empty on tables at the same transactional state: on the source in one statement,
and on the lake's `current` tables at the versions of one publish. The queries are plain SQL that Postgres, Spark and DataFusion all accept;
`{orders}` and the like are replaced by the tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

TABLES = ("customers", "inventory", "order_lines", "orders", "payments", "products")


@dataclass(frozen=True, slots=True)
class Invariant:
    """An invariant of the shop: `says` states it in words, `sql` returns the rows that break it."""

    name: str
    says: str
    sql: str


INVARIANTS = (
    Invariant(
        "order totals",
        "an order's total is the sum of its lines",
        """SELECT o.id FROM {orders} o
        LEFT JOIN (SELECT order_id, sum(quantity * unit_price) AS amount FROM {order_lines} GROUP BY order_id) l ON l.order_id = o.id
        WHERE o.total <> coalesce(l.amount, 0)""",
    ),
    Invariant(
        "money received",
        "what an order has been paid is the sum of its payments and refunds",
        """SELECT o.id FROM {orders} o
        LEFT JOIN (SELECT order_id, sum(amount) AS amount FROM {payments} GROUP BY order_id) p ON p.order_id = o.id
        WHERE o.paid <> coalesce(p.amount, 0)""",
    ),
    Invariant(
        "money moved",
        "what a customer has spent is what their orders have been paid",
        """SELECT c.id FROM {customers} c
        LEFT JOIN (SELECT customer_id, sum(paid) AS paid FROM {orders} GROUP BY customer_id) o ON o.customer_id = c.id
        WHERE c.spent <> coalesce(o.paid, 0)""",
    ),
    Invariant(
        "stock",
        "every piece ever received lies on a shelf or in an order, whatever was moved, returned or given another SKU",
        """SELECT p.sku FROM {products} p
        LEFT JOIN (SELECT sku, sum(on_hand) AS pieces FROM {inventory} GROUP BY sku) i ON i.sku = p.sku
        LEFT JOIN (SELECT sku, sum(quantity) AS pieces FROM {order_lines} GROUP BY sku) l ON l.sku = p.sku
        WHERE p.received <> coalesce(i.pieces, 0) + coalesce(l.pieces, 0)""",
    ),
    Invariant(
        "references",
        "no line without its order and product, no payment without its order, no order without its customer",
        """SELECT l.order_id FROM {order_lines} l LEFT JOIN {orders} o ON o.id = l.order_id LEFT JOIN {products} p ON p.sku = l.sku
        WHERE o.id IS NULL OR p.sku IS NULL
        UNION ALL SELECT y.order_id FROM {payments} y LEFT JOIN {orders} o ON o.id = y.order_id WHERE o.id IS NULL
        UNION ALL SELECT o.id FROM {orders} o LEFT JOIN {customers} c ON c.id = o.customer_id WHERE c.id IS NULL""",
    ),
)


def broken_in_lake(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Count the rows that break each invariant in `current` at one publish.

    `tables` maps `shop.orders` … to its `path` and Delta `version`, as in the JSON of `pgwal as-of`.
    """
    from deltalake import DeltaTable, QueryBuilder  # the workload needs no Delta

    query = QueryBuilder()
    for name in TABLES:
        table = tables[f"shop.{name}"]
        query = query.register(name, DeltaTable(table["path"], version=table["version"]))
    names = {name: name for name in TABLES}
    return {rule.name: sum(batch.num_rows for batch in query.execute(rule.sql.format_map(names))) for rule in INVARIANTS}


def main() -> int:
    """Check the invariants at the newest publish of the lake PGWAL_LAKE and print the result; return exit code 1 if one is broken."""
    from pgwal_pipeline.pipeline.as_of import find_publish
    from pgwal_pipeline.settings import Settings

    publish = find_publish(Settings.from_environment())
    broken = broken_in_lake(publish["tables"])
    click.echo(f"At {publish['lsn']}, published {publish['published_at']}:")
    for rule in INVARIANTS:
        click.echo(f"  {'broken by ' + str(broken[rule.name]) + ' rows' if broken[rule.name] else 'holds'}: {rule.says}")
    return int(any(broken.values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Four tables of the shop's own, made of what the pipeline publishes: an example to copy.

An asset runs by itself when a publish has changed a table that it reads. All tables of one run stand at one LSN, so sums over them agree;
each run checks that. The marts are Delta tables in `marts/` beside the lake's own.
"""

from typing import Any

import dagster as dg
import polars as pl
from deltalake import DeltaTable, write_deltalake

from pgwal_pipeline import PublishedLake, PublishedState, apply_changes
from pgwal_pipeline.components.resources import LakeSpark

GROUP = "marts"
CUSTOMERS, INVENTORY, LINES, ORDERS, PAYMENTS, PRODUCTS = (
    dg.AssetKey(["current", "shop", name]) for name in ("customers", "inventory", "order_lines", "orders", "payments", "products")
)
# `eager()` would miss a publish that comes while a mart is being made, until the next one: it takes the run's end for an answer to it.
WHEN_CHANGED = (
    dg.AutomationCondition.any_deps_match(dg.AutomationCondition.newly_updated()).since(dg.AutomationCondition.newly_requested())
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.any_deps_in_progress()
    & ~dg.AutomationCondition.in_progress()
)
_TIDY_EVERY = 50  # versions of a table, after which its small files are joined


@dg.asset(
    group_name=GROUP,
    kinds={"pyspark", "deltalake"},
    deps=[PAYMENTS],
    automation_condition=WHEN_CHANGED,
    check_specs=[dg.AssetCheckSpec("is_the_sum_of_payments", asset="revenue_by_day")],
)
def revenue_by_day(context: dg.AssetExecutionContext, lake: PublishedLake, spark: LakeSpark) -> dg.MaterializeResult:
    """What was paid on each day (UTC), less refunds. Payments that changed since the last run are merged into a table of its own."""
    state, session = lake.state(context), spark.session()
    changes, own = state.changes("shop.payments"), path_of(lake, "payments")
    context.log.info(f"{changes.since or 'the beginning'} to {changes.until}: {changes.reason or 'changes by key'}")
    version = apply_changes(session, own, changes)
    days = session.sql(
        "SELECT to_date(paid_at) AS day, sum(amount) AS revenue, count(*) AS payments FROM {payments} GROUP BY ALL ORDER BY day",
        payments=session.read.format("delta").load(own),
    ).toArrow()
    write_deltalake(path_of(lake, "revenue_by_day"), days, mode="overwrite")
    if version % _TIDY_EVERY == 0:
        session.sql(f"OPTIMIZE delta.`{own}`")
    revenue = sum(day.as_py() for day in days["revenue"])
    paid = state.polars("shop.payments").select(pl.col("amount").sum()).collect().item()
    check = _check("is_the_sum_of_payments", revenue == paid, revenue=str(revenue), payments=str(paid), at=state.lsn)
    return dg.MaterializeResult(metadata={"dagster/row_count": days.num_rows, "revenue": float(revenue)}, check_results=[check])


@dg.asset(
    group_name=GROUP,
    kinds={"polars", "deltalake"},
    deps=[CUSTOMERS, ORDERS],
    automation_condition=WHEN_CHANGED,
    check_specs=[
        dg.AssetCheckSpec("each_order_has_its_customer", asset="customers_with_open_orders"),
        dg.AssetCheckSpec("spent_is_what_was_paid", asset="customers_with_open_orders"),
    ],
)
def customers_with_open_orders(context: dg.AssetExecutionContext, lake: PublishedLake) -> dg.MaterializeResult:
    """Customers who wait for something, how much, and since when. Orders and customers are two tables at one LSN."""
    state = lake.state(context)
    orders, customers = state.polars("shop.orders"), state.polars("shop.customers")
    waiting = (
        orders.filter(pl.col("status").is_in(["placed", "paid"]))
        .group_by("customer_id")
        .agg(pl.len().alias("open_orders"), pl.col("total").sum(), pl.col("placed_at").min().alias("waiting_since"))
        .join(customers.select(customer_id="id", name="name", email="email"), on="customer_id", how="left")
        .sort("customer_id")
        .collect()
    )
    strangers = waiting["name"].null_count()
    paid = orders.group_by("customer_id").agg(pl.col("paid").sum())
    spent = customers.join(paid, left_on="id", right_on="customer_id", how="left").filter(pl.col("spent") != pl.col("paid").fill_null(0))
    wrong = spent.select(pl.len()).collect().item()
    _replace(lake, "customers_with_open_orders", waiting)
    return dg.MaterializeResult(
        metadata={"dagster/row_count": waiting.height, "open_orders": int(waiting["open_orders"].sum())},
        check_results=[
            _check("each_order_has_its_customer", strangers == 0, strangers=strangers),
            _check("spent_is_what_was_paid", wrong == 0, customers=wrong),
        ],
    )


@dg.asset(
    group_name=GROUP,
    kinds={"duckdb", "deltalake"},
    deps=[INVENTORY, LINES, PRODUCTS],
    automation_condition=WHEN_CHANGED,
    check_specs=[
        dg.AssetCheckSpec("stock_is_not_negative", asset="stock_alerts"),
        dg.AssetCheckSpec("no_piece_is_lost", asset="stock_alerts"),
    ],
)
def stock_alerts(context: dg.AssetExecutionContext, lake: PublishedLake) -> dg.MaterializeResult:
    """Shelves that are nearly empty. A shelf with less than nothing on it fails the check."""
    with lake.state(context).duckdb(["shop.inventory", "shop.order_lines", "shop.products"]) as shop:
        low = shop.sql(
            "SELECT sku, warehouse, name, on_hand FROM shop.inventory JOIN shop.products USING (sku) WHERE on_hand < 20 ORDER BY ALL"
        ).pl()
        negative = shop.sql("SELECT sku, warehouse, on_hand FROM shop.inventory WHERE on_hand < 0 ORDER BY ALL").fetchall()
        lost = shop.sql("""
            SELECT sku FROM shop.products
            LEFT JOIN (SELECT sku, sum(on_hand) AS pieces FROM shop.inventory GROUP BY sku) AS stored USING (sku)
            LEFT JOIN (SELECT sku, sum(quantity) AS pieces FROM shop.order_lines GROUP BY sku) AS sold USING (sku)
            WHERE received <> coalesce(stored.pieces, 0) + coalesce(sold.pieces, 0) ORDER BY sku""").fetchall()
    _replace(lake, "stock_alerts", low)
    return dg.MaterializeResult(
        metadata={"dagster/row_count": low.height},
        check_results=[
            _check("stock_is_not_negative", not negative, shelves=len(negative), first=str(negative[:5])),
            _check("no_piece_is_lost", not lost, products=len(lost), first=str(lost[:5])),
        ],
    )


@dg.asset(
    group_name=GROUP,
    kinds={"polars", "deltalake"},
    deps=[ORDERS],
    automation_condition=WHEN_CHANGED,
    check_specs=[dg.AssetCheckSpec("ends_where_the_orders_stand", asset="order_history")],
)
def order_history(context: dg.AssetExecutionContext, lake: PublishedLake) -> dg.MaterializeResult:
    """Each step that an order took: placed, paid, shipped, and what else was changed, by every committed change.

    It begins with the orders as they were when it was first made. It begins anew where the changes cannot be told, rather than with a hole.
    """
    state, path = lake.state(context), path_of(lake, "order_history")
    changes = state.changes("shop.orders", history=True)
    order = [pl.col("id").alias("order_id"), "status", "total", "paid", pl.col("_pgwal_commit_lsn").alias("lsn")]
    if changes.complete:
        context.log.info(f"The history begins anew: {changes.reason}.")
        known = [pl.lit(0, pl.Int64).alias("ordinal"), pl.lit("R").alias("op"), pl.lit(None, pl.Datetime("us", "UTC")).alias("at")]
        _replace(lake, "order_history", changes.polars().select(*order, *known).collect())
    else:
        told = [pl.col("_pgwal_ordinal").alias("ordinal"), pl.col("_pgwal_op").alias("op"), pl.col("_pgwal_committed_at").alias("at")]
        steps = changes.polars().filter(pl.col("_pgwal_op") != "T").select(*order, *told).collect()
        if steps.height:  # a run that died had written some of them: they are replaced
            write_deltalake(path, steps, mode="overwrite", predicate=f"lsn >= {steps['lsn'].min()}")
            _tidy(path)
    history = pl.scan_delta(path)
    last = history.sort("lsn", "ordinal").group_by("order_id", maintain_order=True).last().filter(~pl.col("op").is_in(["D", "K"]))
    wrong = _differences(last.select("order_id", "status", "total", "paid"), state)
    rows = history.select(pl.len()).collect().item()
    return dg.MaterializeResult(
        metadata={"dagster/row_count": rows},
        check_results=[_check("ends_where_the_orders_stand", wrong == 0, orders=wrong)],
    )


def _differences(last: pl.LazyFrame, state: PublishedState) -> int:
    """Count the orders that end otherwise than they stand in `state`."""
    now = state.polars("shop.orders").select(pl.col("id").alias("order_id"), "status", "total", "paid")
    ways = ((last, now), (now, last))
    missing = pl.concat([ours.join(theirs, on=["order_id", "status", "total", "paid"], how="anti") for ours, theirs in ways])
    return missing.select(pl.col("order_id").n_unique()).collect().item()


def path_of(lake: PublishedLake, name: str) -> str:
    """Return where the mart `name` is."""
    return f"{lake.settings.lake}/marts/{name}"


def _replace(lake: PublishedLake, name: str, rows: pl.DataFrame) -> None:
    """Replace all rows of the mart `name`."""
    write_deltalake(path_of(lake, name), rows, mode="overwrite", schema_mode="overwrite")
    _tidy(path_of(lake, name))


def _tidy(path: str) -> None:
    """Join small files, and remove those that no reader of the last week needs, once in a while."""
    table = DeltaTable(path)
    if table.version() % _TIDY_EVERY == _TIDY_EVERY - 1:
        table.optimize.compact()
        table.vacuum(dry_run=False)


def _check(name: str, passed: bool, **metadata: Any) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=passed, check_name=name, metadata=metadata)


MARTS = (revenue_by_day, customers_with_open_orders, stock_alerts, order_history)


def build_marts() -> dg.Definitions:
    """Build the marts, and Dagster's own sensor that runs them, turned on. They use the resources `lake` and `spark` of the location."""
    automation = dg.AutomationConditionSensorDefinition(
        "default_automation_condition_sensor", target=dg.AssetSelection.all(), default_status=dg.DefaultSensorStatus.RUNNING
    )
    return dg.Definitions(assets=MARTS, sensors=[automation])

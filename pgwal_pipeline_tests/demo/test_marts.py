"""The demo's marts on a real lake: at each publish they say what the source says, whatever was done to it and wherever a run has died."""

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import dagster as dg
import polars as pl
import psycopg2
import psycopg2.errors
import pytest

from pgwal_pipeline import PublishedLake, definitions
from pgwal_pipeline.components.resources import LakeSpark
from pgwal_pipeline.demo import definitions as demo_definitions
from pgwal_pipeline.demo import marts
from pgwal_pipeline.demo.shop import seed
from pgwal_pipeline.demo.workload import DEEDS
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.published.state import PublishedState, open_state
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.pipelines import Pipeline

# What the workload never does to payments: one that gets another key, one of another day, and a payment and its refund that go.
REWRITTEN = """
UPDATE shop.payments SET id = gen_random_uuid() WHERE id = (SELECT min(id::text)::uuid FROM shop.payments);
UPDATE shop.payments SET paid_at = paid_at - interval '36 hours' WHERE id = (SELECT max(id::text)::uuid FROM shop.payments);
DELETE FROM shop.payments WHERE order_id = (SELECT min(id) FROM shop.orders WHERE status = 'refunded');
"""
REVENUE = "SELECT (paid_at AT TIME ZONE 'UTC')::date, sum(amount), count(*) FROM shop.payments GROUP BY 1"
WAITING = """SELECT customer_id, count(*), sum(total), min(placed_at), name, email
FROM shop.orders JOIN shop.customers c ON c.id = customer_id WHERE status IN ('placed', 'paid') GROUP BY customer_id, name, email"""
LOW = "SELECT sku, warehouse, name, on_hand FROM shop.inventory JOIN shop.products USING (sku) WHERE on_hand < 20"
STANDING = "SELECT id, status::text, total, paid FROM shop.orders"


class Shop:
    """A small shop, its pipeline, and its marts in an instance of Dagster."""

    def __init__(self, pipeline: Pipeline, instance: dg.DagsterInstance) -> None:
        self.pipeline, self.instance, self.source = pipeline, instance, pipeline.source
        self.lake, self.rng = PublishedLake(lake=pipeline.settings.lake), random.Random(11)
        self.conn = self.source.connect()
        seed(self.conn, customers=20, products=12, orders=60)
        pipeline.sync()

    def work(self, deeds: int = 60) -> None:
        """Random deeds of the workload, one after the other."""
        for deed in self.rng.choices(list(DEEDS), list(DEEDS.values()), k=deeds):
            with suppress(psycopg2.errors.IntegrityError):  # of two customers of one name
                deed(self.conn, self.rng)

    def publish(self) -> PublishedState:
        self.pipeline.drain()
        self.pipeline.publish()
        return open_state(self.pipeline.settings)

    def materialize(self, *assets: dg.AssetsDefinition, fails: bool = False) -> dict[str, bool]:
        """Materialize marts (all, if none is named) in one run; the checks by name, and whether they passed."""
        resources = {"lake": self.lake, "spark": LakeSpark()}
        done = dg.materialize(assets or marts.MARTS, instance=self.instance, resources=resources, raise_on_error=False)
        assert done.success == (not fails)
        return {found.check_name: found.passed for found in done.get_asset_check_evaluations()}

    def mart(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        rows = TableDataset(marts.path_of(self.lake, name)).to_table(columns=list(columns) or None)
        return sorted(tuple(row.values()) for row in rows.to_pylist())

    @staticmethod
    def told(state: PublishedState, first: PublishedState) -> list[tuple[Any, ...]]:
        """Each change of an order between two states, as raw has it."""
        changes = state.changes("shop.orders", since=first, history=True)
        assert not changes.complete
        return changes.polars().select("_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op", "id").sort(pl.all()).collect().rows()

    def written(self) -> list[tuple[Any, ...]]:
        """The same, as the mart has it."""
        return [row for row in self.mart("order_history", "lsn", "ordinal", "op", "order_id") if row[2] != "R"]

    def assert_marts(self) -> None:
        """Each mart is what the source says, in one statement over all of it."""
        assert self.mart("revenue_by_day") == sorted(self.source.sql(REVENUE))
        assert self.mart("customers_with_open_orders") == sorted(self.source.sql(WAITING))
        assert self.mart("stock_alerts") == sorted(self.source.sql(LOW))
        history = pl.scan_delta(marts.path_of(self.lake, "order_history")).sort("lsn", "ordinal").collect()
        last = {step["order_id"]: step for step in history.to_dicts()}
        found = [(order, step["status"], step["total"], step["paid"]) for order, step in last.items() if step["op"] not in "DK"]
        assert sorted(found) == sorted(self.source.sql(STANDING))


@pytest.fixture
def shop(pipeline: Pipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(LakeSpark, "session", lambda self: spark)
    with dagster_instance() as instance:
        yield Shop(pipeline, instance)


def test_the_marts_follow_the_source(shop: Shop) -> None:
    first = open_state(shop.pipeline.settings)
    assert set(shop.materialize().values()) == {True}
    shop.assert_marts()
    shop.work()
    shop.source.sql(REWRITTEN)
    shop.source.sql("DELETE FROM shop.orders o WHERE total = 0 AND NOT EXISTS (SELECT FROM shop.payments WHERE order_id = o.id)")
    placed = shop.source.value("SELECT max(id) FROM shop.orders WHERE status = 'placed'")
    shop.source.sql("UPDATE shop.order_lines SET order_id = order_id WHERE order_id = %s", placed)
    state = shop.publish()
    checks = shop.materialize()
    assert len(checks) == 6
    assert set(checks.values()) == {True}
    shop.assert_marts()
    assert {key.value for key in _read(shop, "pgwal/read_lsn")} == {state.lsn}
    told = shop.told(state, first)
    assert told == shop.written()
    assert len(told) > 30


@pytest.mark.soak
def test_a_run_that_died_after_it_wrote_does_no_harm(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the merge and the materialization, and the next run reads a newer publish."""
    first = open_state(shop.pipeline.settings)
    both = (marts.revenue_by_day, marts.order_history)
    shop.materialize()
    before = shop.mart("payments", "id")
    shop.work(30)
    shop.source.sql(REWRITTEN)
    shop.publish()
    with monkeypatch.context() as deadly:

        def die(*_: Any, **__: Any) -> None:
            raise RuntimeError("it died here")

        deadly.setattr(marts, "_tidy", die)
        shop.materialize(marts.order_history, fails=True)
        deadly.setattr(marts, "write_deltalake", die)
        shop.materialize(marts.revenue_by_day, fails=True)
    assert shop.mart("payments", "id") != before
    assert any(op != "R" for (op,) in shop.mart("order_history", "op"))
    shop.work(30)
    state = shop.publish()
    assert set(shop.materialize(*both).values()) == {True}
    assert set(shop.materialize(*both).values()) == {True}
    assert shop.mart("revenue_by_day") == sorted(shop.source.sql(REVENUE))
    steps = (
        state.changes("shop.orders", since=first, history=True).polars().select("_pgwal_commit_lsn", "_pgwal_ordinal", "id").sort(pl.all())
    )
    written = [row[:3] for row in shop.mart("order_history", "lsn", "ordinal", "order_id", "op") if row[3] != "R"]
    assert written == steps.collect().rows()


def test_checks_fail_when_the_shop_is_wrong(shop: Shop) -> None:
    shop.source.sql("ALTER TABLE shop.inventory DROP CONSTRAINT inventory_on_hand_check")
    shop.source.sql("UPDATE shop.inventory SET on_hand = -1 WHERE sku = (SELECT min(sku) FROM shop.products)")
    shop.source.sql("UPDATE shop.customers SET spent = spent + 1 WHERE id = 3")
    shop.publish()
    checks = shop.materialize(marts.stock_alerts, marts.customers_with_open_orders)
    assert {name for name, passed in checks.items() if not passed} == {
        "stock_is_not_negative",
        "no_piece_is_lost",
        "spent_is_what_was_paid",
    }
    assert checks["each_order_has_its_customer"]


def test_a_check_fails_when_a_mart_is_wrong(shop: Shop, spark: Any) -> None:
    shop.materialize()
    for name, rows in (("payments", "amount > 0"), ("order_history", "status = 'shipped'")):
        spark.sql(f"DELETE FROM delta.`{marts.path_of(shop.lake, name)}` WHERE {rows}")
    failed = {name for name, passed in shop.materialize(marts.revenue_by_day, marts.order_history).items() if not passed}
    assert failed == {"is_the_sum_of_payments", "ends_where_the_orders_stand"}


def test_no_publish_is_missed_while_a_mart_is_made() -> None:
    """By Dagster's own evaluation: one run for a publish of several tables, and one more for those that came meanwhile."""
    tables = [marts.CUSTOMERS, marts.ORDERS]
    found = dg.Definitions(assets=[marts.customers_with_open_orders], resources={"lake": PublishedLake()})
    key = marts.customers_with_open_orders.key
    with dagster_instance() as instance:
        cursor = None

        def asked(*updated: dg.AssetKey) -> int:
            nonlocal cursor
            for asset in updated:
                instance.report_runless_asset_event(dg.AssetMaterialization(asset))
            ticked = dg.evaluate_automation_conditions(found, instance=instance, cursor=cursor)
            cursor = ticked.cursor
            return ticked.total_requested

        assert asked(*tables) == 0, "the first look"
        assert asked(*tables) == 1
        assert asked(key) == 0
        assert asked(*tables) == 1
        assert asked(marts.ORDERS, key) == 1, "published while it was made"
        assert asked(key) == 0
        assert asked() == 0
        assert asked(marts.PAYMENTS) == 0, "another table's"


def test_only_the_demo_has_marts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, value in {
        "PGWAL_LAKE": str(tmp_path),
        "DAGSTER_HOME": str(tmp_path),
        "PGWAL_SOURCE_DSN": "postgresql://127.0.0.1:1/none",
    }.items():
        monkeypatch.setenv(name, value)
    keys = {asset.key for asset in marts.MARTS}
    of_demo = demo_definitions.defs().get_repository_def()
    assert keys <= of_demo.asset_graph.get_all_asset_keys()
    assert not keys & definitions.defs().get_repository_def().asset_graph.get_all_asset_keys()
    (sensor,) = (found for found in of_demo.sensor_defs if found.name == "default_automation_condition_sensor")
    assert sensor.default_status == dg.DefaultSensorStatus.RUNNING


def _read(shop: Shop, name: str) -> list[Any]:
    """That entry of the newest materialization of each mart."""
    events = [shop.instance.get_latest_materialization_event(asset.key) for asset in marts.MARTS]
    return [event.asset_materialization.metadata[name] for event in events if event is not None and event.asset_materialization is not None]

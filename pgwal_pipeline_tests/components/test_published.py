"""The published lake in Dagster: all steps of a run read one publish, and what was read stands in the metadata."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from duckdb import DuckDBPyRelation
from pyspark.sql import DataFrame

from pgwal_pipeline import PublishedLake, PublishedTableIOManager
from pgwal_pipeline.components.dagster_internals import agreed_in_run
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Publish, TablePointer
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance

_TABLES = (TableName("shop", "orders"), TableName("shop", "Order Lines"))


class Shop:
    """A lake with two tables of one column, in which each publish adds a row to both."""

    def __init__(self, uri: str) -> None:
        self.lake = Lake(uri)
        self.published = 0

    def publish(self) -> str:
        self.published += 1
        pointers = {}
        for table in _TABLES:
            path = self.lake.current(table)
            write_deltalake(path, pa.table({"id": pa.array([self.published], pa.int64())}), mode="append")
            pointers[table] = TablePointer(path, self.published - 1)
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=self.published)
        Ledger(self.lake).record_publish(Publish(0x100 * self.published, at, pointers))
        return f"0/{self.published}00"


@pytest.fixture
def shop(tmp_path: Any) -> Shop:
    made = Shop(str(tmp_path / "lake"))
    made.publish()
    return made


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dagster_instance() as found:
        yield found


def _job(shop: Shop, *assets: Any) -> dg.JobDefinition:
    resources = {"lake": PublishedLake(lake=shop.lake.uri), "tables": PublishedTableIOManager(lake=shop.lake.uri)}
    made = {key for asset in assets for key in asset.keys}
    tables = {key: dg.AssetSpec(key) for asset in assets for key in asset.dependency_keys if key not in made}
    job = dg.define_asset_job("marts", selection=sorted(made))
    return dg.Definitions(assets=[*assets, *tables.values()], resources=resources, jobs=[job]).resolve_job_def("marts")


def _reading(shop: Shop, publishing: bool = True) -> tuple[list[tuple[str, int]], dg.JobDefinition]:
    """Two assets that read one after the other, and a publish between them."""
    read: list[tuple[str, int]] = []

    @dg.asset
    def first(context: dg.AssetExecutionContext, lake: PublishedLake) -> None:
        state = lake.state(context)
        read.append((state.lsn, state.arrow("shop.orders").num_rows))
        if publishing:
            shop.publish()

    @dg.multi_asset(specs=[dg.AssetSpec("second", deps=["first"]), dg.AssetSpec("third", deps=["first"])])
    def others(context: dg.AssetExecutionContext, lake: PublishedLake) -> Iterator[dg.MaterializeResult]:
        state = lake.state(context)
        read.append((state.lsn, state.arrow('shop."Order Lines"').num_rows))
        yield dg.MaterializeResult("second", metadata={"mine": 1})
        yield dg.MaterializeResult("third")

    return read, _job(shop, first, others)


def test_all_steps_of_a_run_read_one_publish(shop: Shop, instance: dg.DagsterInstance) -> None:
    read, job = _reading(shop)
    done = job.execute_in_process(instance=instance)
    assert read == [("0/100", 1), ("0/100", 1)]
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    assert run.tags["pgwal/as_of"] == "0/100"
    assert job.execute_in_process(instance=instance).success
    assert read[2:] == [("0/200", 2), ("0/200", 2)]


def test_a_tag_says_what_is_read_and_stays_for_a_reexecution(shop: Shop, instance: dg.DagsterInstance) -> None:
    shop.publish()
    read, job = _reading(shop)
    for told, lsn in (("0/100", "0/100"), ("2026-01-01T01:30:00Z", "0/100"), ("latest", "0/300")):
        del read[:]
        if told == "latest":
            lsn = f"0/{shop.published}00"
        done = job.execute_in_process(instance=instance, tags={"pgwal/as_of": told})
        assert {found for found, _ in read} == {lsn}, told
        run = instance.get_run_by_id(done.run_id)
        assert run is not None
        assert run.tags["pgwal/as_of"] == lsn
    del read[:]
    again = {name: value for name, value in run.tags.items() if name.startswith("pgwal/")}  # what the UI hands to a re-execution
    shop.publish()
    assert job.execute_in_process(instance=instance, tags=again).success
    assert {found for found, _ in read} == {lsn}


def test_what_was_read_stands_in_the_metadata(shop: Shop, instance: dg.DagsterInstance) -> None:
    _, job = _reading(shop)
    job.execute_in_process(instance=instance)
    wanted = {"first": {"shop.orders": 0}, "second": {'shop."Order Lines"': 0}, "third": {'shop."Order Lines"': 0}}
    for asset, versions in wanted.items():
        event = instance.get_latest_materialization_event(dg.AssetKey(asset))
        assert event is not None
        assert event.asset_materialization is not None
        metadata = event.asset_materialization.metadata
        assert (metadata["pgwal/read_lsn"].value, metadata["pgwal/read_versions"].value) == ("0/100", versions)
        assert metadata["pgwal/read_published_at"].value == datetime(2026, 1, 1, 1, tzinfo=UTC).timestamp()
        assert ("mine" in metadata) == (asset == "second")


def test_of_several_steps_that_ask_at_once_the_first_counts(instance: dg.DagsterInstance) -> None:
    run = instance.create_run_for_job(_job(Shop("/nowhere"), dg.asset(name="a")(lambda: None)))
    assert agreed_in_run(instance, run, "pgwal/as_of") == {}
    assert agreed_in_run(instance, run, "pgwal/as_of", ("lake", "0/1")) == {"lake": "0/1"}
    assert agreed_in_run(instance, run, "pgwal/as_of", ("lake", "0/2")) == {"lake": "0/1"}
    assert agreed_in_run(instance, run, "pgwal/as_of", ("other", "0/3")) == {"lake": "0/1", "other": "0/3"}


def test_two_lakes_in_one_run_are_told_apart(shop: Shop, instance: dg.DagsterInstance, tmp_path: Any) -> None:
    other, read = Shop(str(tmp_path / "other")), []
    for _ in range(3):
        other.publish()

    @dg.asset
    def both(context: dg.AssetExecutionContext) -> None:
        for lake in (shop, other, shop, other):
            read.append(PublishedLake(lake=lake.lake.uri).state(context).lsn)
            lake.publish()

    done = _job(shop, both).execute_in_process(instance=instance)
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    kept = {name: value for name, value in run.tags.items() if name.startswith("pgwal/")}
    _job(shop, both).execute_in_process(instance=instance, tags=kept)
    assert read == ["0/100", "0/300", "0/100", "0/300"] * 2


def test_changes_begin_where_the_asset_read_last(shop: Shop, instance: dg.DagsterInstance) -> None:
    since: list[Any] = []
    parts = dg.StaticPartitionsDefinition(["a", "b"])

    @dg.asset(partitions_def=parts)
    def mart(context: dg.AssetExecutionContext, lake: PublishedLake) -> None:
        state = lake.state(context)
        since.append(state.last_read())
        if context.run.tags.get("fail"):
            raise dg.Failure("not this time", allow_retries=False)

    job = _job(shop, mart)
    for partition, tags in (("a", {}), ("b", {}), ("a", {"fail": "1"}), ("a", {}), ("b", {})):
        job.execute_in_process(instance=instance, partition_key=partition, tags=tags, raise_on_error=False)
        shop.publish()
    assert since == [None, None, 0x100, 0x100, 0x200]


def test_without_a_run_it_is_the_newest(shop: Shop) -> None:
    lake = PublishedLake(lake=shop.lake.uri)
    shop.publish()
    assert (lake.state().lsn, lake.state(as_of="0/100").lsn) == ("0/200", "0/100")
    assert lake.state(dg.build_asset_context()).lsn == "0/200"


def test_inputs_are_loaded_as_they_are_annotated(
    shop: Shop, instance: dg.DagsterInstance, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgwal_pipeline.spark.session.spark_session", lambda settings: spark)
    found: dict[str, Any] = {}
    orders, lines = (dg.AssetIn(["prefix", "current", "shop", table.name], input_manager_key="tables") for table in _TABLES)

    @dg.asset(ins={"orders": orders})
    def by_spark(orders: DataFrame) -> None:
        found["spark"] = orders.count()
        shop.publish()

    @dg.asset(ins={"orders": orders, "lines": lines}, deps=[by_spark])
    def by_polars(orders: pl.LazyFrame, lines: pl.DataFrame) -> None:
        found["polars"] = (orders.collect().height, lines.height)

    @dg.asset(ins={"orders": orders, "lines": lines}, deps=[by_spark])
    def by_others(orders: pa.Table, lines: pd.DataFrame) -> None:
        found["others"] = (orders.num_rows, len(lines))

    @dg.asset(ins={"orders": orders, "lines": lines}, deps=[by_spark])
    def by_duckdb(orders: DuckDBPyRelation, lines: DuckDBPyRelation) -> None:
        found["duckdb"] = orders.set_alias("o").join(lines.set_alias("l"), "o.id = l.id").aggregate("count(*)").fetchall()

    shop.publish()
    assert _job(shop, by_spark, by_polars, by_others, by_duckdb).execute_in_process(instance=instance).success
    assert found == {"spark": 2, "polars": (2, 2), "others": (2, 2), "duckdb": [(2,)]}
    event = instance.get_latest_materialization_event(dg.AssetKey("by_polars"))
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["pgwal/read_versions"].value == {"shop.orders": 1, 'shop."Order Lines"': 1}


def test_the_metadata_says_which_table_an_asset_is(shop: Shop, instance: dg.DagsterInstance) -> None:
    """As a translator makes it, which may give current tables any key and other layers that of a current table."""
    lines = dg.AssetSpec("gold", metadata={"pgwal/table": 'shop."Order Lines"', "pgwal/layer": "current"})
    decoy = dg.AssetSpec(["current", "shop", "orders"], metadata={"pgwal/table": "shop.orders", "pgwal/layer": "raw"})
    unknown = dg.AssetSpec("unknown", metadata={"pgwal/table": "no table"})

    def made(of: Any, **more: Any) -> dg.JobDefinition:
        def mart(rows: pl.LazyFrame) -> None:
            assert rows.collect().height == 1

        asset = dg.asset(ins={"rows": dg.AssetIn(of.key, input_manager_key="tables", **more)})(mart)
        resources = {"tables": PublishedTableIOManager(lake=shop.lake.uri)}
        job = dg.define_asset_job("marts", selection=["mart"])
        return dg.Definitions(assets=[asset, of], resources=resources, jobs=[job]).resolve_job_def("marts")

    done = made(lines).execute_in_process(instance=instance)
    event = instance.get_latest_materialization_event(dg.AssetKey("mart"))
    assert done.success
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["pgwal/read_versions"].value == {'shop."Order Lines"': 0}
    assert made(dg.AssetSpec("any"), metadata={"pgwal/table": "shop.orders"}).execute_in_process(instance=instance).success
    for wrong, said in ((decoy, "is no current table"), (unknown, "is no table's name"), (dg.AssetSpec("other"), "is no current table")):
        with pytest.raises(PgwalError, match=said):
            made(wrong).execute_in_process(instance=instance)


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        (["current", "shop", "orders"], int, "is annotated int, and a published table is loaded as pyspark"),
        (["raw", "shop", "orders"], pa.Table, "is no current table"),
        (["current", "shop", "nothing"], pa.Table, "Table shop.nothing is not in the publish at 0/100"),
    ],
)
def test_an_input_that_is_no_published_table(key: list[str], kind: Any, said: str, shop: Shop, instance: dg.DagsterInstance) -> None:
    def mart(orders: Any) -> None:
        raise AssertionError("the input was loaded")

    mart.__annotations__["orders"] = kind
    made = dg.asset(ins={"orders": dg.AssetIn(key, input_manager_key="tables")})(mart)
    with pytest.raises(PgwalError, match=said):
        _job(shop, made).execute_in_process(instance=instance)

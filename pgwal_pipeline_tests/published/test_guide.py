"""The examples of the guide and of the README do what they say, as they are written there."""

from typing import Any

import dagster as dg
import pytest

from pgwal_pipeline import PublishedLake
from pgwal_pipeline.components.resources import LakeSpark
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.project.guides import blocks, read, section


def _examples() -> list[str]:
    texts = [read("docs/build-on-it.md"), section(read("README.md"), "Build on it")]
    return [code for text in texts for language, code in blocks(text) if language == "python"]


def _run(code: str, instance: dg.DagsterInstance) -> dict[str, dict[str, Any]]:
    """Materialize the assets of an example; the metadata of each."""
    names: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), names)
    found = names.get("defs") or dg.Definitions(
        assets=[value for value in names.values() if isinstance(value, dg.AssetsDefinition)], resources={"lake": PublishedLake()}
    )
    own = [key for key in found.resolve_all_asset_keys() if key.path[0] != "current"]
    job = dg.Definitions.merge(found, dg.Definitions(jobs=[dg.define_asset_job("all_of_it", own)])).resolve_job_def("all_of_it")
    assert job.execute_in_process(instance=instance).success
    metadata = {}
    for key in own:
        event = instance.get_latest_materialization_event(key)
        assert event is not None
        assert event.asset_materialization is not None
        metadata[key.to_user_string()] = {name: value.value for name, value in event.asset_materialization.metadata.items()}
    return metadata


def test_the_examples_run(pipeline: Pipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGWAL_LAKE", pipeline.settings.lake)
    monkeypatch.setattr(LakeSpark, "session", lambda self: spark)
    source = pipeline.source
    source.sql("CREATE SCHEMA shop; CREATE TABLE shop.customers (id int PRIMARY KEY, name text)")
    source.sql("CREATE TABLE shop.orders (id int PRIMARY KEY, customer_id int, status text, total numeric(10,2))")
    source.sql("INSERT INTO shop.customers VALUES (1, 'a'), (2, 'b')")
    source.sql("INSERT INTO shop.orders VALUES (1, 1, 'open', 5), (2, 1, 'paid', 7.5), (3, 2, 'open', 1)")
    pipeline.sync()
    with dagster_instance() as instance:
        first: dict[str, dict[str, Any]] = {}
        for code in _examples():
            first |= _run(code, instance)
        assert first["open_orders"]["open"] == 2
        assert first["revenue"]["revenue"] == "13.50"
        assert set(first["idle_customers"]["pgwal/read_versions"]) == {"shop.orders", "shop.customers"}
        source.sql("DELETE FROM shop.orders WHERE id = 1; UPDATE shop.orders SET status = 'paid', total = 2 WHERE id = 3")
        pipeline.drain()
        pipeline.publish()
        second = _run(next(code for code in _examples() if "my_orders" in code), instance)
        assert second["my_orders"]["pgwal/read_lsn"] != first["my_orders"]["pgwal/read_lsn"]
    target = TableDataset(f"{pipeline.settings.lake}/marts/my_orders").to_table(columns=["id", "status"])
    assert sorted(map(tuple, (row.values() for row in target.to_pylist()))) == [(2, "paid"), (3, "paid")]

"""What the lineage shows of a pipeline without a fault: no asset for which nothing was ever recorded, which Dagster marks orange."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames
from pgwal_pipeline.components.events import DATA_VERSION_TAG, NEWEST_COMMIT_AT, NEWEST_COMMIT_LSN
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, next_target
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import parse_lsn, window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.components.projects import project, set_environment
from pgwal_pipeline_tests.support import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = AssetNames("pgwal")
ORDERS, ODD = TableName("public", "orders"), TableName("public", "Order Lines")


@pytest.fixture
def definitions(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.Definitions]:
    source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int); INSERT INTO orders SELECT g, g FROM generate_series(1, 5) g")
    source.sql('CREATE TABLE "Order Lines" (id int PRIMARY KEY); ANALYZE')
    set_environment(monkeypatch, tmp_path, source.dsn)
    with project(tmp_path, {"cdc": {}}) as definitions:
        yield definitions


def run(definitions: dg.Definitions, instance: dg.DagsterInstance, job: str) -> dg.ExecuteInProcessResult:
    key = window_key(next_target(Settings.from_environment())) if job in ("sync", "drain") else None
    if key is not None:
        instance.add_dynamic_partitions("wal_windows", [key])
    result = definitions.resolve_job_def(job).execute_in_process(instance=instance, partition_key=key)
    assert result.success
    return result


def marked(definitions: dg.Definitions, instance: dg.DagsterInstance) -> set[str]:
    """The unpartitioned assets that Dagster's UI counts as missing: observable ones never observed, others never materialized."""
    graph = definitions.resolve_asset_graph()
    found = set()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        events = instance.fetch_observations(key, limit=1) if node.is_observable else instance.fetch_materializations(key, limit=1)
        if not events.records and node.partitions_def is None:
            found.add(key.to_user_string())
    return found


def observed(result: dg.ExecuteInProcessResult) -> dict[dg.AssetKey, dg.AssetObservation]:
    events = [event.asset_observation_data.asset_observation for event in result.all_events if event.is_asset_observation]
    return {event.asset_key: event for event in events if event.asset_key != NAMES.slot}


def test_a_pipeline_without_a_fault_has_no_orange_mark(
    definitions: dg.Definitions, source: Source, spark: "SparkSession", instance: dg.DagsterInstance
) -> None:
    assert spark is not None
    bootstrap(Settings.from_environment(), progress=Silent())
    run(definitions, instance, "snapshot")
    assert marked(definitions, instance) == {"slot/pgwal", "current/public/orders", "current/public/Order Lines"}
    run(definitions, instance, "sync")
    assert marked(definitions, instance) == set()

    # What changed is observed again, and nothing else.
    source.sql("INSERT INTO orders VALUES (6, 6)")
    (seen,) = observed(synced := run(definitions, instance, "sync")).values()
    assert seen.asset_key == NAMES.source(ORDERS)
    assert {"pgwal/bytes", "pgwal/estimated_rows", NEWEST_COMMIT_AT} == seen.metadata.keys()
    assert seen.metadata["pgwal/estimated_rows"].value == 5
    (raw,) = (event for event in synced.get_asset_materialization_events() if event.asset_key == NAMES.raw(ORDERS))
    assert raw.materialization.metadata[NEWEST_COMMIT_AT] == seen.metadata[NEWEST_COMMIT_AT]
    lsn = raw.materialization.metadata[NEWEST_COMMIT_LSN].value
    assert isinstance(lsn, str)
    assert (seen.tags or {})[DATA_VERSION_TAG] == f"{parse_lsn(lsn):016X}"
    source.sql("SELECT pg_switch_wal()")
    assert observed(run(definitions, instance, "sync")) == {}

    # A button observes them too, and does not take an unchanged table for a changed one.
    job = definitions.resolve_implicit_global_asset_job_def()
    button = job.execute_in_process(instance=instance, asset_selection=[NAMES.source(ORDERS), NAMES.source(ODD)])
    again = observed(button)
    assert again.keys() == {NAMES.source(ORDERS), NAMES.source(ODD)}
    assert (again[NAMES.source(ORDERS)].tags or {})[DATA_VERSION_TAG] == (seen.tags or {})[DATA_VERSION_TAG]
    assert DATA_VERSION_TAG not in (again[NAMES.source(ODD)].tags or {})


def test_an_instance_that_did_not_see_the_lake_being_filled_learns_of_it(
    definitions: dg.Definitions, source: Source, spark: "SparkSession"
) -> None:
    assert spark is not None
    bootstrap(Settings.from_environment(), progress=Silent())
    with dagster_instance() as instance:
        run(definitions, instance, "snapshot")
        run(definitions, instance, "sync")
    with dagster_instance() as instance:
        source.sql("INSERT INTO orders VALUES (6, 6)")
        first = run(definitions, instance, "sync")
        assert marked(definitions, instance) == set()
        snapshot = {event.asset_key: event.materialization for event in first.get_asset_materialization_events()}
        assert snapshot[NAMES.snapshot(ORDERS)].metadata["dagster/row_count"].value == 5
        source.sql("INSERT INTO orders VALUES (7, 7)")
        assert {event.asset_key for event in run(definitions, instance, "sync").get_asset_materialization_events()} == {
            NAMES.raw(ORDERS),
            NAMES.current(ORDERS),
        }


def test_without_the_source_a_publish_records_what_it_knows(
    definitions: dg.Definitions, spark: "SparkSession", instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spark is not None
    bootstrap(Settings.from_environment(), progress=Silent())
    with dagster_instance() as other:
        run(definitions, other, "snapshot")
        run(definitions, other, "drain")
    monkeypatch.setenv("PGWAL_SOURCE_DSN", "postgresql://me@127.0.0.1:1/nowhere")
    run(definitions, instance, "publish")
    assert marked(definitions, instance) == set()

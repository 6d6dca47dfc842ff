"""The guide's assets on raw: each window and each day has its changes, in a backfill and by themselves."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import pgwal_pipeline
from pgwal_pipeline.asset_specs import AssetNames
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, next_target
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.components.projects import project
from pgwal_pipeline_tests.project.guides import blocks, read
from pgwal_pipeline_tests.support import Source

RAW = AssetNames("pgwal").raw(TableName("shop", "orders"))
EXAMPLES = [text for language, text in blocks(read("docs/automation.md")) if language == "python"]


def assets_of(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(example, "docs/automation.md", "exec"), names)
    return {name: made for name, made in names.items() if isinstance(made, dg.AssetsDefinition)}


@pytest.fixture
def ours(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.Definitions]:
    source.sql("CREATE SCHEMA shop; CREATE TABLE shop.orders (id int PRIMARY KEY); CREATE TABLE shop.order_lines (id int PRIMARY KEY)")
    for name, value in {"DAGSTER_HOME": tmp_path / "home", "PGWAL_SOURCE_DSN": source.dsn, "PGWAL_LAKE": tmp_path / "lake"}.items():
        monkeypatch.setenv(name, str(value))
    bootstrap(Settings.from_environment(), progress=Silent())
    with project(tmp_path, {"cdc": {}}) as definitions:
        yield definitions


def drained(ours: dg.Definitions, instance: dg.DagsterInstance) -> str:
    key = window_key(next_target(Settings.from_environment()))
    instance.add_dynamic_partitions("wal_windows", [key])
    assert ours.resolve_job_def("drain").execute_in_process(instance=instance, partition_key=key).success
    return key


def test_the_guides_assets_by_window_and_by_day(ours: dg.Definitions, source: Source) -> None:
    (by_window, by_day) = assets_of(EXAMPLES[-1]).values()
    together = dg.Definitions.merge(ours, dg.Definitions(assets=[by_window, by_day]))
    today = datetime.now(UTC).date()

    def built(asset: dg.AssetsDefinition, partition: str) -> int:
        done = dg.materialize([asset], instance=instance, partition_key=partition)
        (event,) = done.get_asset_materialization_events()
        return event.materialization.metadata["changes"].value  # pyright: ignore[reportReturnType]

    with dagster_instance() as instance:
        expected = {}
        for number in (1, 2, 3):
            source.sql(f"INSERT INTO shop.orders SELECT {number} * 100 + g FROM generate_series(1, {number}) g")
            expected[drained(ours, instance)] = number
        # A backfill: the partitions one after the other.
        assert {key: built(by_window, key) for key in sorted(instance.get_materialized_partitions(RAW))} == expected
        days = [str(today - timedelta(days=back)) for back in (2, 1, 0)]
        assert sum(built(by_day, day) for day in days) == 6

        def asked(cursor: Any) -> tuple[Any, set[str], set[str]]:
            done = dg.evaluate_automation_conditions(together, instance, cursor=cursor)
            return done.cursor, *(set(done.get_requested_partitions(asset.key)) for asset in (by_window, by_day))  # pyright: ignore[reportReturnType]

        cursor, *_ = asked(None)
        cursor, windows, calendar = asked(cursor)
        assert (windows, calendar) == (set(), set())
        source.sql("INSERT INTO shop.orders VALUES (1)")
        key = drained(ours, instance)
        cursor, windows, calendar = asked(cursor)
        assert windows == {key}
        assert calendar in ({str(today), str(today - timedelta(days=1))}, {str(datetime.now(UTC).date()), str(today)})
        source.sql("INSERT INTO shop.order_lines VALUES (1)")
        drained(ours, instance)
        cursor, windows, calendar = asked(cursor)
        assert (windows, calendar) == (set(), set())


def test_a_healthy_raw_table_misses_no_partition(ours: dg.Definitions, source: Source) -> None:
    lines = AssetNames("pgwal").raw(TableName("shop", "order_lines"))
    with dagster_instance() as instance:
        source.sql("INSERT INTO shop.orders VALUES (1)")
        first = drained(ours, instance)
        source.sql("INSERT INTO shop.order_lines VALUES (1)")
        second = drained(ours, instance)
        source.sql("INSERT INTO shop.orders VALUES (2); INSERT INTO shop.order_lines VALUES (2)")
        third = drained(ours, instance)
        for key, expected in ((RAW, {first, third}), (lines, {second, third})):
            partitions = ours.resolve_asset_graph().get(key).partitions_def
            assert isinstance(partitions, dg.DynamicPartitionsDefinition)
            assert partitions.name is not None
            assert set(instance.get_dynamic_partitions(partitions.name)) == instance.get_materialized_partitions(key) == expected
        # A window again, by the asset itself: nothing is read anew, and its table is materialized.
        job = ours.get_implicit_global_asset_job_def()
        again = job.execute_in_process(instance=instance, partition_key=third, asset_selection=[lines])
        made = {(event.asset_key, event.partition) for event in again.get_asset_materialization_events()}
        assert made == {(lines, third), (RAW, third)}


def test_the_guides_other_assets_load(ours: dg.Definitions) -> None:
    for example in EXAMPLES[:-1]:
        dg.Definitions.validate_loadable(dg.Definitions.merge(ours, dg.Definitions(assets=list(assets_of(example).values()))))


def test_partitions_are_those_of_the_source_and_of_utc_days() -> None:
    assert pgwal_pipeline.wal_windows("shop").name == "shop_wal_windows"
    assert pgwal_pipeline.wal_windows().name == "wal_windows"
    assert pgwal_pipeline.wal_windows(table="shop.orders").name == "wal_windows/shop.orders"
    assert pgwal_pipeline.wal_windows("shop", 'a."B c"').name == 'shop_wal_windows/a."B c"'
    assert pgwal_pipeline.commit_days("2026-01-01") == pgwal_pipeline.commit_days(date(2026, 1, 1))
    now = datetime(2026, 1, 3, 0, 30, tzinfo=UTC)
    days = pgwal_pipeline.commit_days("2026-01-01").get_partition_keys(current_time=now)
    assert list(days) == ["2026-01-01", "2026-01-02", "2026-01-03"]

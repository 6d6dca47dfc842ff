from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from pgwal_pipeline import failpoints
from pgwal_pipeline.asset_specs import REPORT, AssetNames
from pgwal_pipeline.components.requests import SOURCE_READING, window_to_drain
from pgwal_pipeline.known_tables import remembered
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, next_target
from pgwal_pipeline.pipeline.status import lag
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import parse_window_key, window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.components.projects import project, set_environment
from pgwal_pipeline_tests.support import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = AssetNames("pgwal")
ORDERS, ODD, LATER = TableName("public", "orders"), TableName("public", "Order Lines"), TableName("public", "later")
SALES = TableName("public", "sales")
WINDOWS = "wal_windows"


class Location:
    """A code location on a database of the test's own, in an instance of its own."""

    def __init__(self, definitions: dg.Definitions, instance: dg.DagsterInstance, settings: Settings) -> None:
        self.definitions, self.instance, self.settings = definitions, instance, settings

    def target(self) -> str:
        return window_key(next_target(self.settings))

    def run(
        self, job: str, key: str | None = None, config: Mapping[str, Any] | None = None, fails: bool = False
    ) -> dg.ExecuteInProcessResult:
        if key is not None:
            self.instance.add_dynamic_partitions(WINDOWS, [key])
        result = self.definitions.resolve_job_def(job).execute_in_process(
            instance=self.instance, partition_key=key, run_config={"ops": dict(config)} if config else {}, raise_on_error=False
        )
        assert result.success != fails, [event.message for event in result.all_events if event.is_failure]
        return result


@pytest.fixture
def location(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int)")
    source.sql('CREATE TABLE "Order Lines" (id int PRIMARY KEY)')
    set_environment(monkeypatch, tmp_path, source.dsn, PGWAL_BUSY_TIMEOUT="1s")
    with ExitStack() as stack:
        definitions = stack.enter_context(project(tmp_path, {"cdc": {}}))
        yield Location(definitions, stack.enter_context(dagster_instance()), Settings.from_environment())


def materialized(result: dg.ExecuteInProcessResult) -> dict[tuple[dg.AssetKey, str | None], Mapping[str, Any]]:
    found = {}
    for event in result.get_asset_materialization_events():
        made = event.step_materialization_data.materialization
        found[made.asset_key, made.partition] = {name: value.value for name, value in made.metadata.items()}
    return found


def observed(result: dg.ExecuteInProcessResult) -> list[Mapping[str, Any]]:
    """The observations of the slot."""
    found = []
    for event in result.all_events:
        if event.is_asset_observation:
            observation = event.asset_observation_data.asset_observation
            if observation.asset_key == NAMES.slot:
                found.append({name: value.value for name, value in observation.metadata.items()})
    return found


def failure(result: dg.ExecuteInProcessResult) -> str:
    data = result.get_step_failure_events()[0].step_failure_data
    assert data.user_failure_data is not None
    return data.user_failure_data.description or ""


def test_a_drain_materializes_the_raw_tables_with_rows_in_its_window(location: Location, source: Source) -> None:
    bootstrap(location.settings, progress=Silent())
    source.sql("INSERT INTO orders SELECT g, g FROM generate_series(1, 5) g")
    source.sql("UPDATE orders SET total = 0 WHERE id < 3")
    key = location.target()
    made = materialized(result := location.run("drain", key))
    assert set(made) == {(NAMES.raw(ORDERS), key)}
    orders = made[NAMES.raw(ORDERS), key]
    assert (orders["dagster/partition_row_count"], orders["pgwal/inserts"], orders["pgwal/updates"]) == (7, 5, 2)
    assert location.instance.get_materialized_partitions(NAMES.raw(ORDERS)) == {key}
    assert location.instance.get_materialized_partitions(NAMES.raw(ODD)) == set()
    (numbers,) = observed(result)
    assert (numbers["pgwal/changes"], numbers["pgwal/transactions"], numbers["pgwal/raw_rows"]) == (7, 2, 7)
    assert numbers["pgwal/lag_before_bytes"] > numbers["pgwal/lag_after_bytes"]
    assert {"pgwal/drain_seconds", "pgwal/decode_seconds", "pgwal/write_seconds"} <= numbers.keys()
    assert numbers[REPORT]["windows"][0]["key"] == key
    assert numbers[REPORT]["changes"] == 7
    seen, now = numbers[SOURCE_READING], lag(location.settings)
    assert (seen["snapshot"], seen["insert_lsn"]) == (now.snapshot, parse_window_key(key))


def test_a_window_that_was_drained_before_is_told_from_the_ledger(location: Location, source: Source) -> None:
    bootstrap(location.settings, progress=Silent())
    source.sql("INSERT INTO orders SELECT g, g FROM generate_series(1, 5) g")
    key = location.target()
    first = materialized(location.run("drain", key))
    source.sql("INSERT INTO orders SELECT g, g FROM generate_series(6, 9) g")
    again = location.run("drain", key)
    assert materialized(again) == first
    assert observed(again)[0][REPORT]["changes"] == 5
    ends = [window.key for window in Ledger(Lake(location.settings.lake)).windows() if window.start_lsn < window.end_lsn]
    assert ends == [key]


def test_a_window_that_cannot_be_drained_fails_and_says_why(location: Location, source: Source) -> None:
    bootstrap(location.settings, progress=Silent())
    source.sql("INSERT INTO orders VALUES (1, 1)")
    early = window_key(next_target(location.settings) - 8)
    location.run("drain", location.target())
    assert "raw holds everything up to" in failure(location.run("drain", early, fails=True))
    late = window_key(next_target(location.settings) + (1 << 30))
    assert "choose an end that is not beyond that" in failure(location.run("drain", late, fails=True))
    assert "is not a window's key" in failure(location.run("drain", "tomorrow", fails=True))


def test_a_slot_that_is_held_is_named(location: Location) -> None:
    from pgwal_pipeline.postgres import slot

    with slot.exclusive(location.settings.dsn, location.settings.slot, 5.0):
        result = location.run("drain", location.target(), fails=True)
    assert len([event for event in result.all_events if event.is_step_up_for_retry]) == 0
    assert "pgwal" in failure(result)


def test_a_table_that_the_definitions_do_not_have_is_captured(location: Location, source: Source) -> None:
    bootstrap(location.settings, progress=Silent())
    source.sql("CREATE TABLE later (id int PRIMARY KEY)")
    bootstrap(location.settings, progress=Silent())
    source.sql("INSERT INTO later VALUES (1), (2)")
    key = location.target()
    made = materialized(location.run("drain", key))
    assert made[NAMES.raw(LATER), key]["dagster/partition_row_count"] == 2
    assert LATER in {known.table for known in remembered(location.settings)}
    source.sql("ALTER TABLE orders RENAME TO sales; INSERT INTO sales VALUES (1, 1)")
    key = location.target()
    made = materialized(location.run("drain", key))
    assert made[NAMES.raw(SALES), key]["dagster/partition_row_count"] == 1
    assert {known.table: known.location for known in remembered(location.settings)}[SALES] == ORDERS


def test_the_run_that_makes_the_slot(location: Location, source: Source) -> None:
    source.sql("INSERT INTO orders VALUES (1, 1)")
    key = location.target()
    assert materialized(location.run("drain", key)) == {}
    assert lag(location.settings).slot_exists


def test_from_an_empty_lake_to_current_and_verified(location: Location, source: Source, spark: "SparkSession") -> None:
    assert spark is not None
    source.sql("INSERT INTO orders SELECT g, g FROM generate_series(1, 5) g")
    bootstrap(location.settings, progress=Silent())
    snapshot = location.run("snapshot")
    made = materialized(snapshot)
    assert made[NAMES.snapshot(ORDERS), None]["dagster/row_count"] == 5
    assert made[NAMES.snapshot(ODD), None]["dagster/row_count"] == 0
    assert observed(snapshot)[0]["pgwal/snapshot_rows"] == 5
    assert materialized(location.run("snapshot")) == {}

    source.sql("INSERT INTO orders VALUES (6, 6)")
    synced = location.run("sync", location.target())
    made = materialized(synced)
    assert made[NAMES.current(ORDERS), None]["dagster/row_count"] == 6
    assert made[NAMES.current(ODD), None]["dagster/row_count"] == 0
    assert {check.check_name: check.passed for check in synced.get_asset_check_evaluations()} == {"followed": True}
    drained, published = observed(synced)
    assert drained["pgwal/changes"] == 1
    assert published["pgwal/published_tables"] == 2
    assert published[REPORT]["publish"]["tables"].keys() == {"public.orders", 'public."Order Lines"'}

    source.sql("UPDATE orders SET total = 0")
    made = materialized(location.run("sync", location.target()))
    assert NAMES.current(ORDERS) in {key for key, _ in made}
    assert NAMES.current(ODD) not in {key for key, _ in made}

    verified = location.run("verify")
    checks = {(check.asset_key, check.check_name): check for check in verified.get_asset_check_evaluations()}
    assert set(checks) == {
        (NAMES.slot, "health"),
        (NAMES.current(ORDERS), "equals_source"),
        (NAMES.current(ODD), "equals_source"),
    }
    assert all(check.passed for check in checks.values())
    report = next(numbers[REPORT] for numbers in observed(verified))
    assert report["verify"]["equal"] is True

    one = location.run("verify", config={"verify_current": {"config": {"tables": ["public.orders"]}}})
    assert {check.asset_key for check in one.get_asset_check_evaluations() if check.check_name == "equals_source"} == {
        NAMES.current(ORDERS)
    }

    again = location.run("snapshot", config={"take_snapshots": {"config": {"tables": ["public.orders"]}}})
    assert {key for key, _ in materialized(again)} == {NAMES.snapshot(ORDERS)}
    assert location.run("publish").success
    location.run("maintenance")


def test_a_table_in_error_fails_its_check_and_holds_up_no_other(location: Location, source: Source, spark: "SparkSession") -> None:
    assert spark is not None
    bootstrap(location.settings, progress=Silent())
    location.run("snapshot")
    ledger = Ledger(Lake(location.settings.lake))
    ledger.record_tables([replace(ledger.tables()[ODD], state="error", reason="A value was never sent.")])
    synced = location.run("sync", location.target())
    checks = {check.asset_key: (check.passed, check.description) for check in synced.get_asset_check_evaluations()}
    assert checks == {NAMES.current(ORDERS): (True, None), NAMES.current(ODD): (False, "A value was never sent.")}
    assert {key for key, partition in materialized(synced) if partition is None} == {NAMES.current(ORDERS), NAMES.slot}


def test_a_current_table_alone(location: Location, source: Source, spark: "SparkSession") -> None:
    assert spark is not None
    bootstrap(location.settings, progress=Silent())
    location.run("snapshot")
    location.run("sync", location.target())
    source.sql("INSERT INTO orders VALUES (1, 1)")
    source.sql('INSERT INTO "Order Lines" VALUES (1)')
    location.run("drain", location.target())
    job = location.definitions.get_implicit_global_asset_job_def()
    result = job.execute_in_process(instance=location.instance, asset_selection=[NAMES.current(ORDERS)])
    assert {key for key, _ in materialized(result)} == {NAMES.current(ORDERS)}


def test_a_history_is_an_asset_beside_its_current_table(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: "SparkSession"
) -> None:
    assert spark is not None
    source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int); CREATE TABLE later (id int PRIMARY KEY)")
    set_environment(monkeypatch, tmp_path, source.dsn)
    options = {"public.orders": {"history": True}}
    with project(tmp_path, {"cdc": {"tables": options}}) as definitions, dagster_instance() as instance:
        graph = definitions.resolve_asset_graph()
        of_orders = graph.get(NAMES.history(ORDERS))
        assert of_orders.group_name == "history"
        assert of_orders.parent_keys == {NAMES.raw(ORDERS), NAMES.snapshot(ORDERS)}
        assert of_orders.metadata["pgwal/options"] == options["public.orders"]
        assert not graph.has(NAMES.history(LATER))
        location = Location(definitions, instance, Settings.from_environment(table_options=options))
        location.run("sync", location.target())
        location.run("snapshot")
        made = materialized(location.run("sync", location.target()))
        assert {NAMES.current(ORDERS), NAMES.history(ORDERS), NAMES.current(LATER)} <= {key for key, _ in made}
        source.sql("INSERT INTO later VALUES (1)")
        made = materialized(location.run("sync", location.target()))
        assert NAMES.history(ORDERS) not in {key for key, _ in made}
        source.sql("INSERT INTO orders VALUES (1, 1); INSERT INTO later VALUES (2)")
        location.run("drain", location.target())
        job = definitions.get_implicit_global_asset_job_def()
        result = job.execute_in_process(instance=instance, asset_selection=[NAMES.history(ORDERS)])
        assert {key for key, _ in materialized(result)} == {NAMES.current(ORDERS), NAMES.history(ORDERS)}


def test_with_no_table_known_the_jobs_do_the_same_work(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: "SparkSession"
) -> None:
    assert spark is not None
    set_environment(monkeypatch, tmp_path, source.dsn)
    with project(tmp_path, {"cdc": {}}) as definitions, dagster_instance() as instance:
        source.sql("CREATE TABLE orders (id int PRIMARY KEY)")
        source.sql("INSERT INTO orders VALUES (1)")
        location = Location(definitions, instance, Settings.from_environment())
        location.run("sync", location.target())
        location.run("snapshot", config={"take_snapshots": {"config": {"tables": []}}})
        made = materialized(location.run("sync", location.target()))
        assert NAMES.current(ORDERS) in {key for key, _ in made}
        assert location.run("verify").success
        assert location.run("drain", location.target()).success
        assert location.run("publish").success


def test_each_window_of_a_catch_up_is_a_partition(location: Location, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgwal_pipeline.pipeline import catch_up

    monkeypatch.setattr(catch_up, "cores", lambda: 3)
    monkeypatch.setenv("PGWAL_CATCHUP_THRESHOLD", "1MB")
    bootstrap(location.settings, progress=Silent())
    for number in range(30):
        source.sql(f"INSERT INTO orders SELECT g, g FROM generate_series({number * 1000}, {number * 1000 + 999}) g")
    key = location.target()
    made = materialized(result := location.run("drain", key))
    windows = [window for window in Ledger(Lake(location.settings.lake)).windows() if window.start_lsn < window.end_lsn]
    keys = [window.key for window in windows]
    assert len(keys) == 3
    assert keys[-1] == key
    assert set(made) == {(NAMES.raw(ORDERS), partition) for partition in keys}
    rows = [made[NAMES.raw(ORDERS), partition]["dagster/partition_row_count"] for partition in keys]
    assert sum(rows) == 30_000
    assert all(rows)
    assert set(keys) <= set(location.instance.get_dynamic_partitions(WINDOWS))
    (numbers,) = observed(result)
    assert (numbers["pgwal/windows"], numbers["pgwal/changes"]) == (3, 30_000)


@pytest.mark.parametrize("point", ["drain.before_confirm", "drain.after_prepared"])
def test_a_window_whose_slot_was_not_confirmed_is_not_asked_for_for_ever(
    point: str, location: Location, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies between the ledger's record and the confirmation leaves the slot behind; the next one of that window moves it."""
    bootstrap(location.settings, progress=Silent())
    source.sql("INSERT INTO orders VALUES (1, 1)")
    key = location.target()

    def die(name: str) -> None:
        if name == point:
            raise RuntimeError("killed")

    monkeypatch.setattr(failpoints, "hit", die)
    location.run("drain", key, fails=True)
    monkeypatch.setattr(failpoints, "hit", lambda name: None)
    source.sql("INSERT INTO orders VALUES (2, 2)")
    reading = lag(location.settings)
    assert window_to_drain(reading, key) == key
    assert observed(location.run("drain", key))[0][REPORT]["changes"] == 1
    following = window_to_drain(lag(location.settings), key)
    assert following is not None
    assert following > key
    location.run("drain", following)
    assert Ledger(Lake(location.settings.lake)).frontier() == parse_window_key(following)

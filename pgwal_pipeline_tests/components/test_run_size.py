"""What a run records in Dagster follows what changed, not how many tables there are."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames
from pgwal_pipeline.components import current
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, next_target
from pgwal_pipeline.pipeline.reports import PublishReport, TablePublish
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.components.projects import project
from pgwal_pipeline_tests.support import Source

NAMES = AssetNames("pgwal")
TABLES = [TableName("public", f"t{number:03d}") for number in range(60)]
CHANGED = TABLES[:5]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stored(instance: dg.DagsterInstance, run_id: str) -> tuple[Counter[str], int]:
    """The kinds of a run's events, and all bytes that they take in the instance's databases."""
    kinds, size = Counter[str](), 0
    base = Path(instance.storage_directory()).parent / "history" / "runs"
    for shard in (f"{run_id}.db", "index.db"):
        with sqlite3.connect(base / shard) as connection:
            rows = connection.execute("SELECT dagster_event_type, event FROM event_logs WHERE run_id = ?", [run_id]).fetchall()
        size += sum(len(event) for _, event in rows)
        if shard != "index.db":
            kinds.update(str(kind) for kind, _ in rows)
    return kinds, size


def test_a_run_records_the_tables_that_changed(source: Source, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("; ".join(f"CREATE TABLE {table.name} (id int PRIMARY KEY)" for table in TABLES))
    for name, value in {"DAGSTER_HOME": tmp_path / "home", "PGWAL_SOURCE_DSN": source.dsn, "PGWAL_LAKE": tmp_path / "lake"}.items():
        monkeypatch.setenv(name, str(value))
    settings = Settings.from_environment()
    lake, versions = Lake(settings.lake), dict.fromkeys(TABLES, 0)

    def publish(*_: object, **__: object) -> PublishReport:
        """A publish without Spark, at the versions that the test says."""
        tables = {table: TablePublish(lake.current(table), version) for table, version in versions.items()}
        return PublishReport(next_target(settings), None, tables, seconds={"session": 0.0, "publish": 0.0})

    monkeypatch.setattr(current, "_publish", publish)
    monkeypatch.setattr(current, "_last_recorded", lambda *_: current._Recorded(before))
    before: dict[TableName, current.TablePointer] = {}
    definitions = stack.enter_context(project(tmp_path, {"cdc": {}}))
    instance = stack.enter_context(dagster_instance())
    bootstrap(settings, progress=Silent())

    def run() -> tuple[str, dg.ExecuteInProcessResult]:
        key = window_key(next_target(settings))
        instance.add_dynamic_partitions("wal_windows", [key])
        return key, definitions.resolve_job_def("sync").execute_in_process(instance=instance, partition_key=key)

    _, first = run()
    assert Counter(event.event_type_value for event in first.all_events)["ASSET_CHECK_EVALUATION"] == len(TABLES)
    before |= {table: current.TablePointer(lake.current(table), version) for table, version in versions.items()}

    for table in CHANGED:
        source.sql(f"INSERT INTO {table.name} VALUES (1)")
        versions[table] = 1
    key, second = run()
    kinds, size = stored(instance, second.run_id)
    assert kinds["ASSET_MATERIALIZATION"] == 2 * len(CHANGED)
    assert kinds["ASSET_OBSERVATION"] == len(CHANGED) + 2  # the source's tables, and the slot by both steps
    assert kinds["ASSET_MATERIALIZATION_PLANNED"] == len(CHANGED) - 1
    assert kinds["ASSET_CHECK_EVALUATION_PLANNED"] == kinds["ASSET_CHECK_EVALUATION"] == 0
    assert kinds["STEP_SUCCESS"] == 2
    assert size < 100_000
    for table in TABLES:
        assert instance.get_materialized_partitions(NAMES.raw(table)) == ({key} if table in CHANGED else set())
    graph = definitions.resolve_asset_graph()
    assert graph.get(NAMES.current(TABLES[0])).parent_keys == {NAMES.raw(TABLES[0]), NAMES.snapshot(TABLES[0])}

    # A drain in which no table has rows: the publish follows.
    source.sql("SELECT pg_switch_wal()")
    _, third = run()
    kinds, idle = stored(instance, third.run_id)
    assert (kinds["ASSET_MATERIALIZATION"], kinds["ASSET_MATERIALIZATION_PLANNED"], kinds["ASSET_OBSERVATION"]) == (0, 0, 2)
    assert kinds["STEP_SUCCESS"] == 2
    assert kinds["STEP_SKIPPED"] == 0
    assert idle < size

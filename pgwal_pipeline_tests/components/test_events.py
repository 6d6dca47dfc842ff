"""Automation conditions of assets downstream go by the events of `current` and `raw`: once for a publish, and only for what changed."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames
from pgwal_pipeline.components import steps
from pgwal_pipeline.components.events import (
    DATA_VERSION_TAG,
    NEWEST_COMMIT_AT,
    NEWEST_COMMIT_LSN,
    SECONDS_TO_VISIBLE,
    visible_metadata,
)
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, next_target
from pgwal_pipeline.pipeline.reports import NewestCommit
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import parse_lsn, window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance
from pgwal_pipeline_tests.components.projects import project, set_environment
from pgwal_pipeline_tests.support import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = AssetNames("pgwal")
ORDERS, LINES, OTHER = (TableName("public", name) for name in ("orders", "lines", "other"))


@dg.asset(deps=[NAMES.current(ORDERS), NAMES.current(LINES)], automation_condition=dg.AutomationCondition.eager())
def revenue() -> None:
    """What a team builds on two tables."""


@dg.asset(
    deps=[NAMES.current(ORDERS), NAMES.current(LINES)],
    automation_condition=dg.AutomationCondition.any_deps_match(dg.AutomationCondition.data_version_changed()),
)
def changed() -> None:
    """The same, by the tables' data versions alone."""


class Place:
    """A source with three tables, its code location, and two assets downstream."""

    def __init__(self, source: Source, ours: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self.source, self.ours, self.instance = source, ours, instance
        self.all = dg.Definitions.merge(ours, dg.Definitions(assets=[revenue, changed]))
        self.settings = Settings.from_environment()
        self.cursor: Any = None

    def run(self, job: str) -> dg.ExecuteInProcessResult:
        key = window_key(next_target(self.settings)) if job in ("sync", "drain") else None
        if key is not None:
            self.instance.add_dynamic_partitions("wal_windows", [key])
        result = self.ours.resolve_job_def(job).execute_in_process(instance=self.instance, partition_key=key)
        assert result.success
        return result

    def tick(self) -> dict[str, int]:
        """Evaluate the conditions as the automation sensor does; what was asked for is run, as the daemon would."""
        done = dg.evaluate_automation_conditions(defs=self.all, instance=self.instance, cursor=self.cursor)
        self.cursor = done.cursor
        asked = {asset.key.to_user_string(): done.get_num_requested(asset.key) for asset in (revenue, changed)}
        wanted = [asset for asset in (revenue, changed) if asked[asset.key.to_user_string()]]
        if wanted:
            assert dg.materialize(wanted, instance=self.instance).success
        return asked

    def last(self, key: dg.AssetKey) -> dg.AssetMaterialization:
        event = self.instance.get_latest_materialization_event(key)
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization


NOTHING, ONCE = {"revenue": 0, "changed": 0}, {"revenue": 1, "changed": 1}


@pytest.fixture
def place(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: "SparkSession") -> Iterator[Place]:
    assert spark is not None
    source.sql("; ".join(f"CREATE TABLE {table.name} (id int PRIMARY KEY, n int)" for table in (ORDERS, LINES, OTHER)))
    set_environment(monkeypatch, tmp_path, source.dsn)
    with ExitStack() as stack:
        ours = stack.enter_context(project(tmp_path, {"cdc": {}}))
        place = Place(source, ours, stack.enter_context(dagster_instance()))
        bootstrap(place.settings, progress=Silent())
        source.sql("INSERT INTO orders VALUES (1, 1); INSERT INTO lines VALUES (1, 1); INSERT INTO other VALUES (1, 1)")
        place.run("snapshot")
        place.run("sync")
        yield place


def test_a_publish_fires_once_for_all_its_tables_and_not_for_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.tick()  # the first evaluation requests what is missing, and sets the cursor
    assert place.tick() == NOTHING

    # A tick in the middle of a publish, when one table is materialized and the other is not: `eager()` waits for the other.
    during: list[int] = []
    event_of = steps.materialization

    def look(result: dg.MaterializeResult, partition: str | None = None) -> dg.AssetMaterialization:
        done = dg.evaluate_automation_conditions(defs=place.all, instance=place.instance, cursor=place.cursor)
        during.append(done.get_num_requested(revenue.key))
        place.cursor = done.cursor
        return event_of(result, partition)

    place.source.sql("INSERT INTO orders VALUES (2, 1); INSERT INTO lines VALUES (2, 1)")
    place.run("drain")
    with monkeypatch.context() as patch:
        patch.setattr(steps, "materialization", look)
        place.run("publish")
    assert during == [0, 0]
    assert place.tick()["revenue"] == 1
    assert place.tick() == NOTHING

    place.source.sql("UPDATE orders SET n = 2; DELETE FROM lines")
    place.run("sync")
    assert place.tick() == ONCE
    assert place.tick() == NOTHING

    place.source.sql("INSERT INTO other VALUES (2, 1)")
    place.run("sync")
    assert place.tick() == NOTHING

    place.source.sql("SELECT pg_switch_wal()")
    place.run("sync")
    assert place.tick() == NOTHING


def test_a_data_version_changes_with_the_content_alone(place: Place) -> None:
    def version() -> str:
        return (place.last(NAMES.current(ORDERS)).tags or {})[DATA_VERSION_TAG]

    seen = [version()]
    place.source.sql("INSERT INTO orders VALUES (2, 1); INSERT INTO lines VALUES (2, 1)")
    place.run("sync")
    seen.append(version())
    place.tick()
    place.tick()
    # Work that leaves the rows as they are: a row that came and went, files joined, a publish without changes.
    place.source.sql("INSERT INTO orders VALUES (3, 1)")
    place.source.sql("DELETE FROM orders WHERE id = 3")
    assert NAMES.current(ORDERS) not in {event.asset_key for event in place.run("sync").get_asset_materialization_events()}
    place.run("maintenance")
    place.run("publish")
    place.source.sql("UPDATE lines SET n = 2")
    place.run("sync")
    assert version() == seen[-1]
    place.tick()
    assert place.tick() == NOTHING

    place.source.sql("UPDATE orders SET n = 5 WHERE id = 1")
    place.run("sync")
    seen.append(version())
    place.source.sql("ALTER TABLE orders ADD COLUMN more int; UPDATE orders SET more = 1 WHERE id = 1")
    place.run("sync")
    seen.append(version())
    place.source.sql("TRUNCATE orders")
    place.run("sync")
    seen.append(version())
    place.source.sql("TRUNCATE orders")
    place.run("sync")
    assert version() == seen[-1]
    assert len(set(seen)) == len(seen)


def test_metadata_says_what_is_visible_and_how_soon(place: Place) -> None:
    before = datetime.now(UTC)
    place.source.sql("INSERT INTO orders VALUES (2, 1)")
    place.run("sync")
    raw, published = place.last(NAMES.raw(ORDERS)), place.last(NAMES.current(ORDERS))
    assert (raw.tags or {})[DATA_VERSION_TAG] == f"{_lsn(raw, 'pgwal/start_lsn'):016X}-{raw.partition}"
    for made in (raw, published):
        assert _lsn(made, "pgwal/start_lsn" if made is raw else NEWEST_COMMIT_LSN) <= _lsn(made, NEWEST_COMMIT_LSN)
        at = made.metadata[NEWEST_COMMIT_AT].value
        assert isinstance(at, float)
        assert before.timestamp() - 1 <= at <= datetime.now(UTC).timestamp()
        seconds = made.metadata[SECONDS_TO_VISIBLE].value
        assert isinstance(seconds, float)
        assert 0 < seconds <= datetime.now(UTC).timestamp() - before.timestamp() + 1
    assert raw.metadata[NEWEST_COMMIT_LSN] == published.metadata[NEWEST_COMMIT_LSN]
    assert _lsn(published, NEWEST_COMMIT_LSN) < _lsn(published, "pgwal/published_lsn")


def _lsn(made: dg.AssetMaterialization, name: str) -> int:
    value = made.metadata[name].value
    assert isinstance(value, str)
    return parse_lsn(value)


def test_a_commit_of_a_clock_that_is_ahead_is_visible_at_once() -> None:
    at, ahead = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    assert visible_metadata(NewestCommit(16, ahead), at)[SECONDS_TO_VISIBLE] == 0
    assert visible_metadata(NewestCommit(16, None), at) == {NEWEST_COMMIT_LSN: "0/10"}
    assert visible_metadata(None, at) == {}

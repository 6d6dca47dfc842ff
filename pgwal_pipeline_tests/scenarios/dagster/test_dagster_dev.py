"""`dagster dev` on a real source: the UI alone starts everything, and goes on by itself."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
from deltalake import DeltaTable

from pgwal_pipeline import definitions as code_location
from pgwal_pipeline.asset_specs import AssetNames
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.scenarios.dagster.dev import INSTANCE, Dev, awaited
from pgwal_pipeline_tests.support import fresh_source

ROOT = Path(code_location.__file__).parents[1]
QUIET = 30.0  # seconds, in which a sensor looks several times
ORDERS, LATER = TableName("public", "orders"), TableName("public", "later")
NAMES = AssetNames("pgwal")


@pytest.fixture
def server(make_server: Callable[..., Postgres]) -> Postgres:
    return make_server()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_ui_alone_is_enough(server: Postgres, stack: ExitStack, connect_address: str, tmp_path: Path) -> None:
    source = stack.enter_context(fresh_source(server))
    source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int)")
    source.sql("INSERT INTO orders SELECT g, g FROM generate_series(1, 100) g")
    home, lake = tmp_path / "home", Lake(str(tmp_path / "lake"))
    home.mkdir()
    (home / "dagster.yaml").write_text(INSTANCE)
    dev = Dev(
        ROOT,
        {
            "DAGSTER_HOME": str(home),
            "PGWAL_SOURCE_DSN": source.dsn,
            "PGWAL_LAKE": lake.uri,
            "PGWAL_MAX_STALENESS": "5s",
            "PGWAL_SPARK_REMOTE": connect_address,  # the demo's runs have sessions of their own
        },
        *("-w", "workspace.yaml"),
    )
    stack.callback(dev.kill)

    def current(table: TableName) -> int:
        path = lake.current(table)
        # Not by Delta's own count, which takes rows that a deletion vector hides for rows.
        return pl.scan_delta(path).select(pl.len()).collect().item() if DeltaTable.is_deltatable(path) else -1

    # Slot, snapshot, current: nobody asked for a run.
    awaited("the first publish", lambda: current(ORDERS) == 100, dev)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assets = dev.ask("{ assetNodes { assetKey { path } groupName kinds freshnessPolicy { __typename } } }")["assetNodes"]
        assert {"/".join(asset["assetKey"]["path"]) for asset in assets} == {
            "slot/pgwal",
            *(f"{layer}/public/orders" for layer in ("postgres", "raw", "snapshot", "current")),
        }

        # Changes, and a table that nobody had heard of.
        source.sql("INSERT INTO orders SELECT g, g FROM generate_series(101, 150) g")
        source.sql("CREATE TABLE later AS SELECT g AS id FROM generate_series(1, 7) g")
        source.sql("ALTER TABLE later ADD PRIMARY KEY (id)")
        awaited("the changes", lambda: current(ORDERS) == 150, dev)
        awaited("the new table", lambda: current(LATER) == 7, dev)

        # The source goes away and comes back: the sensor waits, and goes on.
        server.stop()
        ticks = len(dev.log.read_text())
        awaited("a tick without the source", lambda: "cannot be reached" in dev.log.read_text()[ticks:], dev)
        server.start()
        source.close()
        source.sql("DELETE FROM orders WHERE id > 40")
        awaited("the changes after the outage", lambda: current(ORDERS) == 40, dev)

        # Then all is quiet, and stays so.
        seen, since = -1, time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since
            runs = instance.get_runs_count()
            active = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.QUEUED]))
            if active or runs != seen:
                seen, since = runs, time.monotonic()
            return time.monotonic() - since > QUIET

        awaited("half a minute without a run", quiet, dev)
        assert instance.get_latest_materialization_event(NAMES.slot) is not None
        assert instance.get_runs(limit=1)[0].is_success
    dev.stop()

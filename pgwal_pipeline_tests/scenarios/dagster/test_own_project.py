"""The component in a project of its own: made by `create-dagster`, with our wheel, two sources and assets downstream."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest
import yaml

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline_tests.scenarios.dagster.dev import INSTANCE, Dev, awaited
from pgwal_pipeline_tests.scenarios.dagster.own_project import NAME, OwnProject, built_wheel, own_project
from pgwal_pipeline_tests.support import Source, fresh_source

SCAFFOLD = "dg scaffold defs pgwal_pipeline.PostgresCdcComponent"
WRONG = {"lag_threshold": "16 potatoes", "catchup_slots": 99, "slots": "a"}
LAYERS = ("postgres", "raw", "snapshot", "current")
MARTS = """
import dagster as dg
import polars as pl
from pgwal_pipeline import PublishedLake, PublishedTableIOManager

CUSTOMERS = dg.AssetIn(dg.AssetKey(["customers_now"]), input_manager_key="crm_tables")
EAGER = dg.AutomationCondition.eager()


@dg.asset(deps=[dg.AssetKey(["shop", "current", "public", "orders"])], automation_condition=EAGER)
def revenue(context: dg.AssetExecutionContext, shop_lake: PublishedLake) -> dg.MaterializeResult:
    state = shop_lake.state(context)
    return dg.MaterializeResult(metadata={"revenue": state.polars("public.orders").select(pl.sum("total")).collect().item()})


@dg.asset(ins={"customers": CUSTOMERS}, deps=[revenue], automation_condition=EAGER)
def report(customers: pl.LazyFrame) -> dg.MaterializeResult:
    return dg.MaterializeResult(metadata={"customers": customers.select(pl.len()).collect().item()})


@dg.definitions
def marts() -> dg.Definitions:
    sensor = dg.AutomationConditionSensorDefinition(
        "automation", target="*", default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=5
    )
    return dg.Definitions(
        assets=[revenue, report], sensors=[sensor], resources={"crm_tables": PublishedTableIOManager(lake="lake/crm")}
    )
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


def variables(folder: Path, shop: Source, crm: Source) -> dict[str, str]:
    (folder / "home").mkdir()
    (folder / "home" / "dagster.yaml").write_text(INSTANCE)
    return {"SHOP_DSN": shop.dsn, "CRM_DSN": crm.dsn, "DAGSTER_HOME": str(folder / "home")}


def change(made: OwnProject, source: str, **attributes: object) -> None:
    path = made.defs / source / "defs.yaml"
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(content | {"attributes": content["attributes"] | attributes}))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_sources_are_scaffolded_checked_and_loaded(source: Source, postgres: Postgres, wheel: Path, tmp_path: Path) -> None:
    with fresh_source(postgres) as crm:
        source.sql("CREATE TABLE orders (id int PRIMARY KEY)")
        crm.sql("CREATE TABLE customers (id int PRIMARY KEY)")
        made = own_project(tmp_path, wheel, variables(tmp_path, source, crm))
        said = made.run(f"{SCAFFOLD} shop", f"{SCAFFOLD} crm", "dg check yaml", "dg list defs --json")
        assert said.count("exit code 0") == 4, said
        listed = json.loads(said[said.index("{\n") : said.rindex("}") + 1])
        tables = [("shop", "orders"), ("crm", "customers")]
        assert {asset["asset_key"] for asset in listed["assets"]} == {
            *("shop/slot/shop", "crm/slot/crm"),
            *(f"{name}/{layer}/public/{table}" for name, table in tables for layer in LAYERS),
        }
        assert {"shop_sync", "crm_sync"} <= {job["name"] for job in listed["jobs"]}
        assert source.dsn not in said
        found = made.program("-c", "import pgwal_pipeline; print(pgwal_pipeline.__file__)")
        assert found.stdout.startswith(str(tmp_path / "env"))
        checked = made.program("-m", "dagster", "definitions", "validate", "-m", f"{NAME}.definitions")
        assert checked.returncode == 0, checked.stderr
        change(made, "crm", **WRONG)
        said = made.run(f"dg check yaml src/{NAME}/defs/crm")
        assert "exit code 1" in said
        assert "'16 potatoes' does not match" in said
        assert "99 is greater than the maximum of 64" in said
        assert "'slots' was unexpected" in said


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_two_sources_run_side_by_side(
    source: Source, make_server: Callable[..., Postgres], wheel: Path, connect_address: str, tmp_path: Path
) -> None:
    """`dagster dev` in the project: runs by sensors, assets downstream fire by themselves, and a source that is down holds up no other."""
    with ExitStack() as stack:
        server = make_server()
        crm = stack.enter_context(fresh_source(server))
        source.sql("CREATE TABLE orders (id int PRIMARY KEY, total int)")
        source.sql("INSERT INTO orders SELECT g, 1 FROM generate_series(1, 100) g")
        crm.sql("CREATE TABLE customers (id int PRIMARY KEY)")
        crm.sql("INSERT INTO customers SELECT generate_series(1, 7)")
        settings = {"PGWAL_MAX_STALENESS": "5s", "PGWAL_SPARK_REMOTE": connect_address}
        made = own_project(tmp_path, wheel, variables(tmp_path, source, crm) | settings)
        made.run(f"{SCAFFOLD} shop", f"{SCAFFOLD} crm")
        change(made, "crm", translation={"key": "customers_{{ {'current': 'now'}.get(layer, layer) }}", "group_name": "crm"})
        (made.defs / "marts.py").write_text(MARTS)
        dev = Dev(made.folder, made.environment, "-m", f"{NAME}.definitions", python=str(made.python))
        stack.callback(dev.kill)
        instance = stack.enter_context(dg.DagsterInstance.from_config(str(tmp_path / "home")))

        def newest(asset: str, entry: str) -> object:
            event = instance.get_latest_materialization_event(dg.AssetKey(asset))
            found = None if event is None else event.asset_materialization
            return None if found is None else found.metadata[entry].value

        awaited("revenue", lambda: newest("revenue", "revenue") == 100, dev)
        awaited("report", lambda: newest("report", "customers") == 7, dev)
        source.sql("INSERT INTO orders SELECT g, 1 FROM generate_series(101, 150) g")
        awaited("more revenue", lambda: newest("revenue", "revenue") == 150, dev)
        crm.sql("INSERT INTO customers SELECT generate_series(8, 9)")
        awaited("more customers", lambda: newest("report", "customers") == 9, dev)

        crm.close()
        server.stop()
        said = len(dev.log.read_text())
        source.sql("UPDATE orders SET total = 2")
        awaited("revenue while the other source is down", lambda: newest("revenue", "revenue") == 300, dev)
        awaited("a tick of the other source", lambda: "cannot be reached" in dev.log.read_text()[said:], dev)
        server.start()
        crm.sql("DELETE FROM customers WHERE id > 5")
        awaited("customers after the outage", lambda: newest("report", "customers") == 5, dev)
        failed = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
        assert {run.job_name for run in failed} <= {"crm_sync", "crm_publish", "crm_snapshot"}
        dev.stop()

"""Two servers as two sources of one project: commands, sensors and lineage tell them apart, and one that is down leaves the other alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from dagster._core.scheduler.instigation import TickStatus

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.components.projects import written
from pgwal_pipeline_tests.components.ticks import sensor_daemon
from pgwal_pipeline_tests.support import Source, fresh_source


def attributes(name: str) -> dict[str, str]:
    lake = "{{ context.project_root }}/lake/" + name
    variable = f"{name.upper()}_DSN"
    return {"name": name, "source_dsn": f"{{{{ env.{variable} }}}}", "lake": lake, "slot": name, "publication": name}


def rows(answer: dict[str, Any], table: str) -> int:
    return pl.read_delta(answer["publish"]["tables"][table]["path"]).height


@pytest.mark.long
def test_one_that_is_down_does_not_touch_the_other(
    source: Source, make_server: Callable[..., Postgres], connect_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders SELECT generate_series(1, 10)")
    server = make_server()
    with fresh_source(server) as crm:
        crm.sql("CREATE TABLE customers (id int PRIMARY KEY); INSERT INTO customers SELECT generate_series(1, 3)")
        module = written(tmp_path, {name: attributes(name) for name in ("shop", "crm")})
        commands = Commands(tmp_path, "")
        for name in [name for name in commands.environment if name.startswith("PGWAL_")]:
            del commands.environment[name]
        variables = {"SHOP_DSN": source.dsn, "CRM_DSN": crm.dsn, "PGWAL_SPARK_REMOTE": connect_address}
        commands.environment |= variables

        code, out, err = commands.run("sync", "--json")
        assert (code, out) == (2, "")
        assert "has the sources crm, shop; choose one with `pgwal --source NAME`." in err
        assert rows(commands.json("--source", "shop", "sync"), "public.orders") == 10
        assert commands.json("--source", "crm", "doctor")["ok"]
        assert rows(commands.json("--source", "crm", "sync"), "public.customers") == 3
        for name, table in (("shop", "public.orders"), ("crm", "public.customers")):
            status = commands.json("--source", name, "status")
            assert (status["slot"]["name"], list(status["tables"])) == (name, [table])
        code, out, err = commands.run("--source", "crm", "query", "SELECT count(*) FROM customers", "--csv")
        assert (code, out.split()[-1]) == (0, "3"), err

        crm.close()
        server.stop()
        source.sql("INSERT INTO orders SELECT generate_series(11, 15)")
        assert rows(commands.json("--source", "shop", "sync"), "public.orders") == 15
        code, out, err = commands.run("--source", "crm", "sync")
        assert (code, out) == (1, "")
        assert f"127.0.0.1:{server.port}/{crm.database} cannot be reached" in err
        assert commands.json("--source", "crm", "status")["slot"] is None
        source.sql("INSERT INTO orders VALUES (16)")
        for name, value in {**variables, "PGWAL_LAG_THRESHOLD": "1B", "DAGSTER_HOME": str(commands.folder / "dagster")}.items():
            monkeypatch.setenv(name, value)
        _look_in_dagster(module, tmp_path)
        server.start()
        assert commands.json("--source", "crm", "verify")["equal"]
        assert commands.json("--source", "crm", "drop", "--yes") == {"dropped": ["slot crm", "publication crm"]}
        assert commands.json("--source", "shop", "status")["slot"]["name"] == "shop"


def _look_in_dagster(module: str, folder: Path) -> None:
    """Runs and assets of both are there; the sensor of the one that is up asks for a run, that of the other fails."""
    with dg.DagsterInstance.get() as instance:
        assert {run.job_name for run in instance.get_runs()} == {*("shop_sync", "shop_snapshot", "crm_sync", "crm_snapshot", "crm_publish")}
        for name, table in (("shop", "orders"), ("crm", "customers")):
            for layer in ("raw", "current"):
                assert instance.get_latest_materialization_event(dg.AssetKey([name, layer, "public", table])) or layer == "raw"
        with sensor_daemon(instance, f"{module}.definitions", str(folder)) as daemon:
            daemon.tick()
            (up,), (down,) = daemon.ticks("shop_wal_lag"), daemon.ticks("crm_wal_lag")
            assert up.status == TickStatus.SUCCESS, up
            (run,) = [run for run in map(instance.get_run_by_id, up.run_ids) if run is not None]
            assert run.job_name == "shop_sync"
            assert down.status == TickStatus.FAILURE
            assert "cannot be reached" in str(down.error)
        definitions = sys.modules[f"{module}.definitions"].defs()
        assert {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()} == {
            *("shop/slot/shop", "crm/slot/crm"),
            *(f"shop/{layer}/public/orders" for layer in ("postgres", "raw", "snapshot", "current")),
            *(f"crm/{layer}/public/customers" for layer in ("postgres", "raw", "snapshot", "current")),
        }

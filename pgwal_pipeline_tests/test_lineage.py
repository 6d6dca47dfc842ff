"""Which columns of Dagster's lineage lose their source."""

import os
import sys
from pathlib import Path

import dagster as dg
import pytest

from pgwal_pipeline.lineage import columns_lost
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

ORDERS = TableName("shop", "orders")
PROJECT = """
import dagster as dg

def lineage(column, asset, source):
    deps = dg.TableColumnLineage({column: [dg.TableColumnDep(asset_key=asset, column_name=source)]})
    return {"dagster/column_lineage": deps}

defs = dg.Definitions(assets=[
    dg.AssetSpec(["own", "orders"], metadata={"pgwal/table": "shop.orders", "pgwal/layer": "current"}),
    dg.AssetSpec("revenue", metadata=lineage("total", ["own", "orders"], "amount")),
    dg.AssetSpec("report", metadata=lineage("sum", "revenue", "total")),
    dg.AssetSpec("other", metadata=lineage("note", ["own", "orders"], "note")),
])
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Settings.from_environment({}, source_dsn="postgresql://nobody@127.0.0.1/none", lake=str(tmp_path / "lake"))


def test_of_a_projects_definitions(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.dagster]\nmodule_name = "marts_of_a_test"\n')
    (tmp_path / "marts_of_a_test.py").write_text(PROJECT)
    lost, warnings = columns_lost(settings, [(ORDERS, "amount")])
    assert warnings == []
    assert lost == [
        {"asset": "own/orders", "column": "amount", "source": "shop.orders.amount"},
        {"asset": "report", "column": "sum", "source": "shop.orders.amount"},
        {"asset": "revenue", "column": "total", "source": "shop.orders.amount"},
    ]
    assert columns_lost(settings, []) == ([], [])
    assert not (tmp_path / "home").exists()


def test_of_what_was_materialized(settings: Settings, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.environ["DAGSTER_HOME"] = str(home)
    deps = dg.TableColumnLineage({"total": [dg.TableColumnDep(asset_key=["current", "shop", "orders"], column_name="amount")]})
    with dg.DagsterInstance.get() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization("mart", metadata={"dagster/column_lineage": deps}))
    lost, warnings = columns_lost(settings, [(ORDERS, "amount"), (ORDERS, "note")])
    assert warnings == []
    assert [(found["asset"], found["column"]) for found in lost] == [
        ("current/shop/orders", "amount"),
        ("current/shop/orders", "note"),
        ("mart", "total"),
    ]


def test_definitions_that_do_not_load(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.dg.project]\nroot_module = "broken_of_a_test"\n')
    lost, warnings = columns_lost(settings, [(ORDERS, "amount")])
    assert len(lost) == 1
    assert warnings == [
        "The definitions broken_of_a_test.definitions do not load (ModuleNotFoundError), so their columns were not looked at."
    ]

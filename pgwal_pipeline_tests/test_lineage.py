"""Which columns of Dagster's lineage lose their source."""

import os
import sys
from pathlib import Path

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames
from pgwal_pipeline.lineage import columns_lost
from pgwal_pipeline.sources import choose
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
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AssetNames:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return AssetNames("pgwal")


def test_of_a_projects_definitions(names: AssetNames, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.dagster]\nmodule_name = "marts_of_a_test"\n')
    (tmp_path / "marts_of_a_test.py").write_text(PROJECT)
    lost, warnings = columns_lost(names, [(ORDERS, "amount")])
    assert warnings == []
    assert lost == [
        {"asset": "own/orders", "column": "amount", "source": "shop.orders.amount"},
        {"asset": "report", "column": "sum", "source": "shop.orders.amount"},
        {"asset": "revenue", "column": "total", "source": "shop.orders.amount"},
    ]
    assert columns_lost(names, []) == ([], [])
    assert not (tmp_path / "home").exists()


def test_of_what_was_materialized(names: AssetNames, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.environ["DAGSTER_HOME"] = str(home)
    deps = dg.TableColumnLineage({"total": [dg.TableColumnDep(asset_key=["current", "shop", "orders"], column_name="amount")]})
    with dg.DagsterInstance.get() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization("mart", metadata={"dagster/column_lineage": deps}))
    lost, warnings = columns_lost(names, [(ORDERS, "amount"), (ORDERS, "note")])
    assert warnings == []
    assert [(found["asset"], found["column"]) for found in lost] == [
        ("current/shop/orders", "amount"),
        ("current/shop/orders", "note"),
        ("mart", "total"),
    ]


def test_definitions_that_do_not_load(names: AssetNames, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.dg.project]\nroot_module = "broken_of_a_test"\n')
    lost, warnings = columns_lost(names, [(ORDERS, "amount")])
    assert len(lost) == 1
    assert warnings == [
        "The definitions broken_of_a_test.definitions do not load (ModuleNotFoundError), so their columns were not looked at."
    ]


IN_PYTHON = """
import dagster as dg
from pgwal_pipeline import build_cdc_definitions

deps = [dg.TableColumnDep(asset_key=["shop", "current", "shop", "orders"], column_name="amount")]
mart = dg.AssetSpec("mart", metadata={"dagster/column_lineage": dg.TableColumnLineage({"total": deps})})
defs = dg.Definitions.merge(
    build_cdc_definitions(name="shop", source_dsn="postgresql://nobody@127.0.0.1:1/none", lake="lake"),
    dg.Definitions(assets=[mart]),
)
"""


@pytest.mark.usefixtures("names")
def test_of_a_source_with_a_name_from_a_folder_below_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has loaded the project before, to find its source; assets of ours are not built then."""
    (tmp_path / "pyproject.toml").write_text('[tool.dagster]\nmodule_name = "shop_of_a_test"\n')
    (tmp_path / "shop_of_a_test.py").write_text(IN_PYTHON)
    (tmp_path / "migrations").mkdir()
    monkeypatch.chdir(tmp_path / "migrations")
    lost, warnings = columns_lost(choose().names(), [(ORDERS, "amount")])
    assert warnings == []
    assert [(found["asset"], found["column"]) for found in lost] == [("mart", "total"), ("shop/current/shop/orders", "amount")]

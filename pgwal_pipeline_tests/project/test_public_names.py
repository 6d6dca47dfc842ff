"""What others may import: it is what the guide says, and importing it loads no more than it needs."""

import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

import pgwal_pipeline
from pgwal_pipeline.components import PostgresCdcComponent
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.components.projects import project
from pgwal_pipeline_tests.project.guides import ROOT, blocks, names, read, tables

_HEAVY = ("dagster", "pyspark", "deltalake", "pyarrow", "numpy", "pandas", "polars", "duckdb", "grpc", "pydantic", "psycopg2", "click")
_OF_DAGSTER = {"dagster", "pydantic", "click"}  # what Dagster is, and loads itself


def loaded_by(statement: str) -> set[str]:
    """The modules of `_HEAVY` that a statement loads in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*(name for name in {_HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import pgwal_pipeline", "from pgwal_pipeline import PgwalError", "from pgwal_pipeline import __version__"]
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement) == set()


@pytest.mark.parametrize("name", ["PublishedState", "Changes", "apply_changes"])
def test_a_name_for_reading_loads_nothing_that_reads(name: str) -> None:
    assert loaded_by(f"from pgwal_pipeline import {name}") <= {"pydantic"}


@pytest.mark.parametrize("name", ["PublishedLake", "PublishedTableIOManager"])
def test_a_resource_loads_dagster_alone(name: str) -> None:
    assert loaded_by(f"from pgwal_pipeline import {name}") - _OF_DAGSTER == set()


def test_what_is_heavy_is_noticed() -> None:
    assert "dagster" in loaded_by("from pgwal_pipeline import PostgresCdcComponent")


def test_the_names_are_those_of_the_guide() -> None:
    assert sorted(names(row[0])[0] for row in tables(read("docs/python.md"))[0].rows) == sorted(pgwal_pipeline.__all__)
    assert pgwal_pipeline.PgwalError is PgwalError
    assert pgwal_pipeline.PostgresCdcComponent is PostgresCdcComponent
    assert set(pgwal_pipeline.__all__) <= set(dir(pgwal_pipeline))
    with pytest.raises(AttributeError, match="Nothing"):
        pgwal_pipeline.Nothing  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_the_version_is_that_of_the_project() -> None:
    assert pgwal_pipeline.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (ROOT / "pgwal_pipeline" / "py.typed").exists()


def test_the_guides_components_load_in_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOP_DSN", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    given = [
        found for language, text in blocks(read("docs/own-project.md")) if language == "yaml" and "type" in (found := yaml.safe_load(text))
    ]
    shop, medals = (found["attributes"] for found in given)
    with project(tmp_path / "one", {"shop": shop, "medals": medals}, component=given[0]["type"]) as definitions:
        assert definitions.resolve_job_def("shop_sync").run_tags == {"pgwal/slot": "shop.shop"}
        assert definitions.resolve_job_def("sync").run_tags == {"pgwal/slot": "pgwal"}
    told = tables(read("docs/own-project.md"))[0].rows
    assert [names(row[0])[0] for row in told] == [
        field.name for field in fields(PostgresCdcComponent) if field.name not in Settings.model_fields
    ]


def test_the_guides_python_loads_in_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE", "PGWAL_SOURCE_DSN", "SHOP_DSN", "CRM_DSN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    loaded = []
    for _, text in (block for block in blocks(read("docs/own-project.md")) if block[0] == "python"):
        module: dict[str, Any] = {"__name__": "guide"}
        exec(compile(text, "docs/own-project.md", "exec"), module)
        loaded.append(module["defs"])
    medals, both, downstream = loaded
    assert medals.resolve_job_def("sync") is not None
    assert {both.resolve_job_def(f"{name}_sync").run_tags["pgwal/slot"] for name in ("shop", "crm")} == {"shop.pgwal", "crm.pgwal"}
    tables_of_shop = dg.Definitions(assets=[dg.AssetSpec(["shop", "current", "app", "orders"])])  # with a source they are there
    dg.Definitions.validate_loadable(dg.Definitions.merge(both, downstream, tables_of_shop))

"""Dagster projects in a folder, made of this project's component, for tests that need other definitions than ours."""

import json
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from pgwal_pipeline import known_tables
from pgwal_pipeline.known_tables import KnownColumn, KnownTable
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.shared_spark import PARTS

PROJECT = """
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "{module}"
"""
DEFINITIONS = """
from pathlib import Path
import dagster as dg


@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


def set_environment(monkeypatch: pytest.MonkeyPatch, folder: Path, dsn: str, **more: str) -> None:
    """Set the settings of a code location whose home and lake are in `folder`, and which runs its own small Spark."""
    settings = {"PGWAL_SPARK_MASTER": "local[2]", "PGWAL_SPARK_CONF": json.dumps(PARTS), **more}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DAGSTER_HOME", str(folder / "home"))
    monkeypatch.setenv("PGWAL_LAKE", str(folder / "lake"))
    monkeypatch.setenv("PGWAL_SOURCE_DSN", dsn)


def written(
    folder: Path, sources: Mapping[str, Mapping[str, Any]], component: str = "pgwal_pipeline.components.PostgresCdcComponent"
) -> str:
    """Write the files of a project, as `project` has it; its module is returned."""
    module = f"project_{uuid.uuid4().hex}"
    package = folder / module
    (package / "defs").mkdir(parents=True)
    for name, attributes in sources.items():
        (package / "defs" / name).mkdir()
        content = {"type": component, "attributes": dict(attributes)}
        (package / "defs" / name / "defs.yaml").write_text(yaml.safe_dump(content))
    for made in (package, package / "defs"):
        (made / "__init__.py").touch()
    (package / "definitions.py").write_text(DEFINITIONS)
    (folder / "pyproject.toml").write_text(PROJECT.format(module=module))
    return module


@contextmanager
def project(
    folder: Path, sources: Mapping[str, Mapping[str, Any]], component: str = "pgwal_pipeline.components.PostgresCdcComponent"
) -> Iterator[dg.Definitions]:
    """Definitions of a project with a `component` for each of `sources`: the folder's name and the component's attributes."""
    module = written(folder, sources, component)
    package = folder / module
    sys.path.insert(0, str(folder))
    try:
        yield dg.load_from_defs_folder(path_within_project=package)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
            del sys.modules[name]


def remember(tables: Iterable[KnownTable], **settings: Any) -> None:
    """Make DAGSTER_HOME know the tables of a source, as after a load that reached it. `settings` stand over those of the environment."""
    path = known_tables.state_path(Settings.from_environment(**settings))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(known_tables.dump(tables), encoding="utf-8")


def table(text: str, *columns: str, key: tuple[str, ...] = ("id",)) -> KnownTable:
    """A known table called `text` with integer columns: `id` and those named."""
    return KnownTable(TableName.parse(text), tuple(KnownColumn(name, "integer", "integer") for name in ("id", *columns)), key)

"""The files at the project's root that users copy, load or install from."""

import ast
import os
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance
from dagster._core.instance import InstanceRef
from dotenv import dotenv_values

from pgwal_pipeline.lake.layout import _PASSED_ON
from pgwal_pipeline.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
_EXAMPLES = {
    "PGWAL_SOURCE_DSN",
    "PGWAL_PASSWORD_COMMAND",
    "PGWAL_SSH_TUNNEL",
    "PGWAL_SPARK_REMOTE",
    "PGWAL_SPARK_CONF",
    "PGWAL_SPARK_CATALOG",
    "PGWAL_TABLE_OPTIONS",
    "PGWAL_HASH_KEY",
}  # have no default: an example stands there


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, str]:
    """The lines of .env.example, taken out of their comments."""
    copy = tmp_path / ".env"
    copy.write_text(re.sub(r"(?m)^#(?=[A-Z_]+=)", "", (ROOT / ".env.example").read_text()))
    return {name: value or "" for name, value in dotenv_values(copy).items()}


def test_the_example_shows_every_setting(shown: dict[str, str]) -> None:
    assert set(shown) == {PREFIX + name.upper() for name in Settings.model_fields} | {"DAGSTER_HOME"}


def test_the_example_shows_the_defaults(shown: dict[str, str]) -> None:
    assert Settings.from_environment({name: value for name, value in shown.items() if name not in _EXAMPLES}) == Settings(lake="./lake")
    Settings.from_environment(shown)


def test_nothing_in_the_example_is_set_as_it_stands() -> None:
    assert dotenv_values(ROOT / ".env.example") == {}


def test_dagsters_instance_loads_and_keeps_its_runs_where_pgwal_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path), config_dir=str(ROOT))) as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.run_monitoring_enabled
        queue = instance.get_concurrency_config().run_queue_config
        assert queue is not None
        assert {"key": "pgwal/slot", "value": {"applyLimitPerUniqueValue": True}, "limit": 1} in queue.tag_concurrency_limits
        instance.add_dynamic_partitions("windows", ["a"])
    home = tmp_path / ".dagster"
    (home / "dagster.yaml").touch()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with DagsterInstance.get() as instance:
        assert instance.get_dynamic_partitions("windows") == ["a"]


@pytest.mark.parametrize("path", ["dagster.yaml", "deploy/dagster.yaml", "pgwal_pipeline/instance.yaml"])
def test_no_instance_lets_a_run_seem_to_work_for_ever(path: str) -> None:
    assert yaml.safe_load((ROOT / path).read_text())["run_monitoring"]["max_runtime_seconds"] == 86400


def test_what_executes_runs_in_the_deployment() -> None:
    code = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]["code"]
    handed_on = {name for name, value in code["environment"].items() if value is None}
    # One that stands there by itself would win over a password file.
    assert "PGPASSWORD" in handed_on
    assert {*_PASSED_ON, "AWS_ENDPOINT_URL_S3"} <= handed_on
    given = {PREFIX + name.upper() for name in Settings.model_fields} - set(code["environment"])
    assert given == set()


def test_continuous_integration_runs_the_tests() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test"


def test_constraints_are_exact_and_cover_what_is_asked_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", line)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    names = {match[0] for requirement in asked if (match := re.match(r"[A-Za-z0-9.-]+", requirement))}
    assert names <= {line.partition("==")[0] for line in lines}


def imported() -> set[str]:
    """The distributions that the pipeline's modules import, be it inside a function."""
    nodes = [node for path in (ROOT / "pgwal_pipeline").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    known = packages_distributions()
    tops = {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names, "pgwal_pipeline"}
    return {re.sub("[-_.]+", "-", known[top][0]).lower() for top in tops}


def test_what_is_imported_is_declared() -> None:
    """A package that comes with another one today may not come with its next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["local"]]
    declared = {match[0].lower() for requirement in asked if (match := re.match(r"[A-Za-z0-9.-]+", requirement))}
    assert {"sqlalchemy", "pyyaml", "py4j"} <= imported()
    assert imported() - declared == set()

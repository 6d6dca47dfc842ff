import subprocess
import sys
import tomllib
from pathlib import Path

import dagster as dg
import pytest
import yaml

from pgwal_pipeline import definitions as code_location

ROOT = Path(code_location.__file__).parents[1]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No source, no state."""
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE", "PGWAL_SOURCE_DSN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))


def test_the_location_loads_with_no_source_and_no_state() -> None:
    definitions = code_location.defs()
    dg.Definitions.validate_loadable(definitions)
    repository = definitions.get_repository_def()
    assert sorted(name for name in repository.job_names if not name.startswith("__")) == [
        "drain",
        "maintenance",
        "publish",
        "snapshot",
        "sync",
        "verify",
    ]
    assert sorted(sensor.name for sensor in repository.sensor_defs) == ["maintenance_need", "new_tables", "wal_lag"]
    assert sorted(schedule.name for schedule in repository.schedule_defs) == ["hourly_sync", "nightly_verify"]
    assert [key.to_user_string() for key in repository.asset_graph.get_all_asset_keys()] == ["slot/pgwal"]
    assert sorted(definitions.resources or {}) == ["lake", "slot", "spark"]


def test_all_that_asks_for_runs_is_on_from_the_start() -> None:
    repository = code_location.defs().get_repository_def()
    assert {sensor.default_status for sensor in repository.sensor_defs} == {dg.DefaultSensorStatus.RUNNING}
    statuses = {schedule.name: schedule.default_status for schedule in repository.schedule_defs}
    assert statuses.pop("nightly_verify") == dg.DefaultScheduleStatus.STOPPED  # it costs a comparison: who wants it turns it on
    assert set(statuses.values()) == {dg.DefaultScheduleStatus.RUNNING}


def test_the_location_has_one_name() -> None:
    """State and schedules are kept by it: `dg` reads pyproject.toml, the daemon and the webserver workspace.yaml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    (location,) = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    assert location["python_module"]["location_name"] == project["code_location_name"]
    assert location["python_module"]["module_name"] == code_location.__name__


def test_runs_of_one_slot_queue_up() -> None:
    for path in (ROOT / "dagster.yaml", ROOT / "deploy" / "dagster.yaml"):
        limits = yaml.safe_load(path.read_text())["concurrency"]["runs"]["tag_concurrency_limits"]
        assert {limit["key"]: limit["limit"] for limit in limits} == {"pgwal/slot": 1, "pgwal/snapshot": 1, "pgwal/maintenance": 1}


def test_dagster_finds_it_valid(tmp_path: Path) -> None:
    validation = subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-w", str(ROOT / "workspace.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert validation.returncode == 0, validation.stdout + validation.stderr
    assert "Traceback" not in validation.stderr
    assert not (ROOT / "pgwal_pipeline" / "defs" / ".local_defs_state").exists()

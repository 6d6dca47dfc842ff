"""Which source a command works on: that of the environment, or those of the Dagster project around the working directory."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline import sources
from pgwal_pipeline.messages.errors import PgwalError, SettingError
from pgwal_pipeline.sources import choose
from pgwal_pipeline_tests.components.projects import written

SHOP = {"name": "shop", "source_dsn": "{{ env.SHOP_DSN }}", "lake": "{{ context.project_root }}/lake/shop", "slot": "shop"}
CRM = {"name": "crm", "source_dsn": "{{ env.CRM_DSN }}", "lake": "{{ context.project_root }}/lake/crm", "window_time": "7s"}
IN_PYTHON = """
import dagster as dg
from pgwal_pipeline import build_cdc_definitions

defs = dg.Definitions.merge(
    build_cdc_definitions(name="third", source_dsn=dg.EnvVar("THIRD_DSN"), slot="third"),
    dg.Definitions(jobs=[dg.define_asset_job("mine", selection=dg.AssetSelection.groups("current"))]),
)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No project around, and nothing of one left behind."""
    before, path = set(sys.modules), list(sys.path)
    for name in ("THIRD_DSN", "CRM_DSN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOP_DSN", "postgresql://me@127.0.0.1:1/shop")
    monkeypatch.setenv("PGWAL_SOURCE_DSN", "postgresql://me@127.0.0.1:1/of_the_environment")
    monkeypatch.setenv("PGWAL_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("project_"):
            del sys.modules[name]


MakeProject = Callable[..., str]


@pytest.fixture
def make_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeProject:
    """`make_project(**sources)`: a project that a command finds when it is started in `folder`, which it is."""

    def make(folder: Path = tmp_path, **components: Mapping[str, Any]) -> str:
        module = written(folder, components)
        monkeypatch.chdir(folder)
        return module

    return make


def refused(name: str | None = None) -> str:
    with pytest.raises(SettingError) as told:
        choose(name)
    assert told.value.exit_code == 2
    assert "\n" not in str(told.value)
    return str(told.value)


def test_without_a_project_it_is_the_one_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_components", lambda _: pytest.fail("Dagster was loaded, which takes a second"))
    found = choose()
    assert (found.name, found.settings().dsn) == ("", "postgresql://me@127.0.0.1:1/of_the_environment")
    assert found.named("sync") == "sync"


def test_this_packages_own_has_no_name() -> None:
    assert "has the source '' (without a name), and no source shop" in refused("shop")
    assert choose("").settings().dsn == choose().settings().dsn
    assert choose("").load().resolve_job_def("sync").name == "sync"


def test_each_source_of_a_project_has_its_own_settings_and_jobs(make_project: MakeProject, tmp_path: Path) -> None:
    make_project(shop=SHOP, crm=CRM)
    assert f"The code location of {tmp_path}/pyproject.toml has the sources crm, shop; choose one with" in refused()
    assert "has the sources crm, shop, and no source nosuch" in refused("nosuch")
    shop = choose("shop")
    assert shop.settings().dsn == "postgresql://me@127.0.0.1:1/shop"
    assert (shop.settings().slot, shop.settings().lake) == ("shop", f"{tmp_path}/lake/shop")
    assert {"shop_sync", "shop_drain"} <= {job.name for job in shop.load().resolve_all_job_defs()}
    crm = choose("crm")
    # Not that of the environment: it would be the wrong source.
    with pytest.raises(SettingError, match="CRM_DSN is not set"):
        crm.settings()
    with pytest.raises(SettingError, match="CRM_DSN is not set"):
        crm.environment()
    assert crm.load().resolve_job_def("crm_sync").run_tags == {"pgwal/slot": "crm.pgwal"}


def test_one_that_is_wrong_leaves_the_other_alone(make_project: MakeProject) -> None:
    make_project(
        shop=SHOP, crm={**CRM, "window_time": "many", "source_dsn": "host=none"}, third={"name": "third", "slot": "{{ env.CRM_DSN }}"}
    )
    assert choose("shop").settings().slot == "shop"
    with pytest.raises(SettingError, match="CRM_DSN is not set; slot takes"):
        choose("third").settings()
    with pytest.raises(SettingError, match="PGWAL_WINDOW_TIME is 'many'"):
        choose("crm").settings()


def test_the_only_one_needs_no_name(make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project(shop=SHOP)
    assert choose().name == "shop"
    below = tmp_path / "some" / "folder"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert choose().settings().lake == f"{tmp_path}/lake/shop"


def test_sources_that_are_made_in_python(make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_project(shop=SHOP)
    (tmp_path / module / "defs" / "more.py").write_text(IN_PYTHON)
    monkeypatch.setenv("THIRD_DSN", "postgresql://me@127.0.0.1:1/third")
    assert "has the sources shop, third;" in refused()
    assert choose("third").settings().dsn == "postgresql://me@127.0.0.1:1/third"
    assert choose("third").load().resolve_job_def("third_sync").name == "third_sync"


@pytest.mark.parametrize("how", ["tool.dagster", "workspace.yaml", "dg.toml"])
def test_a_code_location_as_dagster_finds_it(how: str, tmp_path: Path) -> None:
    module = f"project_{how.replace('.', '_')}"
    (tmp_path / f"{module}.py").write_text(IN_PYTHON)
    match how:
        case "tool.dagster":
            (tmp_path / "pyproject.toml").write_text(f'[tool.dagster]\nmodule_name = "{module}"\n')
        case "workspace.yaml":
            (tmp_path / how).write_text(f"load_from:\n  - python_file: {module}.py\n")
        case _:
            text = f'directory_type = "project"\n[project]\nroot_module = "{module}"\ncode_location_target_module = "{module}"\n'
            (tmp_path / how).write_text(text)
    found = choose("third")
    assert found.name == choose().name == "third"
    assert found.load().resolve_job_def("third_drain").name == "third_drain"


def test_a_project_without_a_source_is_not_in_the_way(make_project: MakeProject) -> None:
    make_project()
    assert choose().settings().dsn == "postgresql://me@127.0.0.1:1/of_the_environment"
    assert "has no source, and no source shop" in refused("shop")


def test_a_code_location_that_cannot_be_loaded(make_project: MakeProject, tmp_path: Path) -> None:
    module = make_project(shop=SHOP)
    (tmp_path / module / "defs" / "broken.py").write_text("1 / 0")
    with pytest.raises(
        PgwalError, match=rf"The code location of {tmp_path}/pyproject.toml cannot be loaded \(.*`dg check defs` shows"
    ) as told:
        choose("shop")
    assert "\n" not in str(told.value)
    (tmp_path / "pyproject.toml").write_text("[tool")
    assert f"{tmp_path}/pyproject.toml cannot be read" in refused()

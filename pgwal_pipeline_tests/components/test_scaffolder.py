import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster.components.scaffold.scaffold import NoParams, ScaffoldFormatOptions
from jsonschema import Draft202012Validator

from pgwal_pipeline import PostgresCdcComponent
from pgwal_pipeline.components.scaffolder import CdcScaffolder
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.components.projects import project, remember, table

pytestmark = pytest.mark.usefixtures("no_settings")
TYPE = "pgwal_pipeline.PostgresCdcComponent"


def scaffold(target: Path, kind: ScaffoldFormatOptions = "yaml", *, append: bool = False) -> None:
    CdcScaffolder().scaffold(dg.ScaffoldRequest(TYPE, target, kind, target, NoParams(), append))


def uncommented(text: str) -> str:
    """The YAML with the settings that are comments in it."""
    return "\n".join(line.replace("  # ", "  ", 1) if line.startswith("  # ") else line for line in text.splitlines())


def test_every_setting_is_there_and_fits(tmp_path: Path) -> None:
    (tmp_path / "My Shop").mkdir()
    scaffold(tmp_path / "My Shop")
    text = (tmp_path / "My Shop/defs.yaml").read_text()
    assert yaml.safe_load(text) == {
        "type": TYPE,
        "attributes": {
            "name": "my_shop",
            "source_dsn": "{{ env.MY_SHOP_DSN }}",
            "lake": "{{ context.project_root }}/lake/my_shop",
            "slot": "my_shop",
            "publication": "my_shop",
        },
        "requirements": {"env": ["MY_SHOP_DSN"]},
    }
    prose = ("  # The name", "  # Any other", "  # How the assets")
    told = yaml.safe_load(uncommented("\n".join(line for line in text.splitlines() if not line.startswith(prose))))["attributes"]
    assert set(told) == {*Settings.model_fields, "name", "translation"}
    schema = PostgresCdcComponent.model().model_json_schema()
    Draft202012Validator(schema).validate({name: value for name, value in told.items() if value is not None})
    assert max(map(len, text.splitlines())) <= 110
    scaffold(tmp_path / "My Shop/defs.yaml", append=True)
    assert [found["type"] for found in yaml.safe_load_all((tmp_path / "My Shop/defs.yaml").read_text())] == [TYPE] * 2


def test_what_is_scaffolded_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shop", "crm"):
        monkeypatch.setenv(f"{name.upper()}_DSN", "postgresql://127.0.0.1:1/nowhere")
        remember([table("public.a")], source_dsn="postgresql://127.0.0.1:1/nowhere", publication=name)
    with project(tmp_path, {"x": {"name": "x", "lake": str(tmp_path / "x")}}):
        (package,) = (path for path in tmp_path.iterdir() if path.name.startswith("project_"))
        for name in ("shop", "crm"):
            (package / "defs" / name).mkdir()
        scaffold(package / "defs/shop", "yaml")
        scaffold(package / "defs/crm", "python")
        for name in [name for name in sys.modules if name.startswith(package.name)]:
            del sys.modules[name]
        found = dg.load_from_defs_folder(path_within_project=package)
        graph = found.resolve_asset_graph()
        keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
        tables = {f"{name}/{layer}/public/a" for name in ("shop", "crm") for layer in ("postgres", "raw", "snapshot", "current")}
        assert keys == tables | {"shop/slot/shop", "crm/slot/crm", "x/slot/pgwal"}
        uri = graph.get(dg.AssetKey(["crm", "current", "public", "a"])).metadata["dagster/uri"]
        assert uri == str(tmp_path / "lake/crm/current/public/a")

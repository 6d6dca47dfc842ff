import os
from pathlib import Path

import dagster as dg
import pytest

from pgwal_pipeline import build_cdc_definitions, known_tables, wal_windows
from pgwal_pipeline.asset_specs import AssetNames, Layer
from pgwal_pipeline.components.cdc import PostgresCdcComponent
from pgwal_pipeline.components.environment import DSN_VARIABLE
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.translator import CdcTable, PgwalTranslator
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.projects import project, remember, table
from pgwal_pipeline_tests.support import Source

pytestmark = pytest.mark.usefixtures("no_settings")
NOBODY = "postgresql://me:secret@127.0.0.1:1/nowhere"
JOBS = {"sync", "drain", "publish", "snapshot", "verify", "maintenance"}


def keys(definitions: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}


def job_names(definitions: dg.Definitions) -> set[str]:
    return {name for name in definitions.get_repository_def().job_names if not name.startswith("__")}


def test_the_assets_of_a_source(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("CREATE SCHEMA shop")
    source.sql("CREATE TABLE shop.orders (id int PRIMARY KEY, total numeric(10,2))")
    source.sql('CREATE TABLE public."Order Lines" (id int PRIMARY KEY)')
    monkeypatch.setenv(DSN_VARIABLE, source.dsn)
    with project(tmp_path, {"cdc": {"owners": ["team:data"]}}) as definitions:
        dg.Definitions.validate_loadable(definitions)
        assert keys(definitions) == {
            "slot/pgwal",
            *(f"{layer}/shop/orders" for layer in ("postgres", "raw", "snapshot", "current")),
            *(f"{layer}/public/Order Lines" for layer in ("postgres", "raw", "snapshot", "current")),
        }
        assert job_names(definitions) == JOBS
        repository = definitions.get_repository_def()
        assert {sensor.name for sensor in repository.sensor_defs} == {"wal_lag", "new_tables", "maintenance_need"}
        assert {schedule.name for schedule in repository.schedule_defs} == {"hourly_sync", "nightly_verify"}
        names = AssetNames("pgwal")
        orders = TableName("shop", "orders")
        graph = definitions.resolve_asset_graph()
        assert graph.get(names.current(orders)).parent_keys == {names.raw(orders), names.snapshot(orders)}
        assert graph.get(names.raw(orders)).parent_keys == graph.get(names.snapshot(orders)).parent_keys == {names.source(orders)}
        assert {key: graph.get(key).group_name for key in (names.slot, names.source(orders), names.raw(orders))} == {
            names.slot: "source",
            names.source(orders): "source",
            names.raw(orders): "raw",
        }
        current = graph.get(names.current(orders))
        assert current.kinds == {"pyspark", "deltalake"}
        assert list(current.owners) == ["team:data"]
        assert current.metadata["dagster/uri"] == str(tmp_path / "lake/current/shop/orders")
        assert [(column.name, column.type) for column in current.metadata["dagster/column_schema"].columns] == [
            ("id", "integer"),
            ("total", "decimal(10,2)"),
            ("_pgwal_commit_lsn", "long"),
            ("_pgwal_text", "map<string,string>"),
        ]
        lineage = current.metadata["dagster/column_lineage"].deps_by_column["total"]
        assert {dep.asset_key for dep in lineage} == {names.raw(orders), names.snapshot(orders)}
        assert {check.name for check in graph.asset_check_keys} == {"health", "followed", "equals_source"}


def test_checks_of_many_tables_are_not_built_again_for_each(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        source.sql(f"CREATE TABLE t{number} (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn)
    with project(tmp_path, {"cdc": {}}) as definitions:
        by_key = definitions.get_repository_def().asset_checks_defs_by_key
        built = {key.name: {id(checks) for other, checks in by_key.items() if other.name == key.name} for key in by_key}
        assert {name: len(ids) for name, ids in built.items()} == {"health": 1, "equals_source": 1}


def test_the_drain_may_be_selected_by_table(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    source.sql("CREATE TABLE b (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn)
    with project(tmp_path, {"cdc": {}}) as definitions:
        a, b = (AssetNames("pgwal").raw(TableName("public", name)) for name in ("a", "b"))
        drain = definitions.resolve_assets_def(a)
        assert drain.keys == {a, b}
        assert drain.subset_for({a}, None).keys == {a}
        assert {spec.key: spec.partitions_def for spec in drain.specs} == {
            a: wal_windows(table="public.a"),
            b: wal_windows(table="public.b"),
        }


def test_with_neither_source_nor_state_everything_loads_without_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DSN_VARIABLE, NOBODY)
    with project(tmp_path, {"cdc": {}}) as definitions:
        dg.Definitions.validate_loadable(definitions)
        assert keys(definitions) == {"slot/pgwal"}
        assert job_names(definitions) == JOBS
        assert definitions.resolve_job_def("sync").partitions_def == dg.DynamicPartitionsDefinition(name="wal_windows")


def test_with_no_source_named_everything_loads(tmp_path: Path) -> None:
    with project(tmp_path, {"cdc": {}}) as definitions:
        assert keys(definitions) == {"slot/pgwal"}


def test_while_the_source_is_down_the_tables_are_those_of_last_time(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn)
    with project(tmp_path / "one", {"cdc": {}}) as definitions:
        before = keys(definitions)
    monkeypatch.setattr(known_tables, "fetch", lambda settings: settings.model_copy(update={"source_dsn": None}).dsn)
    with project(tmp_path / "two", {"cdc": {}}) as definitions:
        assert keys(definitions) == before
        assert "raw/public/a" in before
    written = {path.name for folder in ("one", "two") for path in (tmp_path / folder).rglob("*") if path.is_file()}
    assert written - {"__init__.py", "defs.yaml", "pyproject.toml"} - {name for name in written if name.endswith(".pyc")} == set()


def test_two_sources_stand_side_by_side(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn)
    monkeypatch.setenv("SHOP_DSN", source.dsn)
    shop = {
        "name": "shop",
        "source_dsn": "{{ env.SHOP_DSN }}",
        "slot": "shop",
        "publication": "shop",
        "lake": str(tmp_path / "shop"),
        "max_staleness": "6s",
    }
    with project(tmp_path, {"cdc": {}, "shop": shop}) as definitions:
        dg.Definitions.validate_loadable(definitions)
        ours = {"slot/pgwal", *(f"{layer}/public/a" for layer in ("postgres", "raw", "snapshot", "current"))}
        theirs = {"shop/slot/shop", *(f"shop/{layer}/public/a" for layer in ("postgres", "raw", "snapshot", "current"))}
        assert keys(definitions) == ours | theirs
        assert job_names(definitions) == JOBS | {f"shop_{job}" for job in JOBS}
        graph = definitions.resolve_asset_graph()
        raw, shop_raw = dg.AssetKey(["raw", "public", "a"]), dg.AssetKey(["shop", "raw", "public", "a"])
        assert graph.get(raw).metadata["dagster/uri"] != graph.get(shop_raw).metadata["dagster/uri"]
        windows = {graph.get(key).partitions_def for key in (raw, shop_raw)}
        assert {made.name for made in windows if isinstance(made, dg.DynamicPartitionsDefinition)} == {
            "wal_windows/public.a",
            "shop_wal_windows/public.a",
        }
        assert definitions.resolve_job_def("sync").run_tags == {"pgwal/slot": "pgwal"}
        assert definitions.resolve_job_def("shop_sync").run_tags == {"pgwal/slot": "shop.shop"}
        steps = {node.name for name in ("sync", "shop_sync") for node in definitions.resolve_job_def(name).nodes}
        assert steps == {"drain_wal", "publish_current", "shop_drain_wal", "shop_publish_current"}
        repository = definitions.get_repository_def()
        ours = {sensor.name for sensor in repository.sensor_defs if not sensor.name.startswith("shop_")}
        assert {sensor.name for sensor in repository.sensor_defs} == ours | {f"shop_{name}" for name in ours}
        assert repository.get_sensor_def("shop_wal_lag").minimum_interval_seconds == 2
        assert {schedule.name for schedule in repository.schedule_defs} == {
            f"{prefix}{name}" for prefix in ("", "shop_") for name in ("hourly_sync", "nightly_verify")
        }
        resources = repository.get_top_level_resources()
        assert set(resources) == {f"{prefix}{name}" for prefix in ("", "shop_") for name in ("slot", "spark", "lake")}


def test_a_source_that_is_down_or_not_named_leaves_the_other_alone(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn)
    monkeypatch.delenv("NOT_THERE", raising=False)
    down = {"name": "down", "source_dsn": NOBODY, "lake": str(tmp_path / "down")}
    nameless = {"name": "unset", "source_dsn": "{{ env.NOT_THERE }}", "lake": str(tmp_path / "unset")}
    with project(tmp_path, {"cdc": {}, "down": down, "unset": nameless}) as definitions:
        dg.Definitions.validate_loadable(definitions)
        assert keys(definitions) == {
            *("slot/pgwal", "down/slot/pgwal", "unset/slot/pgwal"),
            *(f"{layer}/public/a" for layer in ("postgres", "raw", "snapshot", "current")),
        }
        assert job_names(definitions) == {f"{prefix}{job}" for prefix in ("", "down_", "unset_") for job in JOBS}


def test_what_a_wrong_attribute_does(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cdc") as found, project(tmp_path, {"cdc": {"slot": "No-Slot"}}):
        pass
    assert "PGWAL_SLOT is 'No-Slot', but it takes the replication slot" in str(found.value.__cause__)


def test_an_odd_name_changes_nothing_for_its_neighbors(shop: None, tmp_path: Path) -> None:
    with project(tmp_path, {"cdc": {}}) as definitions:
        graph = definitions.resolve_asset_graph()
        for name in ("orders", "Order Lines"):
            mappings = graph.get(dg.AssetKey(["current", "shop", name])).partition_mappings
            assert mappings == {dg.AssetKey(["raw", "shop", name]): dg.SpecificPartitionsPartitionMapping([])}


MEDALS = {
    "key": "{{ {'raw': 'bronze', 'current': 'gold'}.get(layer, layer) }}/{{ table.schema }}_{{ table.name }}",
    "group_name": "medals",
    "owners": ["team:shop"],
    "tags": {"layer": "{{ layer }}"},
    "automation_condition": "{{ dg.AutomationCondition.eager() if layer == 'snapshot' else None }}",
    "metadata": {"columns": "{{ table.columns | length }}"},
}


def check_medals(definitions: dg.Definitions) -> None:
    """The assets of the table `shop.Order Lines` and of `shop.orders` as MEDALS has them, with lineage, partitions and checks."""
    dg.Definitions.validate_loadable(definitions)
    graph = definitions.resolve_asset_graph()
    for name in ("orders", "Order Lines"):
        gold, bronze, snapshot, postgres = (dg.AssetKey([layer, f"shop_{name}"]) for layer in ("gold", "bronze", "snapshot", "source"))
        assert graph.get(gold).parent_keys == {bronze, snapshot}
        assert graph.get(bronze).parent_keys == graph.get(snapshot).parent_keys == {postgres}
        assert graph.get(bronze).partitions_def == wal_windows(table=str(TableName("shop", name)))
        assert isinstance(graph.get(gold).partition_mappings[bronze], dg.SpecificPartitionsPartitionMapping)
        assert {check.name for check in graph.asset_check_keys if check.asset_key == gold} == {"followed", "equals_source"}
        assert graph.get(gold).group_name == "medals"
        assert list(graph.get(gold).owners) == ["team:shop"]
        assert graph.get(gold).tags["layer"] == "current"
        assert (graph.get(snapshot).automation_condition is None, graph.get(gold).automation_condition is None) == (False, True)
        assert graph.get(gold).metadata["columns"] == 1
        assert graph.get(gold).metadata["dagster/uri"] == Lake(Settings.from_environment().lake).current(TableName("shop", name))
    assert len(list(graph.get_all_asset_keys())) == 9


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, no_settings: None) -> None:
    """A source that is away, of which two tables are known from last time."""
    monkeypatch.setenv(DSN_VARIABLE, NOBODY)
    remember([table("shop.orders"), table('shop."Order Lines"')])


def test_a_translation_in_yaml(shop: None, tmp_path: Path) -> None:
    with project(tmp_path, {"cdc": {"translation": MEDALS}}) as definitions:
        check_medals(definitions)


class Medals(PgwalTranslator):
    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        spec = super().get_asset_spec(layer, table)
        assert spec.deps or layer == "source"
        return spec.replace_attributes(
            key=[{"raw": "bronze", "current": "gold"}.get(layer, layer), f"{table.schema}_{table.name}"],
            group_name="medals",
            owners=["team:shop"],
            automation_condition=dg.AutomationCondition.eager() if layer == "snapshot" else None,
        ).merge_attributes(tags={"layer": layer}, metadata={"columns": len(table.columns)})


class MedalsComponent(PostgresCdcComponent):
    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        return Medals().get_asset_spec(layer, table)


def test_a_translator_in_python(shop: None, tmp_path: Path) -> None:
    check_medals(build_cdc_definitions(translator=Medals()))
    with project(tmp_path, {"cdc": {}}, component=f"{__name__}.MedalsComponent") as definitions:
        check_medals(definitions)


def test_one_key_for_two_assets_is_refused(shop: None, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cdc") as found, project(tmp_path, {"cdc": {"translation": {"key": "{{ table.name }}"}}}):
        pass
    assert "the same key, " in str(found.value.__cause__)


def test_python_makes_the_same_definitions(shop: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DSN", NOBODY)
    attributes = {"name": "shop", "lake": str(tmp_path / "shop"), "owners": ["team:data"]}
    made = build_cdc_definitions(**attributes, source_dsn=dg.EnvVar("SHOP_DSN"))
    with project(tmp_path, {"shop": attributes | {"source_dsn": "{{ env.SHOP_DSN }}"}}) as definitions:
        assert keys(made) == keys(definitions)
        assert "shop/current/shop/orders" in keys(made)
        assert job_names(made) == job_names(definitions)
    with pytest.raises(SettingError, match="PGWAL_SLOTS takes no value"):
        build_cdc_definitions(slots="a")
    with pytest.raises(SettingError, match="PGWAL_LAG_THRESHOLD is 'much', but it takes a size"):
        build_cdc_definitions(lag_threshold="much")


def test_the_password_is_nowhere_in_what_dagster_shows(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._core.remote_representation.external_data import RepositorySnap
    from dagster._serdes import serialize_value

    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn + ("&" if "?" in source.dsn else "?") + "password=hidden_word")
    with project(tmp_path, {"cdc": {}}) as definitions:
        assert "raw/public/a" in keys(definitions)
        assert "hidden_word" not in serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
    monkeypatch.setenv("SHOP_DSN", os.environ.pop(DSN_VARIABLE))
    secrets = {"source_dsn": "{{ env.SHOP_DSN }}", "spark_conf": {"spark.hadoop.key": "hidden_word"}}
    with project(tmp_path / "given", {"cdc": secrets}) as definitions:
        assert "raw/public/a" in keys(definitions)
        assert "hidden_word" not in serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))

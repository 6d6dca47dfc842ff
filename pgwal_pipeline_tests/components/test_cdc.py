from pathlib import Path

import dagster as dg
import pytest

from pgwal_pipeline import known_tables
from pgwal_pipeline.asset_specs import AssetNames
from pgwal_pipeline.components.resources import DSN_VARIABLE, ReplicationSlot
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.projects import project
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
        assert {sensor.name for sensor in repository.sensor_defs} == {"wal_lag", "new_tables"}
        assert {schedule.name for schedule in repository.schedule_defs} == {"hourly_sync", "nightly_maintenance"}
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


def test_the_drain_takes_all_tables_or_none(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    source.sql("CREATE TABLE b (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn)
    with project(tmp_path, {"cdc": {}}) as definitions:
        names = AssetNames("pgwal")
        drain = definitions.resolve_assets_def(names.raw(TableName("public", "a")))
        assert drain.keys == {names.raw(TableName("public", "a")), names.raw(TableName("public", "b"))}
        assert not drain.can_subset
        assert all(out.is_required for out in drain.op.output_defs)
        with pytest.raises(Exception, match="can_subset=False"):
            drain.subset_for({names.raw(TableName("public", "a"))}, None)


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
        "key_prefix": ["shop"],
        "dsn_variable": "SHOP_DSN",
        "settings": {"slot": "shop", "publication": "shop", "lake": str(tmp_path / "shop"), "lag_threshold": "1kB"},
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
        assert {made.name for made in windows if isinstance(made, dg.DynamicPartitionsDefinition)} == {"wal_windows", "shop_wal_windows"}
        assert definitions.resolve_job_def("sync").run_tags == {"pgwal/slot": "pgwal"}
        assert definitions.resolve_job_def("shop_sync").run_tags == {"pgwal/slot": "shop.shop"}
        steps = {node.name for name in ("sync", "shop_sync") for node in definitions.resolve_job_def(name).nodes}
        assert steps == {"drain_wal", "publish_current", "shop_drain_wal", "shop_publish_current"}


def test_the_password_is_nowhere_in_what_dagster_shows(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._core.remote_representation.external_data import RepositorySnap
    from dagster._serdes import serialize_value

    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    monkeypatch.setenv(DSN_VARIABLE, source.dsn + ("&" if "?" in source.dsn else "?") + "password=hidden_word")
    with project(tmp_path, {"cdc": {}}) as definitions:
        assert "raw/public/a" in keys(definitions)
        assert "hidden_word" not in serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
    assert "hidden_word" not in repr(ReplicationSlot(dsn_variable=DSN_VARIABLE).settings)

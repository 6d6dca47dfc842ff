from typing import Any

import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import LAYERS, AssetNames, AssetSpecs, Layer
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.messages.printable import printable
from pgwal_pipeline.translator import CdcTable, PgwalTranslator, refuse_shared_keys, translated
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.projects import table
from pgwal_pipeline_tests.messages.hostile import HOSTILE

SPECS = AssetSpecs(AssetNames("pgwal"), Lake("/lake"))
ORDERS, LINES = table("shop.orders", "total"), table('shop."Order Lines"')
KEYS = {"source": "source", "raw": "bronze", "snapshot": "snapshot", "current": "gold"}


class Medals(PgwalTranslator):
    """Other keys in each layer, and a dependency of its own."""

    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        spec = super().get_asset_spec(layer, table).merge_attributes(metadata={"of": str(table)}, deps=["calendar"])
        return spec.replace_attributes(
            key=["lake", table.name, {"current": "gold", "raw": "bronze"}.get(layer, layer)], group_name="medals"
        )


def test_the_lineage_follows_the_keys() -> None:
    specs = translated(SPECS, Medals(), [ORDERS, LINES])
    of = {layer: specs.of(layer, ORDERS) for layer in LAYERS}
    key = {
        layer: dg.AssetKey(["lake", "orders", name]) for layer, name in zip(LAYERS, ("source", "bronze", "snapshot", "gold"), strict=True)
    }
    assert {layer: spec.key for layer, spec in of.items()} == key
    assert {layer: [dep.asset_key for dep in spec.deps] for layer, spec in of.items()} == {
        "source": [dg.AssetKey("calendar")],
        "raw": [key["source"], dg.AssetKey("calendar")],
        "snapshot": [key["source"], dg.AssetKey("calendar")],
        "current": [key["raw"], key["snapshot"], dg.AssetKey("calendar")],
    }
    default = SPECS.current(ORDERS)
    assert of["current"].deps and [dep.partition_mapping for dep in of["current"].deps][:2] == [
        dep.partition_mapping for dep in default.deps
    ]
    lineage = of["current"].metadata["dagster/column_lineage"].deps_by_column["total"]
    assert {dep.asset_key for dep in lineage} == {key["raw"], key["snapshot"]}
    assert of["current"].metadata["dagster/uri"] == "/lake/current/shop/orders"
    assert (of["current"].group_name, of["current"].metadata["of"], of["current"].kinds) == (
        "medals",
        "shop.orders",
        {"pyspark", "deltalake"},
    )


def test_names_are_those_of_the_specs_also_for_tables_that_join_later() -> None:
    specs = translated(SPECS, Medals(), [ORDERS, LINES])
    for known in (ORDERS, LINES):
        assert all(specs.names.of(layer, known.table) == specs.of(layer, known).key for layer in LAYERS)
    assert specs.names.raw(TableName("shop", "later")) == dg.AssetKey(["lake", "later", "bronze"])
    assert specs.names.slot == SPECS.names.slot


class ByName(PgwalTranslator):
    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        return table.default_spec(layer).replace_attributes(key={"orders": "the_orders"}[table.name])


class Wrong(PgwalTranslator):
    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        return super().get_asset_spec(layer, table).replace_attributes(**self.changes)


def test_a_translator_that_fails_for_a_table_that_joins_holds_up_no_run() -> None:
    specs = translated(SPECS, ByName(), [ORDERS])
    assert specs.names.current(ORDERS.table) == dg.AssetKey("the_orders")
    assert specs.names.current(LINES.table) == SPECS.names.current(LINES.table)
    with pytest.raises(KeyError):
        specs.current(LINES)


def test_what_a_translator_may_not_change() -> None:
    specs = translated(SPECS, Wrong(metadata={"pgwal/table": "another", "x": 1}, deps=[], skippable=True), [ORDERS])
    raw = specs.raw(ORDERS)
    assert ([dep.asset_key for dep in raw.deps], raw.skippable) == ([SPECS.names.source(ORDERS.table)], False)
    assert dict(raw.metadata) == {"x": 1, "pgwal/table": "shop.orders", "pgwal/layer": "raw"}
    with pytest.raises(SettingError, match=r"raw of shop\.orders partitions; leave them out"):
        translated(SPECS, Wrong(partitions_def=dg.DailyPartitionsDefinition("2026-01-01")), [ORDERS]).raw(ORDERS)
    with pytest.raises(SettingError, match=r"source of shop\.orders and raw of shop\.orders the same key, all;"):
        refuse_shared_keys(translated(SPECS, Wrong(key="all"), [ORDERS]), [ORDERS])
    refuse_shared_keys(translated(SPECS, Medals(), [ORDERS, LINES]), [ORDERS, LINES])


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_printable(text: str) -> None:
    known = table("a.b")
    known = type(known)(TableName(text, text), known.columns)
    for key in (translated(SPECS, Medals(), [known]).current(known).key, translated(SPECS, PgwalTranslator(), []).current(known).key):
        assert printable(key.to_user_string()) == key.to_user_string()

import dagster as dg
import pytest

from pgwal_pipeline.components.source import op_safe, stand_ins


def key(*parts: str) -> dg.AssetKey:
    return dg.AssetKey(list(parts))


def test_plain_keys_need_no_stand_in() -> None:
    assert stand_ins([key("raw", "public", "orders"), key("raw", "shop", "order_lines"), key("postgres", "public", "orders")]) == {}


@pytest.mark.parametrize(
    "keys",
    [
        [key("raw", "public", "Order Lines"), key("raw", "public", "Order-Lines"), key("raw", "public", "Order_Lines")],
        [key("raw", "a", "b__c"), key("raw", "a__b", "c"), key("raw", "a_b", "c"), key("raw", "a", "b_c")],
        [key("raw", "ü", "we/ird"), key("raw", "é", "we.ird")],
        [key("raw", "p", "x"), key("raw", "p", "x_2"), key("raw", "p", "x!"), key("raw", "p", "x?")],
    ],
)
def test_an_op_takes_and_gives_any_names(keys: list[dg.AssetKey]) -> None:
    upstream = {made: key("postgres", *made.path[1:]) for made in keys}
    specs, real_keys = op_safe([dg.AssetSpec(made, deps=[upstream[made]]) for made in keys])

    @dg.multi_asset(specs=specs)
    def all_of_them():
        for made in keys:
            yield dg.MaterializeResult(asset_key=made)

    asset = all_of_them.with_attributes(asset_key_replacements=real_keys)
    assert asset.keys == set(keys)
    assert asset.asset_deps == {made: {upstream[made]} for made in keys}
    result = dg.materialize([asset])
    assert {event.asset_key for event in result.get_asset_materialization_events()} == set(keys)

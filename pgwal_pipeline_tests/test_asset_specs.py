import dagster as dg
import pytest
from markdown_it import MarkdownIt

from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.known_tables import KnownColumn, KnownTable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.printable import printable
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.messages.hostile import HOSTILE


@pytest.mark.parametrize("text", HOSTILE)
def test_assets_of_hostile_names(text: str) -> None:
    known = KnownTable(TableName(text, text), (KnownColumn(text, "text", "string"),), ())
    specs = AssetSpecs(AssetNames("slot"), Lake("/lake"))
    for spec in (specs.source(known), specs.raw(known), specs.snapshot(known), specs.current(known)):
        assert isinstance(spec, dg.AssetSpec)
        assert printable(spec.key.to_user_string()) == spec.key.to_user_string()
        assert printable(spec.description or "") == spec.description
        types = {token.type for token in MarkdownIt().parse(spec.description or "")[1].children or ()}
        assert types == {"text", "code_inline"}

from dataclasses import replace

import dagster as dg
import pytest
from markdown_it import MarkdownIt

from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.known_tables import KnownColumn, KnownTable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.printable import printable
from pgwal_pipeline.values.catalog_name import CatalogPattern
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.messages.hostile import HOSTILE


@pytest.mark.parametrize("text", HOSTILE)
def test_assets_of_hostile_names(text: str) -> None:
    known = KnownTable(TableName(text, text), (KnownColumn(text, "text", "string", comment=text),), (), comment=text)
    specs = AssetSpecs(AssetNames("slot"), Lake("/lake"))
    for spec in (specs.source(known), specs.raw(known), specs.snapshot(known), specs.current(known)):
        assert isinstance(spec, dg.AssetSpec)
        assert printable(spec.key.to_user_string()) == spec.key.to_user_string()
        assert {token.type for token in MarkdownIt().parse(spec.description or "")} == {"paragraph_open", "inline", "paragraph_close"}
        comment, description = (spec.description or "").rsplit("\n\n", 1)
        assert printable(description) == description
        assert printable(comment.replace("\n", "")) == comment.replace("\n", "")
        types = {token.type for token in MarkdownIt().parse(description)[1].children or ()}
        assert types == {"text", "code_inline"}
        (column, *_) = spec.metadata["dagster/column_schema"].columns
        assert printable(column.description) == column.description


def test_comments_are_descriptions() -> None:
    comment = "Orders; see postgres://me:secret@host/db?x_y=1\n- one *star*"
    known = KnownTable(TableName("shop", "orders"), (KnownColumn("id", "bigint", "long", comment="The order's number"),), comment=comment)
    specs = AssetSpecs(AssetNames("slot"), Lake("/lake"))
    for spec in (specs.source(known), specs.raw(known), specs.snapshot(known), specs.current(known)):
        inline = MarkdownIt().parse(spec.description or "")[1].children or ()
        shown = "".join("\n" if token.type == "hardbreak" else token.content for token in inline)
        assert shown == comment
        (column, *_) = spec.metadata["dagster/column_schema"].columns
        assert column.description.startswith("The order's number")
    assert "dagster/table_name" not in specs.current(known).metadata
    registered = replace(specs, catalog=CatalogPattern.parse("spark_catalog.lake_{schema}")).current(known)
    assert registered.metadata["dagster/table_name"] == "spark_catalog.lake_shop.orders"
    plain = specs.current(KnownTable(TableName("shop", "orders"), ())).description or ""
    assert plain.startswith("`shop.orders` as it was")

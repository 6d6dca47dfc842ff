import pytest

from pgwal_pipeline.values.catalog_name import CatalogName, CatalogPattern
from pgwal_pipeline.values.relation import TableName


def test_a_table_has_a_name_that_every_catalog_takes() -> None:
    pattern = CatalogPattern.parse("spark_catalog.lake_{schema}")
    assert str(pattern.of(TableName("shop", "orders"))) == "spark_catalog.lake_shop.orders"
    odd = pattern.of(TableName("My-Shop", "Order `Lines`"))
    assert str(odd) == "spark_catalog.lake_my_shop.order__lines_"
    assert odd.sql == "`spark_catalog`.`lake_my_shop`.`order__lines_`"
    assert CatalogName.parse(str(odd)) == odd
    assert str(CatalogPattern.parse("unity.all").of(TableName("a", "b"))) == "unity.all.b"


@pytest.mark.parametrize("text", ["", "spark_catalog", "a.b.c", "a.{table}", ".b", "a.", "a.b c", "`a`.b", "a.{schema}'"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(ValueError, match="is not a catalog and a schema"):
        CatalogPattern.parse(text)

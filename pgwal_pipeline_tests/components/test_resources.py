import dagster as dg
import pytest

from pgwal_pipeline.components.published import PublishedLake
from pgwal_pipeline.components.resources import LakeSpark, ReplicationSlot, SourceSettings, resource_with
from pgwal_pipeline.messages.errors import SettingError

pytestmark = pytest.mark.usefixtures("no_settings")
NOBODY = "postgresql://me:secret@127.0.0.1:1/nowhere"


def test_what_a_source_was_given_stands_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGWAL_SLOT", "from_environment")
    monkeypatch.setenv("PGWAL_PUBLICATION", "from_environment")
    source = SourceSettings({"PGWAL_SLOT": "given", "PGWAL_LAG_THRESHOLD": "1kB", "PGWAL_SOURCE_DSN": NOBODY})
    settings = source.whole()
    assert (settings.slot, settings.publication, settings.lag_threshold, settings.dsn) == ("given", "from_environment", 1024, NOBODY)
    assert source.without_source().source_dsn is None
    assert "secret" not in repr(source) + repr(ReplicationSlot(source)) + repr(settings)


def test_another_source_is_not_read_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGWAL_SOURCE_DSN", NOBODY)
    monkeypatch.setenv("PGDATABASE", "somewhere_else")
    source = SourceSettings(unset=("SHOP_DSN",))
    with pytest.raises(SettingError, match="SHOP_DSN is not set; it takes the source's libpq string"):
        source.whole()
    assert source.without_source().slot == "pgwal"


def test_what_reads_the_lake_goes_by_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceSettings({"PGWAL_LAKE": "/of/source", "PGWAL_SPARK_MASTER": "local[3]"})
    assert PublishedLake.of_source(source).settings.lake == "/of/source"
    assert PublishedLake.of_source(source).settings.spark_master == "local[3]"
    assert LakeSpark.of_source(source)._settings().spark_master == "local[3]"
    assert PublishedLake(lake="/other").settings.lake == "/other"


def test_assets_take_what_a_source_provides_by_its_type() -> None:
    source, found = SourceSettings({"PGWAL_LAKE": "/of/source", "PGWAL_SPARK_CONF": '{"key": "hidden"}'}), []

    @dg.asset
    def mart(shop_lake: PublishedLake, shop_spark: LakeSpark) -> None:
        found.append((shop_lake.settings.lake, shop_spark._settings().spark_conf))

    resources = {
        "shop_lake": resource_with("The lake.", lambda: PublishedLake.of_source(source)),
        "shop_spark": resource_with("Spark.", lambda: LakeSpark.of_source(source)),
    }
    assert dg.materialize([mart], resources=resources).success
    assert found == [("/of/source", {"key": "hidden"})]

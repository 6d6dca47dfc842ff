import pytest

from pgwal_pipeline.components.environment import settings_for, settings_without_source
from pgwal_pipeline.messages.errors import SettingError

pytestmark = pytest.mark.usefixtures("no_settings")
NOBODY = "postgresql://me:secret@127.0.0.1:1/nowhere"


def test_settings_of_a_component_stand_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGWAL_SLOT", "from_environment")
    monkeypatch.setenv("PGWAL_PUBLICATION", "from_environment")
    monkeypatch.setenv("SHOP_DSN", NOBODY)
    settings = settings_for({"slot": "of_component", "lag_threshold": "1kB"}, "SHOP_DSN")
    assert (settings.slot, settings.publication, settings.lag_threshold, settings.dsn) == ("of_component", "from_environment", 1024, NOBODY)
    assert settings_without_source({}).source_dsn is None


def test_what_a_component_may_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="dsn_variable"):
        settings_for({"source_dsn": NOBODY})
    with pytest.raises(SettingError, match="PGWAL_SLOTS takes no value"):
        settings_for({"slots": "a"})
    monkeypatch.setenv("PGDATABASE", "somewhere_else")
    with pytest.raises(SettingError, match="SHOP_DSN is not set"):
        settings_for({}, "SHOP_DSN")

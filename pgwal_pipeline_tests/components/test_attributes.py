from typing import Any

import dagster as dg
import pytest
from jsonschema import Draft202012Validator

from pgwal_pipeline.components.attributes import MEANINGS, given_settings, shown_default
from pgwal_pipeline.components.cdc import PostgresCdcComponent
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.translator import PgwalTranslator
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import Options, parse_options
from pgwal_pipeline_tests.project.guides import names, read, tables

pytestmark = pytest.mark.usefixtures("no_settings")
SCHEMA = PostgresCdcComponent.model().model_json_schema()
FITTING: dict[str, Any] = {
    "source_dsn": "{{ env.SHOP_DSN }}",
    "lag_threshold": "1GB",
    "window_size": 2 << 20,
    "max_staleness": 0.5,
    "busy_timeout": "10 min",
    "catchup_slots": "{{ env.SLOTS }}",
    "snapshot_workers": 64,
    "on_slot_loss": "resnapshot",
    "on_rewrite": "{{ env('ON_REWRITE', 'ignore') }}",
    "slot": "a_1",
    "spark_remote": "sc://host:15002",
    "spark_conf": {"spark.driver.memory": "4g"},
    "tables": {"shop.*": {"exclude": ["ssn"]}},
    "table_options": {"shop.*": {"mask": {"phone": "last4"}}},
    "hash_key": "{{ env.HASH_KEY }}",
    "spark_catalog": "spark_catalog.lake_{schema}",
}
WRONG: dict[str, Any] = {
    "lag_threshold": "16 potatoes",
    "window_size": 1,
    "max_staleness": "1 fortnight",
    "busy_timeout": -1,
    "catchup_slots": 65,
    "snapshot_workers": "many",
    "snapshot_chunk_rows": 1.5,
    "on_slot_loss": "go_on",
    "slot": "A-1",
    "spark_remote": "http://host",
    "spark_conf": 1,
    "spark_catalog": "a.b.c",
    "tables": ["a.b"],
    "slots": "a",
}


def test_the_schema_says_of_each_setting_what_it_means_and_its_default() -> None:
    assert MEANINGS.keys() == Settings.model_fields.keys()
    for name in Settings.model_fields:
        told = SCHEMA["properties"][name]
        assert told["description"].startswith(MEANINGS[name])
        assert f"PGWAL_{name.upper()} of the environment" in told["description"]
        assert told.get("default") == shown_default(name)
    defaults = {f"PGWAL_{name.upper()}": str(value) for name in Settings.model_fields if (value := shown_default(name)) is not None}
    assert Settings.from_environment(defaults) == Settings(lake="./lake")
    told = {names(row[0])[0]: names(row[1])[0] for row in tables(read("docs/settings.md"))[0].rows if names(row[1])}
    assert defaults == {name: default for name, default in told.items() if name.startswith("PGWAL_")}
    assert all(SCHEMA["properties"][name].get("description") for name in ("name", "key_prefix", "owners", "translation", "translator"))


@pytest.mark.parametrize("name", FITTING)
def test_the_schema_takes_what_fits(name: str) -> None:
    Draft202012Validator(SCHEMA).validate({name: FITTING[name]})


@pytest.mark.parametrize("name", WRONG)
def test_the_schema_finds_what_does_not_fit(name: str) -> None:
    (error,) = Draft202012Validator(SCHEMA).iter_errors({name: WRONG[name]})
    assert name in (error.path or [*error.message.split("'")])


def component(**attributes: Any) -> PostgresCdcComponent:
    """The component as YAML with these attributes makes it."""
    return PostgresCdcComponent.from_attributes_dict(attributes=attributes)


def test_attributes_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGWAL_PUBLICATION", "of_environment")
    monkeypatch.setenv("PGWAL_SLOT", "of_environment")
    monkeypatch.setenv("SHOP_DSN", "postgresql://me:secret@host/shop")
    monkeypatch.setenv("SLOTS", "3")
    monkeypatch.setenv("NUMBER", "123")
    monkeypatch.delenv("PGWAL_SPARK_IDLE", raising=False)
    made = component(**FITTING | {"slot": "{{ env.NUMBER }}", "tables": "shop.*"})
    found = made._settings.whole()
    assert found == Settings(
        source_dsn="postgresql://me:secret@host/shop",  # pyright: ignore[reportArgumentType]
        lake=found.lake,
        publication="of_environment",
        slot="123",
        tables="shop.*",
        lag_threshold=1 << 30,
        window_size=2 << 20,
        max_staleness=0.5,
        busy_timeout=600,
        catchup_slots=3,
        snapshot_workers=64,
        on_slot_loss="resnapshot",
        on_rewrite="ignore",
        spark_remote="sc://host:15002",
        spark_conf={"spark.driver.memory": "4g"},
        spark_catalog="spark_catalog.lake_{schema}",
    )
    assert found.catch_up_asked_for
    assert not component(slot="a")._settings.whole().catch_up_asked_for
    assert "secret" not in repr(made)


def test_python_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DSN", "postgresql://me:secret@host/shop")
    made = PostgresCdcComponent(source_dsn=dg.EnvVar("SHOP_DSN"), max_staleness=5, lag_threshold="1GB", spark_conf={"a": "b"})
    assert (
        made._settings == component(source_dsn="{{ env.SHOP_DSN }}", max_staleness=5, lag_threshold="1GB", spark_conf={"a": "b"})._settings
    )


def test_a_wrong_value_is_refused_with_the_settings_own_sentence() -> None:
    with pytest.raises(SettingError, match="PGWAL_LAG_THRESHOLD is '16 potatoes', but it takes a size such as 16MB"):
        component(lag_threshold="16 potatoes")._settings.without_source()
    with pytest.raises(SettingError, match="name is 'a-b', but it takes letters"):
        _ = component(name="a-b")._settings


def test_a_translator_may_be_a_template_variable() -> None:
    ours = PgwalTranslator()
    made = PostgresCdcComponent.resolve_from_yaml("translator: '{{ ours }}'", scope={"ours": ours})
    assert made.translator is ours


def test_a_template_that_gives_nothing_is_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    monkeypatch.setenv("PGWAL_SOURCE_DSN", "postgresql://host/another")
    with pytest.raises(SettingError, match=r"NOT_THERE is not set; lake takes folder or s3://bucket/prefix"):
        _ = component(lake="{{ env.NOT_THERE }}")._settings
    for made in (component(source_dsn="{{ env.NOT_THERE }}"), PostgresCdcComponent(source_dsn=dg.EnvVar("NOT_THERE"))):
        assert made._settings.without_source().slot == "pgwal"
        with pytest.raises(SettingError, match="NOT_THERE is not set; it takes the source's libpq string"):
            made._settings.whole()


@pytest.mark.parametrize("name", ["tables", "table_options"])
def test_options_of_tables(name: str) -> None:
    given = given_settings({name: {"shop.*": {"exclude": ["ssn"], "hash": ["email"]}}, "hash_key": "k"}).without_source()
    assert given.table_options.of(TableName("shop", "x")) == Options(("ssn",), ("email",))
    assert given.tables == "*.*"
    assert given_settings({"tables": "shop.*"}).without_source().tables == "shop.*"
    with pytest.raises(SettingError, match=r"PGWAL_TABLE_OPTIONS gives a\.b the option 'excluded'"):
        given_settings({name: {"a.b": {"excluded": []}}}).without_source()

"""Read the settings of a source from the environment, with a component's own over them."""

import os
from collections.abc import Mapping

from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.settings import PREFIX, Settings

DSN_VARIABLE = "PGWAL_SOURCE_DSN"


def settings_for(overrides: Mapping[str, str], dsn_variable: str = DSN_VARIABLE) -> Settings:
    """Read the settings from the environment, with `overrides` (by setting, such as `slot`) and the DSN from `dsn_variable`.

    The DSN cannot be an override, because the UI shows what is in definitions. Raises SettingError, also if a `dsn_variable` other than the
    default is not set: falling back on PGWAL_SOURCE_DSN would read the wrong source.
    """
    environment = dict(os.environ)
    if dsn_variable != DSN_VARIABLE:
        if not environment.get(dsn_variable):
            raise SettingError(
                f"{dsn_variable} is not set; it takes the source's libpq string or URI, such as postgresql://user@host/database."
            )
        environment[DSN_VARIABLE] = environment[dsn_variable]
    return Settings.from_environment(environment | _as_variables(overrides))


def settings_without_source(overrides: Mapping[str, str]) -> Settings:
    """Read the settings as `settings_for` does, but without a DSN: definitions also load without a source. Raises SettingError."""
    environment = {name: value for name, value in os.environ.items() if name != DSN_VARIABLE}
    return Settings.from_environment(environment | _as_variables(overrides))


def _as_variables(overrides: Mapping[str, str]) -> dict[str, str]:
    for name in overrides:
        if name == "source_dsn":
            raise SettingError(
                "The DSN must not be in defs.yaml, where the UI shows it: set dsn_variable to the name of the variable that holds it."
            )
        if name not in Settings.model_fields:
            raise SettingError(f"{PREFIX}{name.upper()} takes no value: there is no such setting.")
    return {PREFIX + name.upper(): value for name, value in overrides.items()}

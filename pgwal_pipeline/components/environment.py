"""The settings of one source: those of the environment, with what its component was given over them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.settings import Settings

DSN_VARIABLE = "PGWAL_SOURCE_DSN"


@dataclass(frozen=True)
class SourceSettings:
    """The settings of one source: `given` to its component, as `PGWAL_*` variables, over those of the environment.

    `unset` are the variables from which its DSN was to come, if they have none. They may hold secrets, so no configuration of a resource
    holds them, which the UI would show: each process that loads the definitions makes them again.
    """

    given: Mapping[str, str] = field(default_factory=dict, repr=False)
    unset: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment with what was given. Raises SettingError if the component names variables for the DSN that are not set.

        Falling back on PGWAL_SOURCE_DSN would then read the wrong source.
        """
        if self.unset:
            raise SettingError(
                f"{' and '.join(self.unset)} is not set; it takes the source's libpq string or URI, such as "
                "postgresql://user@host/database."
            )
        return {**os.environ, **self.given}

    def whole(self) -> Settings:
        """Return the settings. Raises SettingError, also as `environment` does."""
        return Settings.from_environment(self.environment())

    def without_source(self) -> Settings:
        """Return the settings without a DSN: definitions also load without a source. Raises SettingError."""
        dsn = (DSN_VARIABLE, f"{DSN_VARIABLE}_FILE")
        return Settings.from_environment({name: value for name, value in (os.environ | self.given).items() if name not in dsn})

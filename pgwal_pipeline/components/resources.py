"""The two resources of runs, sensors and schedules: the slot with its source, and Spark."""

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import Field

from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.settings import PREFIX, Settings, value_of
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgwal_pipeline.pipeline.reports import DrainReport, LagReading

DSN_VARIABLE = "PGWAL_SOURCE_DSN"


def settings_for(overrides: Mapping[str, str], dsn_variable: str = DSN_VARIABLE) -> Settings:
    """Read the settings from the environment, with `overrides` (by setting, such as `slot`) and the DSN from `dsn_variable`.

    The DSN cannot be an override, because the UI shows what is in definitions. Raises SettingError, also if a `dsn_variable` other than the
    default is not set: falling back on PGWAL_SOURCE_DSN would read the wrong source.
    """
    environment = dict(os.environ)
    if dsn_variable != DSN_VARIABLE:
        dsn = value_of(dsn_variable, environment)
        if not dsn:
            raise SettingError(
                f"{dsn_variable} is not set; it takes the source's libpq string or URI, such as postgresql://user@host/database."
            )
        environment[DSN_VARIABLE] = dsn
    return Settings.from_environment(environment | _as_variables(overrides))


def settings_without_source(overrides: Mapping[str, str]) -> Settings:
    """Read the settings as `settings_for` does, but without a DSN: definitions also load without a source. Raises SettingError."""
    environment = {name: value for name, value in os.environ.items() if name not in (DSN_VARIABLE, f"{DSN_VARIABLE}_FILE")}
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


class ReplicationSlot(dg.ConfigurableResource):
    """The slot and the publication on the source. Dagster code reads and changes them only through this resource."""

    dsn_variable: str = Field(DSN_VARIABLE, description="The environment variable that holds the source's DSN.")
    overrides: dict[str, str] = Field(default={}, description="Settings that override the environment's, such as {'slot': 'shop'}.")

    @property
    def settings(self) -> Settings:
        """The settings of this source. Raises SettingError naming the variable that is wrong or missing."""
        return settings_for(self.overrides, self.dsn_variable)

    def lag(self) -> "LagReading":
        """Return how far the slot is behind. Cheap: nothing is decoded. Raises SourceUnavailable while the source is away."""
        from pgwal_pipeline.pipeline.status import lag

        return lag(self.settings)

    def flushed(self) -> int:
        """Return the LSN that a drain started now should reach: the source's flush LSN, on a standby its replay LSN."""
        from pgwal_pipeline.pipeline.drain import next_target

        return next_target(self.settings)

    def drain(self, end_lsn: int, progress: Progress) -> "DrainReport":
        """Create a missing slot or publication, then read every commit below `end_lsn` into raw and confirm the slot."""
        from pgwal_pipeline.pipeline.drain import drain

        return drain(self.settings, end_lsn=end_lsn, progress=progress)

    def needs_snapshot(self) -> tuple[TableName, ...]:
        """Return the tables of the publication that are not read whole yet."""
        from pgwal_pipeline.pipeline.snapshot import needed

        return needed(self.settings)

    def none_joined(self) -> bool:
        """Return whether no table is known yet, as before the first drain."""
        from pgwal_pipeline.pipeline.snapshot import none_joined

        return none_joined(self.settings)

    def blocked(self, tables: Collection[TableName]) -> Mapping[TableName, str]:
        """Return those of `tables` that cannot be read yet because older transactions are open, with a sentence naming these."""
        from pgwal_pipeline.pipeline.snapshot import blocked

        return blocked(self.settings, tables)


class LakeSpark(LazyPySparkResource):
    """The Spark session for the lake, with Delta, the lake's storage and PGWAL_SPARK_* set up. Made at its first use, once a process."""

    spark_config: dict[str, Any] = Field(default={}, description="Further Spark settings; they override PGWAL_SPARK_CONF.")
    overrides: dict[str, str] = Field(
        default={}, description="Settings that override the environment's, such as {'spark_master': 'local[2]'}."
    )

    def start(self) -> None:
        """Start the warm engine without waiting for it, where sessions are in one. It gets ready beside other work."""
        from pgwal_pipeline.spark.session import start_engine

        if self._spark_session is None:
            start_engine(self._settings())

    def session(self, say: Callable[[str], None] = lambda _: None) -> "SparkSession":
        """Return the session; start it if need be. `say` gets a line when that takes long, as when jars are first downloaded."""
        if self._spark_session is None:
            from pgwal_pipeline.spark.session import spark_session

            self._spark_session = spark_session(self._settings(), say=say)
        return self._spark_session

    def _settings(self) -> Settings:
        settings = settings_without_source(self.overrides)
        more = {name: str(value) for name, value in self.spark_config.items()}
        return settings.model_copy(update={"spark_conf": settings.spark_conf | more})

    def _init_session(self) -> None:
        self.session()

"""The resources of runs, sensors and schedules: the slot with its source, and Spark."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import Field, PrivateAttr

from pgwal_pipeline.components.environment import SourceSettings
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgwal_pipeline.pipeline.reports import DrainReport, LagReading


@dataclass(frozen=True)
class ReplicationSlot:
    """The slot and the publication on the source. Dagster code reads and changes them only through this resource."""

    source: SourceSettings = field(default_factory=SourceSettings)

    @property
    def settings(self) -> Settings:
        """The settings of this source. Raises SettingError naming the variable that is wrong or missing."""
        return self.source.whole()

    def present(self, runs: Collection[str]) -> set[str]:
        """Return those of `runs`, by their ids, that show themselves in the source now. Raises SourceUnavailable."""
        from pgwal_pipeline.postgres.presence import present

        return present(self.settings.dsn, runs)

    def lag(self) -> "LagReading":
        """Return how far the slot is behind. Cheap: nothing is decoded. Raises SourceUnavailable while the source is away."""
        from pgwal_pipeline.pipeline.status import lag

        return lag(self.settings)

    def has_changes(self, since: str) -> bool:
        """Return whether the slot's short backlog may have a change of a followed table; `since` is a snapshot from before it."""
        from pgwal_pipeline.pipeline.status import has_changes

        return has_changes(self.settings, since)

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
    _source: SourceSettings = PrivateAttr(default_factory=SourceSettings)

    @classmethod
    def of_source(cls, source: SourceSettings) -> Self:
        """Return the resource with the settings of `source`."""
        made = cls()
        made._source = source
        return made

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
        settings = self._source.without_source()
        more = {name: str(value) for name, value in self.spark_config.items()}
        return settings.model_copy(update={"spark_conf": settings.spark_conf | more})

    def _init_session(self) -> None:
        self.session()


def resource_with(description: str, make: Callable[[], Any]) -> dg.ResourceDefinition:
    """Return the definition of a resource that `make` makes in each run and tick. The UI shows the description alone."""
    return dg.ResourceDefinition(lambda _: make(), description=description)


def slot_resource(source: SourceSettings) -> dg.ResourceDefinition:
    """Return the definition of the ReplicationSlot. A run shows itself in the source for as long as it has one; see `processes`."""

    @contextmanager
    def made(context: dg.InitResourceContext) -> Iterator[ReplicationSlot]:
        from pgwal_pipeline.postgres.presence import shown

        slot = ReplicationSlot(source)
        with ExitStack() as stack:
            if context.run is not None:
                with suppress(PgwalError):  # without a source there is nothing to guard
                    stack.enter_context(shown(slot.settings.dsn, context.run.run_id))
            yield slot

    return dg.ResourceDefinition(made, description="The replication slot and the publication.")

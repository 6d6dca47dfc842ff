"""The component: builds everything that Dagster shows and runs for one Postgres source from one Settings object."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import dagster as dg
from dagster.components import DefsStateConfig, DefsStateConfigArgs

from pgwal_pipeline import known_tables
from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.components.checks import build_health_check
from pgwal_pipeline.components.dagster_internals import loading, state_is_missing
from pgwal_pipeline.components.jobs import Steps, build_jobs
from pgwal_pipeline.components.observations import build_source_assets
from pgwal_pipeline.components.published import PublishedLake
from pgwal_pipeline.components.resources import DSN_VARIABLE, LakeSpark, ReplicationSlot, settings_for, settings_without_source
from pgwal_pipeline.components.sensors import build_lag_sensor, build_new_table_sensor, build_schedules
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.components.upkeep import build_maintenance_sensor
from pgwal_pipeline.known_tables import KnownTable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.settings import Settings

_log = logging.getLogger("dagster.pgwal_pipeline")


@dataclass
class PostgresCdcComponent(dg.StateBackedComponent, dg.Resolvable):
    """Change data capture from one Postgres database into one lake.

    Its settings are the `PGWAL_*` variables, overridden by `settings`. One code location may hold several sources: give each further one
    its own `name`, `key_prefix` and `dsn_variable`, and settings for at least `lake`, or for `slot` and `publication`.

    The list of tables is the component's state. The code server asks the source for it at each load, for five seconds at most, and passes
    it to the processes it starts: a run has exactly the definitions it was requested with, and does not ask again. The list is also kept
    under DAGSTER_HOME and read from there while the source is down. Without either, the location loads without tables and its jobs still
    work. Dagster's other ways to keep state do not fit: `LOCAL_FILESYSTEM` writes into the package's folder, and
    `VERSIONED_STATE_STORAGE` needs a configured storage. `LEGACY_CODE_SERVER_SNAPSHOTS`, despite its name, does what is described here.
    """

    name: str = ""
    key_prefix: Sequence[str] = ()
    dsn_variable: str = DSN_VARIABLE
    settings: Mapping[str, str] = field(default_factory=dict)
    owners: Sequence[str] = ()

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """How Dagster passes the list of tables from the code server to its runs."""
        return DefsStateConfig.from_args(DefsStateConfigArgs.legacy_code_server_snapshots(), default_key=f"PostgresCdc[{self.name}]")

    def write_state_to_path(self, state_path: Path) -> None:
        """Write the list of tables as the source has it now, or as it was when the source was last reached."""
        state_path.write_text(known_tables.dump(self._tables()), encoding="utf-8")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the definitions. A process that was given no state (a plain import, a test) takes the remembered list of tables."""
        with loading():
            if state_is_missing(self.defs_state_config.key):
                return self._definitions(self._remembered())
            return super().build_defs(context)

    def build_defs_from_state(self, context: dg.ComponentLoadContext, state_path: Path | None) -> dg.Definitions:  # noqa: ARG002
        """Build the definitions for the tables listed in the state file."""
        return self._definitions(() if state_path is None else known_tables.load(state_path.read_text(encoding="utf-8")))

    def _tables(self) -> tuple[KnownTable, ...]:
        try:
            return known_tables.refresh(settings_for(self.settings, self.dsn_variable))
        except PgwalError as error:
            tables = self._remembered()
            known = f"{len(tables)} tables are known from last time" if tables else "no table is known yet"
            _log.warning("%s Until then %s.", error, known)
            return tables

    def _remembered(self) -> tuple[KnownTable, ...]:
        try:
            return known_tables.remembered(settings_for(self.settings, self.dsn_variable))
        except PgwalError:
            return ()

    def jobs(self) -> dg.Definitions:
        """Build the jobs alone, for a process that only runs them: with many tables the assets take longer to build than a run."""
        source = self._source(self._remembered())
        return dg.Definitions(jobs=build_jobs(source, Steps.of(source)).all(), resources=self._resources(source))

    def _source(self, tables: tuple[KnownTable, ...]) -> CdcSource:
        settings = settings_without_source(self.settings)
        specs = AssetSpecs(
            AssetNames(settings.slot, tuple(self.key_prefix)), Lake(settings.lake), tuple(self.owners), _slot_fails_after(settings)
        )
        return CdcSource(self.name, settings, specs, tables)

    def _resources(self, source: CdcSource) -> dict[str, dg.ConfigurableResource]:
        return {
            source.slot_key: ReplicationSlot(dsn_variable=self.dsn_variable, overrides=dict(self.settings)),
            source.spark_key: LakeSpark(overrides=dict(self.settings)),
            source.lake_key: PublishedLake(lake=self.settings.get("lake")),
        }

    def _definitions(self, tables: tuple[KnownTable, ...]) -> dg.Definitions:
        source = self._source(tables)
        steps = Steps.of(source)
        jobs, graph = build_jobs(source, steps), steps.in_graph()
        return dg.Definitions(
            assets=[
                source.assets.slot(source.settings.publication),
                *([build_source_assets(source)] if tables else []),
                *(step for step in graph if not isinstance(step, dg.AssetChecksDefinition)),
            ],
            asset_checks=[build_health_check(source), *(step for step in graph if isinstance(step, dg.AssetChecksDefinition))],
            jobs=jobs.all(),
            sensors=[build_lag_sensor(source, jobs), build_new_table_sensor(source, jobs), build_maintenance_sensor(source, jobs)],
            schedules=build_schedules(source, jobs),
            resources=self._resources(source),
        )


def _slot_fails_after(settings: Settings) -> timedelta:
    return timedelta(seconds=max(1800.0, 10 * settings.max_staleness))

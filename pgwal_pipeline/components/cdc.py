"""The component: everything that Dagster shows and runs for one Postgres source, made from one Settings object."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import dagster as dg
from dagster.components import DefsStateConfig, DefsStateConfigArgs

from pgwal_pipeline import known_tables
from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.components.dagster_internals import loading, state_is_missing
from pgwal_pipeline.components.jobs import build_jobs
from pgwal_pipeline.components.resources import DSN_VARIABLE, LakeSpark, ReplicationSlot, settings_for, settings_without_source
from pgwal_pipeline.components.sensors import build_lag_sensor, build_new_table_sensor, build_schedules
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.errors import PgwalError
from pgwal_pipeline.known_tables import KnownTable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.settings import Settings

_log = logging.getLogger("dagster.pgwal_pipeline")


@dataclass
class PostgresCdcComponent(dg.StateBackedComponent, dg.Resolvable):
    """Change data capture from one Postgres database into one lake.

    Everything comes from the `PGWAL_*` environment, with `settings` over it, so that several sources can stand side by side: give each of
    the others a `name`, a `key_prefix`, a `dsn_variable` of its own, and settings for at least `lake`, or `slot` and `publication`.

    Which tables there are is state. The code server asks the source for it each time it loads, waiting five seconds at most, and hands
    the answer to the processes that it starts, so that a run has the very definitions it was asked for with and does not ask again. The
    answer is also kept under DAGSTER_HOME, and taken from there while the source is down; with neither the location loads without tables,
    and its jobs work all the same. Dagster's own places for state will not do: `LOCAL_FILESYSTEM` writes into the package's folder, and
    `VERSIONED_STATE_STORAGE` wants a storage configured. `LEGACY_CODE_SERVER_SNAPSHOTS`, in spite of its name, is this very way.
    """

    name: str = ""
    key_prefix: Sequence[str] = ()
    dsn_variable: str = DSN_VARIABLE
    settings: Mapping[str, str] = field(default_factory=dict)
    owners: Sequence[str] = ()

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """How Dagster carries the tables from the code server to its runs."""
        return DefsStateConfig.from_args(DefsStateConfigArgs.legacy_code_server_snapshots(), default_key=f"PostgresCdc[{self.name}]")

    def write_state_to_path(self, state_path: Path) -> None:
        """Write the tables as the source has them now, or as they were when it was last reached."""
        state_path.write_text(known_tables.dump(self._tables()), encoding="utf-8")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The definitions; in a process that nobody gave the tables to (a plain import, a test) they are looked up here."""
        with loading():
            if state_is_missing(self.defs_state_config.key):
                return self._definitions(self._remembered())
            return super().build_defs(context)

    def build_defs_from_state(self, context: dg.ComponentLoadContext, state_path: Path | None) -> dg.Definitions:  # noqa: ARG002
        """The definitions for the tables of the state."""
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

    def _definitions(self, tables: tuple[KnownTable, ...]) -> dg.Definitions:
        settings = settings_without_source(self.settings)
        specs = AssetSpecs(
            AssetNames(settings.slot, tuple(self.key_prefix)), Lake(settings.lake), tuple(self.owners), _slot_fails_after(settings)
        )
        source = CdcSource(self.name, settings, specs, tables)
        jobs, assets = build_jobs(source)
        return dg.Definitions(
            assets=[
                specs.slot(settings.publication),
                *(specs.source(known) for known in tables),
                *(step for step in assets if not isinstance(step, dg.AssetChecksDefinition)),
            ],
            asset_checks=[step for step in assets if isinstance(step, dg.AssetChecksDefinition)],
            jobs=jobs.all(),
            sensors=[build_lag_sensor(source, jobs), build_new_table_sensor(source, jobs)],
            schedules=build_schedules(source, jobs),
            resources={
                source.slot_key: ReplicationSlot(dsn_variable=self.dsn_variable, overrides=dict(self.settings)),
                source.spark_key: LakeSpark(overrides=dict(self.settings)),
            },
        )


def _slot_fails_after(settings: Settings) -> timedelta:
    return timedelta(seconds=max(1800.0, 10 * settings.max_staleness))

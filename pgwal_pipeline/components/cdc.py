"""The component: builds everything that Dagster shows and runs for one Postgres source from one Settings object."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from dagster.components import DefsStateConfig, DefsStateConfigArgs

from pgwal_pipeline import known_tables
from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs, Layer
from pgwal_pipeline.components.attributes import SettingAttributes, given_settings
from pgwal_pipeline.components.checks import build_health_check
from pgwal_pipeline.components.dagster_internals import (
    TranslationFn,
    TranslationFnResolver,
    build_outside_a_project,
    loading,
    state_is_missing,
)
from pgwal_pipeline.components.environment import SourceSettings
from pgwal_pipeline.components.jobs import Steps, build_jobs
from pgwal_pipeline.components.observations import build_source_assets
from pgwal_pipeline.components.published import PublishedLake
from pgwal_pipeline.components.resources import LakeSpark, resource_with, slot_resource
from pgwal_pipeline.components.scaffolder import CdcScaffolder
from pgwal_pipeline.components.sensors import build_lag_sensor, build_new_table_sensor, build_schedules
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.components.upkeep import build_maintenance_sensor
from pgwal_pipeline.known_tables import KnownTable
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.errors import PgwalError, SettingError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.translator import CdcTable, PgwalTranslator, refuse_shared_keys, translated
from pgwal_pipeline.values.catalog_name import CatalogPattern

_log = logging.getLogger("dagster.pgwal_pipeline")

_NAME = "The source's name, for several in one code location: part of the names of its jobs, sensors, resources and partitions."
_KEY_PREFIX = "The prefix of the keys of its assets. Left out, it is the name."
_OWNERS = "Owners of its assets: e-mail addresses, or teams such as team:data."
_TRANSLATION = (
    "What is different of its tables' assets: key, group_name, tags, owners, description, metadata, automation_condition and more. "
    "Templates have `layer` (source, raw, snapshot, current or history), `table` (with schema, name, key, columns and comment) and `spec`."
)

_TRANSLATOR = "A PgwalTranslator, for what templates cannot say: a template variable, such as '{{ our_translator }}'."


def _template_variables(translated: tuple[Layer, CdcTable]) -> Mapping[str, Any]:
    layer, table = translated
    return {"layer": layer, "table": table}


_Translation = Annotated[TranslationFn[tuple[Layer, CdcTable]], TranslationFnResolver(_template_variables)]


@dg.scaffold_with(CdcScaffolder)
@dataclass
class PostgresCdcComponent(SettingAttributes, dg.StateBackedComponent, dg.Resolvable):
    """Change data capture from one Postgres database into one lake.

    Each setting is an attribute; those that are left out are the `PGWAL_*` variables of the environment. One code location may hold several
    sources: give each a `name` and its own `source_dsn` and `lake`, and on one database also its own `slot` and `publication`.

    The list of tables is the component's state. The code server asks the source for it at each load, for five seconds at most, and passes
    it to the processes it starts: a run has exactly the definitions it was requested with, and does not ask again. The list is also kept
    under DAGSTER_HOME and read from there while the source is down. Without either, the location loads without tables and its jobs still
    work. Dagster's other ways to keep state do not fit: `LOCAL_FILESYSTEM` writes into the package's folder, and
    `VERSIONED_STATE_STORAGE` needs a configured storage. `LEGACY_CODE_SERVER_SNAPSHOTS`, despite its name, does what is described here.
    """

    name: Annotated[str, dg.Resolver.default(description=_NAME)] = ""
    key_prefix: Annotated[Sequence[str] | None, dg.Resolver.default(description=_KEY_PREFIX)] = None
    owners: Annotated[Sequence[str], dg.Resolver.default(description=_OWNERS)] = ()
    translation: Annotated[_Translation | None, dg.Resolver.default(description=_TRANSLATION)] = None
    translator: Annotated[PgwalTranslator | None, dg.Resolver.default(model_field_type=str, description=_TRANSLATOR)] = None

    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        """Return the spec of the table's asset in a layer; a subclass may override it, as a PgwalTranslator does."""
        spec = table.default_spec(layer) if self.translator is None else self.translator.get_asset_spec(layer, table)
        return spec if self.translation is None else self.translation(spec, (layer, table))

    @property
    def defs_state_config(self) -> DefsStateConfig:
        """How Dagster passes the list of tables from the code server to its runs."""
        return DefsStateConfig.from_args(DefsStateConfigArgs.legacy_code_server_snapshots(), default_key=f"PostgresCdc[{self.name}]")

    def write_state_to_path(self, state_path: Path) -> None:
        """Write the list of tables as the source has it now, or as it was when the source was last reached."""
        state_path.write_text(known_tables.dump(self._tables()), encoding="utf-8")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the definitions. A process that was given no state (a plain import, a test) takes the remembered list of tables.

        Raises SettingError for a wrong attribute or variable, but not for a source that is away or not named.
        """
        if _collect(self):
            with suppress(SettingError):  # what is wrong with one is no matter of the others
                return self.jobs()
            return dg.Definitions()
        self._settings.without_source()
        with loading():
            if state_is_missing(self.defs_state_config.key):
                return self._definitions(self._remembered())
            return super().build_defs(context)

    def build_defs_from_state(self, context: dg.ComponentLoadContext, state_path: Path | None) -> dg.Definitions:  # noqa: ARG002
        """Build the definitions for the tables listed in the state file."""
        return self._definitions(() if state_path is None else known_tables.load(state_path.read_text(encoding="utf-8")))

    def jobs(self) -> dg.Definitions:
        """Build the jobs alone, for a process that only runs them: with many tables the assets take longer to build than a run."""
        source = self._source(self._remembered())
        return dg.Definitions(jobs=build_jobs(source, Steps.of(source)).all(), resources=self._resources(source))

    def names(self) -> AssetNames:
        """Return the names of its tables' assets. Raises SettingError as `given` does."""
        return self._source(self._remembered()).names

    def given(self) -> SourceSettings:
        """Return its settings: what it was given, over the environment. Raises SettingError for a wrong name or attribute."""
        return self._settings

    @cached_property
    def _settings(self) -> SourceSettings:
        if not re.fullmatch(r"\w*", self.name, re.ASCII):
            raise SettingError(f"name is {self.name!r}, but it takes letters, digits and underscores: names of jobs are made of it.")
        return given_settings({name: getattr(self, name) for name in Settings.model_fields})

    def _tables(self) -> tuple[KnownTable, ...]:
        try:
            return known_tables.refresh(self._settings.whole())
        except PgwalError as error:
            tables = self._remembered()
            known = f"{len(tables)} tables are known from last time" if tables else "no table is known yet"
            _log.warning("%s Until then %s.", error, known)
            return tables

    def _remembered(self) -> tuple[KnownTable, ...]:
        try:
            return known_tables.remembered(self._settings.whole())
        except PgwalError:
            return ()

    def _source(self, tables: tuple[KnownTable, ...]) -> CdcSource:
        settings = self._settings.without_source()
        prefix = tuple(self.key_prefix) if self.key_prefix is not None else (self.name,) if self.name else ()
        catalog = None if settings.spark_catalog is None else CatalogPattern.parse(settings.spark_catalog)
        names, owners = AssetNames(settings.slot, prefix), tuple(self.owners)
        specs = AssetSpecs(names, Lake(settings.lake), owners, _slot_fails_after(settings), catalog, settings.table_options)
        if self._translates:
            specs = translated(specs, _OfComponent(self), tables)
        return CdcSource(self.name, settings, specs, tables)

    @property
    def _translates(self) -> bool:
        own = type(self).get_asset_spec is not PostgresCdcComponent.get_asset_spec  # a subclass's
        return own or self.translation is not None or self.translator is not None

    def _resources(self, source: CdcSource) -> Mapping[str, dg.ResourceDefinition]:
        settings = self._settings
        return {
            source.slot_key: slot_resource(settings),
            source.spark_key: resource_with("The Spark session for the lake.", lambda: LakeSpark.of_source(settings)),
            source.lake_key: resource_with("The published tables of the lake.", lambda: PublishedLake.of_source(settings)),
        }

    def _definitions(self, tables: tuple[KnownTable, ...]) -> dg.Definitions:
        source = self._source(tables)
        if self._translates:
            refuse_shared_keys(source.assets, tables)
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


_collecting: ContextVar[list[PostgresCdcComponent] | None] = ContextVar("_collecting", default=None)


@contextmanager
def collected() -> Iterator[list[PostgresCdcComponent]]:
    """Give the list of the components that definitions are built of meanwhile. They build no assets then, which commands do not need."""
    found: list[PostgresCdcComponent] = []
    token = _collecting.set(found)
    try:
        yield found
    finally:
        _collecting.reset(token)


def _collect(component: PostgresCdcComponent) -> bool:
    found = _collecting.get()
    if found is not None:
        found.append(component)
    return found is not None


class _OfComponent(PgwalTranslator):
    """The translator that a component is: its subclass's, its YAML's or the one that it was given."""

    def __init__(self, component: PostgresCdcComponent) -> None:
        self._component = component

    def get_asset_spec(self, layer: Layer, table: CdcTable) -> dg.AssetSpec:
        return self._component.get_asset_spec(layer, table)


def build_cdc_definitions(
    *,
    name: str = "",
    key_prefix: Sequence[str] | None = None,
    owners: Sequence[str] = (),
    translator: PgwalTranslator | None = None,
    **settings: Any,
) -> dg.Definitions:
    """Return the definitions of one source, as the component has them: for code locations that are written in Python.

    `settings` are settings by their names, such as `slot="shop"`; a `dg.EnvVar` is read from the environment. Those left out are the
    environment's. Raises SettingError for a name or a value that does not fit.
    """
    for setting in settings:
        if setting not in Settings.model_fields:
            raise SettingError(f"PGWAL_{setting.upper()} takes no value: there is no such setting.")
    component = PostgresCdcComponent(name=name, key_prefix=key_prefix, owners=owners, translator=translator, **settings)
    return build_outside_a_project(component)


def _slot_fails_after(settings: Settings) -> timedelta:
    return timedelta(seconds=max(1800.0, 10 * settings.max_staleness))

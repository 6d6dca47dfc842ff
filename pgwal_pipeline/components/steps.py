"""The steps that runs are made of, each written once: a function of the run's context that does the work and yields what it made.

Dagster shows a step as the assets that it makes, or the checks that it makes good. While no table is known there are none of either, and
Dagster has no definition of no assets; yet the step has to run then too, for the first run is what finds the tables. So a step is an op as
long as no table is known: it does the same work, and logs what it made. `Step.definition` chooses the form; nothing else knows of the two.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from pgwal_pipeline.components.source import CdcSource, StepContext, op_safe, stand_ins
from pgwal_pipeline.relation import TableName

Result = dg.MaterializeResult | dg.AssetCheckResult

Work = Callable[[StepContext, tuple[TableName, ...] | None], Iterator[Result]]
"""A step's work, for some tables or, with None, for all of them. It may yield results of assets that the run did not select, too."""

_TABLES = "tables"


@dataclass(frozen=True)
class Step:
    """A step of `source`, called `name` after it. `resources` are the keys of what it needs.

    `assets` are made by it, one for each table; with `checks` alone it only checks. `partitions` are the assets' own. With `selectable` it
    may be run for some of the tables. `tables_config` describes a config field `tables`, names as schema.table, which chooses them by name;
    without it there is no config.
    """

    source: CdcSource
    name: str
    description: str
    resources: frozenset[str]
    work: Work
    assets: Sequence[dg.AssetSpec] = ()
    checks: Sequence[dg.AssetCheckSpec] = ()
    partitions: dg.PartitionsDefinition | None = None
    selectable: bool = True
    tables_config: str | None = None
    definition: dg.AssetsDefinition | dg.OpDefinition = field(init=False)

    def __post_init__(self) -> None:
        form = _op if not self.source.tables else _assets if self.assets else _checks
        object.__setattr__(self, "definition", form(self))

    @property
    def selection(self) -> dg.AssetSelection:
        """What of the asset graph the step makes: its assets, and only its own checks."""
        assert isinstance(self.definition, dg.AssetsDefinition)
        checks = dg.AssetSelection.checks(*self.definition.check_keys)
        return dg.AssetSelection.assets(*self.definition.keys).without_checks() | checks if self.assets else checks


def _op(step: Step) -> dg.OpDefinition:
    """The step as an op; another one may come before it."""

    @dg.op(
        name=step.source.named(step.name),
        description=step.description,
        required_resource_keys=set(step.resources),
        ins={"before": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
        config_schema=_config(step),
    )
    def work(context: dg.OpExecutionContext) -> None:
        for _ in _selected(context, step.work(context, _configured(context)), (), ()):
            raise AssertionError("nothing is selected")

    return work


def _assets(step: Step) -> dg.AssetsDefinition:
    specs, real_keys = op_safe(step.assets)
    given = {real: stand_in for stand_in, real in real_keys.items()}

    @dg.multi_asset(
        name=step.source.named(step.name),
        description=step.description,
        specs=specs,
        check_specs=[_safe(check, given) for check in step.checks],
        partitions_def=step.partitions,
        can_subset=step.selectable,
        required_resource_keys=set(step.resources),
        config_schema=_config(step),
    )
    def work(context: dg.AssetExecutionContext) -> Iterator[Result]:
        keys, checks = context.selected_asset_keys, context.selected_asset_check_keys
        tables = _configured(context) or _of_selection(step, [spec.key for spec in step.assets], keys)
        yield from _selected(context, step.work(context, tables), keys, checks)

    return work.with_attributes(asset_key_replacements=real_keys) if real_keys else work


def _checks(step: Step) -> dg.AssetsDefinition:
    given = stand_ins({key for check in step.checks for key in (check.asset_key, *(dep.asset_key for dep in check.additional_deps))})

    @dg.multi_asset_check(
        name=step.source.named(step.name),
        description=step.description,
        specs=[_safe(check, given) for check in step.checks],
        can_subset=step.selectable,
        required_resource_keys=set(step.resources),
        config_schema=_config(step),
    )
    def work(context: dg.AssetCheckExecutionContext) -> Iterator[Result]:
        checks = context.selected_asset_check_keys
        ran = context.op_execution_context
        tables = _configured(ran) or _of_selection(step, [check.key for check in step.checks], checks)
        yield from _selected(ran, step.work(ran, tables), (), checks)

    if not given:
        return work
    real_keys = {stand_in: key for key, stand_in in given.items()}
    return dg.AssetChecksDefinition(**work.with_attributes(asset_key_replacements=real_keys).get_attributes_dict())


def _safe(check: dg.AssetCheckSpec, given: Mapping[dg.AssetKey, dg.AssetKey]) -> dg.AssetCheckSpec:
    """The check on the stand-ins of its assets, see `stand_ins`."""
    deps = [dg.AssetDep(given.get(dep.asset_key, dep.asset_key)) for dep in check.additional_deps]
    return dg.AssetCheckSpec(
        check.name, asset=given.get(check.asset_key, check.asset_key), description=check.description, additional_deps=deps
    )


def _config(step: Step) -> dict[str, dg.Field] | None:
    """The step's config, if it has any."""
    if step.tables_config is None:
        return None
    return {_TABLES: dg.Field([str], default_value=[], is_required=False, description=step.tables_config)}


def _configured(context: StepContext) -> tuple[TableName, ...] | None:
    """The tables that the run's config names, None where it names none. Raises Failure for what is no table's name."""
    config: Any = context.op_execution_context.op_config if isinstance(context, dg.AssetExecutionContext) else context.op_config
    try:
        return tuple(TableName.parse(name) for name in (config or {}).get(_TABLES, ())) or None
    except ValueError as error:
        raise dg.Failure(f"{error}.", allow_retries=False) from None


def _of_selection(step: Step, keys: Sequence[object], selected: Collection[object]) -> tuple[TableName, ...] | None:
    """The tables whose keys (one each, in the tables' order) the run selects, None where that is all of them."""
    chosen = tuple(known.table for known, key in zip(step.source.tables, keys, strict=True) if key in selected)
    return None if len(chosen) == len(step.source.tables) else chosen


def _selected(
    context: StepContext, results: Iterator[Result], keys: Collection[dg.AssetKey], checks: Collection[dg.AssetCheckKey]
) -> Iterator[Result]:
    """What the run selects of the results, for Dagster to take; of the others the assets are logged."""
    for result in results:
        assert result.asset_key is not None
        if isinstance(result, dg.AssetCheckResult):
            assert result.check_name is not None
            if dg.AssetCheckKey(result.asset_key, result.check_name) in checks:
                yield result
        elif result.asset_key in keys:
            yield result
        else:
            context.log_event(dg.AssetMaterialization(result.asset_key, metadata=result.metadata))

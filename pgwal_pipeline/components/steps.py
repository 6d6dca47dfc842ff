"""The steps of runs, each written once: a function of the run's context that does the work and yields its results.

Dagster shows a step as the assets it materializes, or the checks it runs. While no table is known there are neither, and Dagster cannot
define a step with no assets. The step must still run then, because the first run is what finds the tables. So as long as no table is known
a step is an op, which does the same work and logs its results. `Step.definition` chooses the form; no other code knows that there are two.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from pgwal_pipeline.components.source import CdcSource, StepContext, op_safe, stand_ins
from pgwal_pipeline.values.relation import TableName

Result = dg.MaterializeResult | dg.AssetCheckResult

Work = Callable[[StepContext, tuple[TableName, ...] | None], Iterator[Result]]
"""A step's work for some tables, or with None for all. It may also yield results of assets that the run did not select."""

_TABLES = "tables"


@dataclass(frozen=True)
class Step:
    """A step of `source` called `name`, which needs the resources with the keys `resources`.

    It materializes `assets`, one for each table, partitioned by `partitions`; with `checks` but no assets it only checks. `selectable`: a
    run may select some of the tables. `tables_config`: the description of a config field `tables` that selects tables by name
    (schema.table); with None the step has no config.
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
        """The step's part of the asset graph: its assets, and only its own checks."""
        assert isinstance(self.definition, dg.AssetsDefinition)
        checks = dg.AssetSelection.checks(*self.definition.check_keys)
        return dg.AssetSelection.assets(*self.definition.keys).without_checks() | checks if self.assets else checks


def _op(step: Step) -> dg.OpDefinition:
    """Return the step as an op, which may follow another op."""

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
    """Return the check on the stand-ins of its assets; see `stand_ins`."""
    deps = [dg.AssetDep(given.get(dep.asset_key, dep.asset_key)) for dep in check.additional_deps]
    return dg.AssetCheckSpec(
        check.name, asset=given.get(check.asset_key, check.asset_key), description=check.description, additional_deps=deps
    )


def _config(step: Step) -> dict[str, dg.Field] | None:
    """Return the step's config schema, None if it has none."""
    if step.tables_config is None:
        return None
    return {_TABLES: dg.Field([str], default_value=[], is_required=False, description=step.tables_config)}


def _configured(context: StepContext) -> tuple[TableName, ...] | None:
    """Return the tables that the run's config names, None if it names none. Raises Failure for an invalid name."""
    config: Any = context.op_execution_context.op_config if isinstance(context, dg.AssetExecutionContext) else context.op_config
    try:
        return tuple(TableName.parse(name) for name in (config or {}).get(_TABLES, ())) or None
    except ValueError as error:
        raise dg.Failure(f"{error}.", allow_retries=False) from None


def _of_selection(step: Step, keys: Sequence[object], selected: Collection[object]) -> tuple[TableName, ...] | None:
    """Return the tables whose keys the run selects, None if it selects all. `keys` has one key for each table, in the same order."""
    chosen = tuple(known.table for known, key in zip(step.source.tables, keys, strict=True) if key in selected)
    return None if len(chosen) == len(step.source.tables) else chosen


def _selected(
    context: StepContext, results: Iterator[Result], keys: Collection[dg.AssetKey], checks: Collection[dg.AssetCheckKey]
) -> Iterator[Result]:
    """Yield the results that the run selects; log the other assets' results as materializations."""
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

"""The steps of runs, each written once: a function of the run's context that does the work and yields its results.

A step has two forms. Jobs are made of ops, which log the results. The asset graph has the same work as assets or checks, so that they can
be selected and materialized there. An op costs the same however many tables there are, while of each asset in a run Dagster records that it
is planned and has an output, even if nothing was done for it. An op also runs while no table is known; the first run has to.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from pgwal_pipeline.components.events import materialization
from pgwal_pipeline.components.source import CdcSource, StepContext, op_safe, stand_ins
from pgwal_pipeline.known_tables import KnownTable
from pgwal_pipeline.values.relation import TableName

Result = dg.MaterializeResult | dg.AssetCheckResult

Work = Callable[[StepContext, tuple[TableName, ...] | None], Iterator[Result]]
"""A step's work for some tables, or with None for all. It may also yield results of assets that the run did not select."""

_TABLES = "tables"


@dataclass(frozen=True)
class Step:
    """A step of `source` called `name` in jobs and `graph_name` in the asset graph, which needs the resources with the keys `resources`.

    For each table it materializes the `asset`, and `second` where that is not None, and runs the `check`; asset or check may be missing.
    Both are built for the asset graph only: with many tables that takes longer than a run. `more_checks` are further checks of a table that
    has an asset. `partitions` are those of its jobs; an asset's are in its spec. With `idle` an asset that a run selects and that has no
    result is materialized with this metadata. `tables_config`: the description of a config field `tables` that selects tables by name
    (schema.table); with None the step has no config.
    """

    source: CdcSource
    name: str
    graph_name: str
    description: str
    resources: frozenset[str]
    work: Work
    asset: Callable[[KnownTable], dg.AssetSpec] | None = None
    second: Callable[[KnownTable], dg.AssetSpec | None] | None = None
    check: Callable[[KnownTable], dg.AssetCheckSpec] | None = None
    more_checks: Callable[[KnownTable], Iterable[dg.AssetCheckSpec]] | None = None
    partitions: dg.PartitionsDefinition | None = None
    idle: Mapping[str, Any] | None = None
    tables_config: str | None = None

    def op(self) -> dg.OpDefinition:
        """Build the step as an op, which may follow another op."""
        return _op(self)

    def in_graph(self) -> dg.AssetsDefinition:
        """Build the step as assets, or as checks if it has no assets. At least one table must be known."""
        return _checks(self) if self.asset is None else _assets(self, self.asset)


def _op(step: Step) -> dg.OpDefinition:

    @dg.op(
        name=step.source.named(step.name),
        description=step.description,
        required_resource_keys=set(step.resources),
        ins={"before": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
        config_schema=_config(step),
    )
    def work(context: dg.OpExecutionContext) -> Iterator[Any]:
        partition = _partition(context, step)
        for result in step.work(context, _configured(context)):
            yield materialization(result, partition) if isinstance(result, dg.MaterializeResult) else _evaluation(result)
        yield dg.Output(None)

    return work


def _assets(step: Step, asset: Callable[[KnownTable], dg.AssetSpec]) -> dg.AssetsDefinition:
    tables = step.source.tables
    seconds = [] if step.second is None else [(known, spec) for known in tables if (spec := step.second(known)) is not None]
    assets = [asset(known) for known in tables]
    owned = [(known.table, spec.key) for known, spec in [*zip(tables, assets, strict=True), *seconds]]
    assets += [spec for _, spec in seconds]
    specs, real_keys = op_safe(assets)
    given = {real: stand_in for stand_in, real in real_keys.items()}

    @dg.multi_asset(
        name=step.source.named(step.graph_name),
        description=step.description,
        specs=specs,
        check_specs=[_safe(check, given) for check in [*_check_specs(step), *_further_checks(step)]],
        can_subset=True,
        required_resource_keys=set(step.resources),
        config_schema=_config(step),
    )
    def work(context: dg.AssetExecutionContext) -> Iterator[Result]:
        keys, checks = context.selected_asset_keys, context.selected_asset_check_keys
        tables = _configured(context) or _of_selection(step, owned, keys)
        idle = set() if step.idle is None else set(keys)
        for result in _selected(context, step, step.work(context, tables), keys, checks):
            idle.discard(result.asset_key)
            yield result
        # Dagster would skip the steps after this one if a table were missing.
        for key in sorted(idle):
            yield dg.MaterializeResult(asset_key=key, metadata=dict(step.idle or {}))

    return work.with_attributes(asset_key_replacements=real_keys) if real_keys else work


def _checks(step: Step) -> dg.AssetsDefinition:
    specs = _check_specs(step)
    owned = [(known.table, check.key) for known, check in zip(step.source.tables, specs, strict=True)]
    given = stand_ins({key for check in specs for key in (check.asset_key, *(dep.asset_key for dep in check.additional_deps))})

    @dg.multi_asset_check(
        name=step.source.named(step.graph_name),
        description=step.description,
        specs=[_safe(check, given) for check in specs],
        can_subset=True,
        required_resource_keys=set(step.resources),
        config_schema=_config(step),
    )
    def work(context: dg.AssetCheckExecutionContext) -> Iterator[Result]:
        checks = context.selected_asset_check_keys
        ran = context.op_execution_context
        tables = _configured(ran) or _of_selection(step, owned, checks)
        yield from _selected(ran, step, step.work(ran, tables), (), checks)

    checks = _ManyChecks(**work.get_attributes_dict())
    return checks.with_attributes(asset_key_replacements={stand_in: key for key, stand_in in given.items()}) if given else checks


class _ManyChecks(dg.AssetChecksDefinition):
    """Checks of many tables that stay an `AssetChecksDefinition` when Dagster adds metadata or resources to them.

    Dagster 1.13 turns them into an `AssetsDefinition` then, and that into one `AssetChecksDefinition` with all checks for each check: with
    2,000 tables that took 20 of the 26 seconds of CPU in which the definitions load.
    """

    def with_attributes(self, **attributes: Any) -> "_ManyChecks":
        """Return the checks with the given attributes."""
        return _ManyChecks(**super().with_attributes(**attributes).get_attributes_dict())


def _check_specs(step: Step) -> list[dg.AssetCheckSpec]:
    return [] if step.check is None else [step.check(known) for known in step.source.tables]


def _further_checks(step: Step) -> list[dg.AssetCheckSpec]:
    return [] if step.more_checks is None else [check for known in step.source.tables for check in step.more_checks(known)]


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


def _of_selection(step: Step, owned: Sequence[tuple[TableName, object]], selected: Collection[object]) -> tuple[TableName, ...] | None:
    """Return the tables of which the run selects a key, None if it does so of all. `owned` are the tables with their keys."""
    chosen = tuple(dict.fromkeys(table for table, key in owned if key in selected))
    return None if len(chosen) == len(step.source.tables) else chosen


def _selected(
    context: StepContext, step: Step, results: Iterator[Result], keys: Collection[dg.AssetKey], checks: Collection[dg.AssetCheckKey]
) -> Iterator[Result]:
    """Yield the results that the run selects; log the materializations of other assets."""
    for result in results:
        if isinstance(result, dg.AssetCheckResult):
            assert result.asset_key is not None
            assert result.check_name is not None
            if dg.AssetCheckKey(result.asset_key, result.check_name) in checks:
                yield result
        elif result.asset_key in keys:
            yield result
        else:
            context.log_event(materialization(result, _partition(context, step)))


def _partition(context: StepContext, step: Step) -> str | None:
    return None if step.partitions is None else context.partition_key


def _evaluation(result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    assert result.asset_key is not None
    assert result.check_name is not None
    return dg.AssetCheckEvaluation(
        asset_key=result.asset_key,
        check_name=result.check_name,
        passed=result.passed,
        metadata=result.metadata or {},
        severity=result.severity,
        description=result.description,
    )

"""The asset check `schema`: whether a table that keeps its columns, or stops at a change of them, has those that the source has."""

from collections.abc import Iterator, Mapping

import dagster as dg

from pgwal_pipeline.asset_specs import SCHEMA_CHECK
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.known_tables import KnownTable
from pgwal_pipeline.lake.records import TableState
from pgwal_pipeline.messages.printable import code_span
from pgwal_pipeline.pipeline.schema_policy import Difference, differences, summary
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import PROPAGATE


def schema_checks(source: CdcSource, known: KnownTable) -> tuple[dg.AssetCheckSpec, ...]:
    """Return the check of a table, if its option `on_schema_change` is not `propagate`."""
    if source.assets.options.of(known.table).on_schema_change == PROPAGATE:
        return ()
    return (
        dg.AssetCheckSpec(
            SCHEMA_CHECK,
            asset=source.names.current(known.table),
            description="The columns are those of the source. If not, `pgwal accept` takes the source's.",
        ),
    )


def verdicts(states: Mapping[TableName, TableState]) -> dict[TableName, tuple[Difference, ...]]:
    """Return how the source differs from what was accepted, for each table that the check is about."""
    return {
        table: differences(state.accepted, state.relation)
        for table, state in sorted(states.items())
        if state.followed and state.accepted is not None and state.relation is not None
    }


def schema_results(
    source: CdcSource, found: Mapping[TableName, tuple[Difference, ...]], recorded: Mapping[str, str]
) -> Iterator[dg.AssetCheckResult]:
    """Yield the checks whose verdict is not the one of `recorded`, which has the differences by quoted names."""
    for table, changes in found.items():
        if recorded.get(str(table)) != summary(changes):
            yield dg.AssetCheckResult(
                asset_key=source.names.current(table),
                check_name=SCHEMA_CHECK,
                passed=not changes,
                severity=dg.AssetCheckSeverity.WARN,
                description=_sentence(table, changes),
                metadata={"pgwal/columns": dg.MetadataValue.md(_as_table(changes))} if changes else None,
            )


def _sentence(table: TableName, changes: tuple[Difference, ...]) -> str:
    if not changes:
        return "The columns are those of the source."
    return f"The source has other columns: {summary(changes)}. `pgwal accept '{table}'` takes them."


def _as_table(changes: tuple[Difference, ...]) -> str:
    rows = [f"| {_cell(change.column)} | {_cell(change.was)} | {_cell(change.now)} |" for change in changes]
    return "\n".join(["| column | accepted | at the source |", "|---|---|---|", *rows])


def _cell(text: str | None) -> str:
    return "–" if text is None else code_span(text).replace("|", "\\|")

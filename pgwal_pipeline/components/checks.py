"""Asset checks: whether the slot is healthy, and whether `current` equals the source."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from pgwal_pipeline.asset_specs import EQUALS_SOURCE_CHECK, HEALTH_CHECK
from pgwal_pipeline.components.failures import at_work
from pgwal_pipeline.components.raw import report_windows
from pgwal_pipeline.components.source import CdcSource, StepContext, observe_slot, session_of, slot_of
from pgwal_pipeline.components.steps import Step
from pgwal_pipeline.messages import progress
from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.pipeline.reports import LagReading, TableComparison, VerifyReport
from pgwal_pipeline.postgres.slot_loss import LEAST_NOTICE, seconds_to_loss
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName

_RATE_SECONDS = 1.0  # how long the check measures the source's WAL rate


@dataclass(frozen=True)
class Verdict:
    """The result of the check `health`: whether it passed, how severe a failure is, the sentence and the metadata to show."""

    passed: bool
    severity: dg.AssetCheckSeverity
    sentence: str
    metadata: dict[str, Any]


def judge_health(slot_name: str, reading: LagReading, bytes_per_second: float | None) -> Verdict:
    """Judge whether the slot is usable, and how long it will be at `bytes_per_second` of WAL (None: not known).

    How long matters only where the server limits the WAL that a slot may keep (max_slot_wal_keep_size).
    """
    error, warn = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    if not reading.slot_exists:
        # Whether the slot should exist is recorded in the lake; a LagReading does not tell it.
        sentence = (
            f"Slot {slot_name} does not exist. The next sync creates it. If the lake already holds changes read from it and "
            "PGWAL_ON_SLOT_LOSS is stop, run `pgwal resnapshot --all` instead."
        )
        return Verdict(False, warn, sentence, {})
    metadata: dict[str, Any] = {"pgwal/wal_status": reading.wal_status or "unknown", "pgwal/lag_bytes": reading.lag_bytes}
    if bytes_per_second is not None:
        metadata["pgwal/wal_bytes_per_second"] = round(bytes_per_second)
    if reading.safe_wal_size is not None:
        metadata["pgwal/bytes_to_invalidation"] = reading.safe_wal_size
    if reading.wal_status == "lost":
        return Verdict(False, error, f"Slot {slot_name} is lost: the server removed its WAL. Run `pgwal resnapshot --all`.", metadata)
    if reading.wal_status == "unreserved":
        return Verdict(False, error, f"Slot {slot_name} may be lost at the next checkpoint: drain it now.", metadata)
    left = seconds_to_loss(reading.safe_wal_size, bytes_per_second)
    if left is not None:
        metadata["pgwal/seconds_to_invalidation"] = round(left)
        if left < LEAST_NOTICE:
            return Verdict(
                False,
                warn,
                f"At the present rate slot {slot_name} is lost in {duration(left)} unless it is drained: make sure that runs succeed, "
                "or raise max_slot_wal_keep_size on the source.",
                metadata,
            )
    return Verdict(True, error, f"Slot {slot_name} is {reading.lag_bytes:,} bytes behind.", metadata)


def build_health_check(source: CdcSource) -> dg.AssetChecksDefinition:
    """Build the check `health` on the slot. The lag sensor reports the same check without a run."""

    @dg.asset_check(
        name=HEALTH_CHECK,
        asset=source.names.slot,
        description="The slot is usable and has room for more than an hour of WAL at the present rate.",
        required_resource_keys={source.slot_key},
    )
    def slot_health(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        verdict = _measured(context.op_execution_context, source)
        return dg.AssetCheckResult(
            passed=verdict.passed, severity=verdict.severity, description=verdict.sentence, metadata=verdict.metadata
        )

    return slot_health


def build_health_op(source: CdcSource) -> dg.OpDefinition:
    """Build the op of a job that runs the check `health`."""

    @dg.op(
        name=source.named("check_slot"),
        description="Runs the check `health` of the slot.",
        required_resource_keys={source.slot_key},
        ins={"before": dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing),
    )
    def check_slot(context: dg.OpExecutionContext) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
        yield health_evaluation(source, _measured(context, source))
        yield dg.Output(None)

    return check_slot


def health_evaluation(source: CdcSource, verdict: Verdict) -> dg.AssetCheckEvaluation:
    """Return a verdict as the event of the check `health`."""
    return dg.AssetCheckEvaluation(
        asset_key=source.names.slot,
        check_name=HEALTH_CHECK,
        passed=verdict.passed,
        severity=verdict.severity,
        description=verdict.sentence,
        metadata=verdict.metadata,
    )


def _measured(context: StepContext, source: CdcSource) -> Verdict:
    slot = slot_of(context, source)
    with at_work(context, {}):
        first = slot.flushed()
        time.sleep(_RATE_SECONDS)
        reading = slot.lag()
    return judge_health(source.settings.slot, reading, (reading.flush_lsn - first) / _RATE_SECONDS)


def build_verify(source: CdcSource) -> Step:
    """Build the step `verify_current`, which runs the check `equals_source` of every current table."""

    def work(context: StepContext, tables: tuple[TableName, ...] | None) -> Iterator[dg.AssetCheckResult]:
        if context.run.asset_selection:
            context.log.info("Not compared: tables are compared only by the verify job, or when checks are run without assets.")
            return
        report = _verify(context, source, tables)
        for table, comparison in report.tables.items():
            yield _result(source, table, report, comparison)
        for table, reason in report.errors.items():
            yield dg.AssetCheckResult(
                asset_key=source.names.current(table), check_name=EQUALS_SOURCE_CHECK, passed=False, description=reason
            )

    return Step(
        source,
        "verify_current",
        "check_current",
        "Brings every current table to one LSN and compares it there with the source, value by value.",
        frozenset({source.slot_key, source.spark_key}),
        work,
        check=lambda known: dg.AssetCheckSpec(
            EQUALS_SOURCE_CHECK,
            asset=source.names.current(known.table),
            additional_deps=[source.names.source(known.table)],
            description="Every row and every value equals the source's at the same LSN. A table that takes long is compared in parts.",
        ),
        tables_config="Tables to compare whole, as schema.table. Empty: all, as far as PGWAL_VERIFY_BUDGET goes.",
    )


def _verify(context: StepContext, source: CdcSource, tables: tuple[TableName, ...] | None) -> VerifyReport:
    from pgwal_pipeline.pipeline.verify import verify

    with at_work(context, source.slot_tags):
        report = verify(slot_of(context, source).settings, session_of(context, source), tables, progress=progress.for_run(context.log))
    part: dict[str, Any] = {"verify": report.to_json()}
    if report.drain is not None:
        part |= report.drain.to_json()
        report_windows(context, source, report.drain)
    if report.publish is not None:
        part |= {"errors": report.publish.errors}
    part["errors"] = {**part.get("errors", {}), **{str(table): reason for table, reason in report.errors.items()}}
    numbers = {
        "compared_tables": len(report.tables),
        "compared_rows": sum(comparison.rows for comparison in report.tables.values()),
        "different_tables": sum(not comparison.equal for comparison in report.tables.values()),
    }
    observe_slot(context, source, numbers, part)
    return report


def _result(source: CdcSource, table: TableName, report: VerifyReport, comparison: TableComparison) -> dg.AssetCheckResult:
    at = format_lsn(report.lsn)
    proof = report.proofs[table]
    equal = f"Equal to the source at {at}." if proof.whole else f"{comparison.rows:,} of its rows are equal to the source's at {at}."
    sentence = (
        equal
        if comparison.equal
        else f"At {at}: {comparison.missing} rows missing, {comparison.extra} too many, {comparison.different} different."
    )
    numbers = {f"pgwal/{name}": getattr(comparison, name) for name in ("rows", "missing", "extra", "different")}
    metadata: dict[str, Any] = numbers | {"pgwal/seconds": round(proof.seconds, 3), "pgwal/lsn": at}
    if proof.verified_through is not None:
        metadata["pgwal/verified_through"] = format_lsn(proof.verified_through)
    if proof.proven_at is not None:
        metadata["pgwal/proven_at"] = dg.MetadataValue.timestamp(proof.proven_at)
        metadata["pgwal/seconds_since_proof"] = round((datetime.now(UTC) - proof.proven_at).total_seconds(), 3)
    if proof.differences:
        metadata["pgwal/differences"] = dg.MetadataValue.json([dict(row) for row in proof.differences])
    return dg.AssetCheckResult(
        asset_key=source.names.current(table),
        check_name=EQUALS_SOURCE_CHECK,
        passed=comparison.equal,
        description=sentence,
        metadata=metadata,
    )

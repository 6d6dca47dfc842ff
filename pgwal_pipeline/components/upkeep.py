"""What requests maintenance: a sensor that knows when tables have changed so often that their files are worth a look."""

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import dagster as dg

from pgwal_pipeline.components.jobs import Jobs
from pgwal_pipeline.components.maintenance import TABLES
from pgwal_pipeline.components.processes import Present, end_dead_runs
from pgwal_pipeline.components.requests import busy, pausing
from pgwal_pipeline.components.source import MAINTENANCE_TAG, CdcSource

if TYPE_CHECKING:
    from pgwal_pipeline.pipeline.upkeep import Seen

_INTERVAL_SECONDS = 60
_MOST_NAMED = 50
"""With more tables than that in need, a run looks at all: it is told in each run's configuration which ones it is for."""


def build_maintenance_sensor(source: CdcSource, jobs: Jobs) -> dg.SensorDefinition:
    """Build the sensor `maintenance_need`; see `evaluate_maintenance`."""

    @dg.sensor(
        name=source.named("maintenance_need"),
        description="Requests maintenance of current tables that have changed often, of raw with old windows, and of everything each day.",
        job=jobs.maintenance,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={source.slot_key},
    )
    def maintenance_need(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return evaluate_maintenance(context, source, jobs, time.time(), getattr(context.resources, source.slot_key).present)

    return maintenance_need


def evaluate_maintenance(
    context: dg.SensorEvaluationContext, source: CdcSource, jobs: Jobs, now: float, present: Present
) -> dg.SensorResult:
    """Request maintenance if it is needed (`upkeep.what_is_needed`): one run at a time, beside syncs, with pauses after failures.

    `present` tells which runs show themselves in the source.
    """
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger
    from pgwal_pipeline.pipeline.upkeep import what_is_needed

    # At every tick, even if nothing is needed: runs requested by others wait in the queue for dead ones.
    end_dead_runs(context.instance, [(MAINTENANCE_TAG, source.tag)], present)
    attempt, seen = _parse(context.cursor)
    need = what_is_needed(source.settings, Ledger(Lake(source.settings.lake)), seen, now)
    if not need:
        return dg.SensorResult(skip_reason=need.reason, cursor=_dump(attempt, need.seen))
    held = busy(context.instance, MAINTENANCE_TAG, source.tag)
    held = held or pausing(context.instance, MAINTENANCE_TAG, source.tag, {jobs.maintenance.name})
    if held is not None:
        return dg.SensorResult(skip_reason=f"{need.reason} {held}")
    named = {} if need.whole or len(need.tables) > _MOST_NAMED else {TABLES: list(need.tables)}
    config: dict[str, Any] = {"ops": {source.named("maintain_lake"): {"config": named}}} if named else {}
    request = dg.RunRequest(run_key=f"maintenance {int(now)}#{attempt + 1}", run_config=config, tags={"pgwal/reason": need.reason})
    return dg.SensorResult(run_requests=[request], cursor=_dump(attempt + 1, need.seen))


def _dump(attempt: int, seen: "Seen") -> str:
    return json.dumps({"attempt": attempt, "seen": asdict(seen)})


def _parse(cursor: str | None) -> "tuple[int, Seen | None]":
    """What `_dump` wrote; nothing if there is no cursor, or another version wrote it."""
    from pgwal_pipeline.pipeline.upkeep import Seen

    try:
        values = json.loads(cursor or "")
        return int(values["attempt"]), Seen(**values["seen"])
    except (ValueError, TypeError, KeyError):
        return 0, None

"""The jobs of one source. Each runs in one process: starting a process for each step would only cost seconds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import dagster as dg

from pgwal_pipeline.components.checks import build_health_check, build_verify
from pgwal_pipeline.components.current import build_publish
from pgwal_pipeline.components.dagster_internals import AssetsJob
from pgwal_pipeline.components.maintenance import build_maintenance
from pgwal_pipeline.components.raw import build_drain
from pgwal_pipeline.components.snapshots import build_snapshots
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.components.steps import Step

Job = dg.JobDefinition | AssetsJob

_SYNC = "Slot to raw to current: drains the window that its partition names, then publishes every current table at one LSN."
_DRAIN = "Only slot to raw."
_PUBLISH = "Only raw to current. Works without the source."
_SNAPSHOT = "Reads the tables that have joined and are not read whole yet. Tables named in its config are read again from the start."
_VERIFY = "Compares current with the source at one LSN, value by value, and checks the slot's health."
_MAINTENANCE = "Compacts, vacuums and prunes the lake, and deletes the partitions and runs of pruned windows."


@dataclass(frozen=True)
class Jobs:
    """The jobs of one source."""

    sync: Job
    drain: Job
    publish: Job
    snapshot: Job
    verify: Job
    maintenance: Job

    def all(self) -> list[Job]:
        """Return every job."""
        return [self.sync, self.drain, self.publish, self.snapshot, self.verify, self.maintenance]


def build_jobs(source: CdcSource) -> tuple[Jobs, list[dg.AssetsDefinition]]:
    """Build the jobs of `source`. Return them with the assets and checks that they are made of."""
    drain, snapshots, publish, verify = build_drain(source), build_snapshots(source), build_publish(source), build_verify(source)
    health = build_health_check(source)
    jobs = Jobs(
        sync=_job("sync", _SYNC, source.slot_tags, drain, publish),
        drain=_job("drain", _DRAIN, source.slot_tags, drain),
        publish=_job("publish", _PUBLISH, source.slot_tags, publish),
        snapshot=_job("snapshot", _SNAPSHOT, source.snapshot_tags, snapshots),
        verify=_job("verify", _VERIFY, source.slot_tags, verify, beside=dg.AssetSelection.checks(*health.check_keys)),
        maintenance=_ops_job(source.named("maintenance"), _MAINTENANCE, source.slot_tags, [build_maintenance(source)], None),
    )
    steps = [step.definition for step in (drain, snapshots, publish, verify)]
    return jobs, [*(step for step in steps if isinstance(step, dg.AssetsDefinition)), health]


def _job(name: str, description: str, tags: Mapping[str, str], *steps: Step, beside: dg.AssetSelection | None = None) -> Job:
    """Build a job that runs `steps` one after another. `beside` selects more of the asset graph; it needs tables that are known."""
    name = steps[0].source.named(name)
    ops = [step.definition for step in steps if isinstance(step.definition, dg.OpDefinition)]
    if ops:
        return _ops_job(name, description, tags, ops, steps[0].partitions)
    selection = reduce(or_, [step.selection for step in steps] + ([] if beside is None else [beside]))
    return dg.define_asset_job(name, selection, description=description, tags=tags, executor_def=dg.in_process_executor)


def _ops_job(
    name: str,
    description: str,
    tags: Mapping[str, str],
    ops: Sequence[Callable[..., Any]],
    windows: dg.PartitionsDefinition | None,
) -> dg.JobDefinition:
    """Build a job of ops, each of which starts when the one before it is done."""

    def steps() -> None:
        done: Any = None
        for op in ops:
            done = op() if done is None else op(done)

    graph = dg.graph(name=name, description=description)(steps)
    return graph.to_job(tags=dict(tags), partitions_def=windows, executor_def=dg.in_process_executor)

"""The jobs of one source. Each runs in one process: starting a process for each step would only cost seconds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from pgwal_pipeline.components.checks import build_health_op, build_verify
from pgwal_pipeline.components.current import build_publish
from pgwal_pipeline.components.maintenance import build_maintenance
from pgwal_pipeline.components.raw import build_drain
from pgwal_pipeline.components.snapshots import build_snapshots
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.components.steps import Step

_SYNC = "Slot to raw to current: drains the window that its partition names, then publishes every current table at one LSN."
_DRAIN = "Only slot to raw."
_PUBLISH = "Only raw to current. Works without the source."
_SNAPSHOT = "Reads the tables that have joined and are not read whole yet. Tables named in its config are read again from the start."
_VERIFY = "Compares current with the source at one LSN, value by value, and checks the slot's health."
_MAINTENANCE = "Compacts, vacuums and prunes the lake, and deletes the partitions and runs of pruned windows."


@dataclass(frozen=True)
class Jobs:
    """The jobs of one source."""

    sync: dg.JobDefinition
    drain: dg.JobDefinition
    publish: dg.JobDefinition
    snapshot: dg.JobDefinition
    verify: dg.JobDefinition
    maintenance: dg.JobDefinition

    def all(self) -> list[dg.JobDefinition]:
        """Return every job."""
        return [self.sync, self.drain, self.publish, self.snapshot, self.verify, self.maintenance]


@dataclass(frozen=True)
class Steps:
    """The steps of one source, of which its jobs and its asset graph are made."""

    drain: Step
    snapshots: Step
    publish: Step
    verify: Step

    @classmethod
    def of(cls, source: CdcSource) -> "Steps":
        """Build the steps of `source`."""
        return cls(build_drain(source), build_snapshots(source), build_publish(source), build_verify(source))

    def in_graph(self) -> list[dg.AssetsDefinition]:
        """Build the assets and checks of the tables that are known."""
        steps = (self.drain, self.snapshots, self.publish, self.verify)
        return [step.in_graph() for step in steps if step.source.tables]


def build_jobs(source: CdcSource, steps: Steps) -> Jobs:
    """Build the jobs of `source` from its steps."""
    drain, publish = steps.drain.op(), steps.publish.op()
    slot, windows = source.slot_tags, source.windows

    def job(name: str, description: str, tags: Mapping[str, str], *ops: dg.OpDefinition, partitions: Any = None) -> dg.JobDefinition:
        graph = dg.graph(name=source.named(name), description=description)(_one_after_another(ops))
        return graph.to_job(tags=dict(tags), partitions_def=partitions, executor_def=dg.in_process_executor)

    return Jobs(
        sync=job("sync", _SYNC, slot, drain, publish, partitions=windows),
        drain=job("drain", _DRAIN, slot, drain, partitions=windows),
        publish=job("publish", _PUBLISH, slot, publish),
        snapshot=job("snapshot", _SNAPSHOT, source.snapshot_tags, steps.snapshots.op()),
        verify=job("verify", _VERIFY, slot, steps.verify.op(), build_health_op(source)),
        maintenance=job("maintenance", _MAINTENANCE, source.maintenance_tags, build_maintenance(source)),
    )


def _one_after_another(ops: Sequence[dg.OpDefinition]) -> Callable[[], None]:
    """Return the body of a graph in which each op starts when the one before it is done."""

    def steps() -> None:
        done: Any = None
        for op in ops:
            done = op() if done is None else op(done)

    return steps

"""The jobs of one source. All run in one process: between two steps there is nothing but seconds to win or lose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from pgwal_pipeline.components.checks import build_health_check, build_verify
from pgwal_pipeline.components.current import build_publish
from pgwal_pipeline.components.maintenance import build_maintenance
from pgwal_pipeline.components.raw import build_drain
from pgwal_pipeline.components.snapshots import build_snapshots
from pgwal_pipeline.components.source import CdcSource

Job = dg.JobDefinition | UnresolvedAssetJobDefinition

_SYNC = "Slot to raw to current: drains the window that its partition names, then publishes every current table at one position."
_DRAIN = "Only slot to raw."
_PUBLISH = "Only raw to current; needs no source."
_SNAPSHOT = "Reads the tables that have joined and are not read whole yet; those named in its config, again from the start."
_VERIFY = "Compares current with the source at one position, value by value, and looks at the slot's health."
_MAINTENANCE = "Compacts, vacuums and prunes the lake, and deletes the partitions and runs of what is gone."


@dataclass(frozen=True)
class Jobs:
    """The jobs that sensors and schedules ask for, and all the others."""

    sync: Job
    drain: Job
    publish: Job
    snapshot: Job
    verify: Job
    maintenance: Job

    def all(self) -> list[Job]:
        """Every job."""
        return [self.sync, self.drain, self.publish, self.snapshot, self.verify, self.maintenance]


def build_jobs(source: CdcSource) -> tuple[Jobs, list[dg.AssetsDefinition]]:
    """The jobs, and the assets and checks that they are made of. While no table is known the jobs are made of ops that do the same work."""
    drain, snapshots, publish, verify = build_drain(source), build_snapshots(source), build_publish(source), build_verify(source)
    health = build_health_check(source)
    maintenance = _ops_job(source, "maintenance", _MAINTENANCE, source.slot_tags, build_maintenance(source))
    if (
        isinstance(drain, dg.AssetsDefinition)
        and isinstance(snapshots, dg.AssetsDefinition)
        and isinstance(publish, dg.AssetsDefinition)
        and isinstance(verify, dg.AssetsDefinition)
    ):
        raw = dg.AssetSelection.assets(*drain.keys)
        # Its own checks only: the comparison with the source is for the job that asks for it.
        current = dg.AssetSelection.assets(*publish.keys).without_checks() | dg.AssetSelection.checks(*publish.check_keys)
        jobs = Jobs(
            sync=_assets_job(source, "sync", _SYNC, source.slot_tags, raw | current),
            drain=_assets_job(source, "drain", _DRAIN, source.slot_tags, raw),
            publish=_assets_job(source, "publish", _PUBLISH, source.slot_tags, current),
            snapshot=_assets_job(source, "snapshot", _SNAPSHOT, source.snapshot_tags, dg.AssetSelection.assets(*snapshots.keys)),
            verify=_assets_job(
                source, "verify", _VERIFY, source.slot_tags, dg.AssetSelection.checks(*verify.check_keys, *health.check_keys)
            ),
            maintenance=maintenance,
        )
        return jobs, [drain, snapshots, publish, verify, health]
    jobs = Jobs(
        sync=_ops_job(source, "sync", _SYNC, source.slot_tags, drain, publish, windows=source.windows),
        drain=_ops_job(source, "drain", _DRAIN, source.slot_tags, drain, windows=source.windows),
        publish=_ops_job(source, "publish", _PUBLISH, source.slot_tags, publish),
        snapshot=_ops_job(source, "snapshot", _SNAPSHOT, source.snapshot_tags, snapshots),
        verify=_ops_job(source, "verify", _VERIFY, source.slot_tags, verify),
        maintenance=maintenance,
    )
    return jobs, [health]


def _assets_job(source: CdcSource, name: str, description: str, tags: Mapping[str, str], selection: dg.AssetSelection) -> Job:
    return dg.define_asset_job(source.named(name), selection, description=description, tags=tags, executor_def=dg.in_process_executor)


def _ops_job(
    source: CdcSource,
    name: str,
    description: str,
    tags: Mapping[str, str],
    *ops: Callable[..., Any],
    windows: dg.PartitionsDefinition | None = None,
) -> dg.JobDefinition:
    """A job of one op, or of two of which the second starts when the first is done."""

    def steps() -> None:
        done: Any = None
        for op in ops:
            done = op() if done is None else op(done)

    graph = dg.graph(name=source.named(name), description=description)(steps)
    return graph.to_job(tags=dict(tags), partitions_def=windows, executor_def=dg.in_process_executor)

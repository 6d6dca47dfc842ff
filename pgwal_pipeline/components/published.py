"""The published lake as a resource of Dagster, for the assets of whoever reads it. It needs the lake, and no source.

All steps of a run read one publish. The first step that asks writes down which, in the run's log, where only the first of several counts,
and as a tag of the run: a re-execution has the tag, and reads the same versions.
"""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import dagster as dg
from pydantic import Field, PrivateAttr

from pgwal_pipeline.components.dagster_internals import agreed_in_run
from pgwal_pipeline.components.environment import SourceSettings
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import parse_lsn

if TYPE_CHECKING:
    from pgwal_pipeline.published.state import PublishedState

AS_OF_TAG = "pgwal/as_of"
"""The tag of a run that says which publish it reads: an LSN, a time, or `latest`."""

READ_LSN, READ_AT, READ_VERSIONS, READ_LAKE = "pgwal/read_lsn", "pgwal/read_published_at", "pgwal/read_versions", "pgwal/read_lake"
"""The metadata of a materialization that read a state: its LSN, when it was published, the Delta versions read, and the lake."""

_NEWEST = 50  # materializations, among which the last reading is searched


class PublishedLake(dg.ConfigurableResource):
    """The published tables of a lake, of which all steps of a run read the same versions."""

    lake: str | None = Field(default=None, description="Folder or s3://bucket/prefix of the lake; PGWAL_LAKE where it is left out.")
    _source: SourceSettings = PrivateAttr(default_factory=SourceSettings)

    @classmethod
    def of_source(cls, source: SourceSettings) -> Self:
        """Return the resource with the settings of `source`, its lake among them."""
        made = cls()
        made._source = source
        return made

    @property
    def settings(self) -> Settings:
        """The settings for reading the lake. Raises SettingError naming the variable that is wrong."""
        given = self._source.given
        return SourceSettings(given if self.lake is None else {**given, "PGWAL_LAKE": self.lake}).without_source()

    def state(self, context: Any = None, as_of: str | None = None) -> "PublishedState":
        """Return one publish, to be read. With the `context` of an asset, an op or an input it is the same in all steps of the run.

        That is the one that the run's tag `pgwal/as_of` names, else the newest, which becomes the run's tag. `as_of` is what
        `pgwal as-of` takes, and stands over both. What an asset reads is in the metadata of its materialization. Raises SettingError for
        an `as_of` that is neither an LSN nor a time, LakeError if nothing was published by then.
        """
        from dataclasses import replace

        from pgwal_pipeline.published.state import open_state

        settings, step = self.settings, context.step_context if isinstance(context, dg.InputContext) else context
        alone = as_of is not None or step is None
        state = open_state(settings, as_of or "latest") if alone else _state_of_run(settings, step)
        assets = () if step is None else _assets_of(step)
        if not assets:
            return state
        versions = _versions_of(step)

        def note(name: str, version: int) -> None:
            versions[name] = version
            _tell(step, assets, {READ_VERSIONS: dg.MetadataValue.json(dict(versions))})

        _tell(
            step,
            assets,
            {
                READ_LSN: state.lsn,
                READ_AT: dg.MetadataValue.timestamp(state.published_at),
                READ_LAKE: state.ledger.lake.uri,
                READ_VERSIONS: dg.MetadataValue.json(dict(versions)),
            },
        )
        return replace(state, on_read=note, last_read=lambda: _last_read(step, assets, state.ledger.lake.uri))


def _state_of_run(settings: Settings, step: Any) -> "PublishedState":
    """The publish that all steps of a run read; the newest if there is no run."""
    from pgwal_pipeline.published.state import open_state

    instance, run_id = _instance_of(step), _run_id_of(step)
    run = None if instance is None or run_id is None else instance.get_run_by_id(run_id)
    if instance is None or run is None:
        return open_state(settings)
    own = f"{AS_OF_TAG}_{hashlib.sha256(settings.lake.encode()).hexdigest()[:8]}"
    found = run.tags.get(own)
    if found is None:
        # What another lake of this run was read at says nothing of this one.
        others = {told for lake, told in agreed_in_run(instance, run, AS_OF_TAG).items() if lake != settings.lake}
        found = tag if (tag := run.tags.get(AS_OF_TAG)) not in others else None
    state = open_state(settings, found or "latest")
    if found == state.lsn:
        return state
    agreed = agreed_in_run(instance, run, AS_OF_TAG, (settings.lake, state.lsn))[settings.lake]
    general = run.tags.get(AS_OF_TAG)
    instance.add_run_tags(run.run_id, {own if general is not None and general != found else AS_OF_TAG: agreed})
    return state if agreed == state.lsn else open_state(settings, agreed)


_read: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def _versions_of(step: Any) -> dict[str, int]:
    """What a step has read so far, by its inputs and by itself: Delta versions by table."""
    whole = step.get_step_execution_context() if isinstance(step, dg.AssetExecutionContext) and _run_id_of(step) else step
    return _read.setdefault(whole, {})


def _instance_of(step: Any) -> "dg.DagsterInstance | None":
    try:
        return step.instance
    except (AttributeError, dg.DagsterInvariantViolationError):
        return None


def _run_id_of(step: Any) -> str | None:
    try:
        return (step.run if isinstance(step, dg.AssetExecutionContext | dg.OpExecutionContext) else step.dagster_run).run_id
    except (AttributeError, dg.DagsterError):
        return None


def _assets_of(step: Any) -> tuple[dg.AssetKey, ...]:
    """The assets that a step materializes."""
    try:
        if isinstance(step, dg.AssetExecutionContext):
            return tuple(sorted(step.selected_asset_keys)) if step.has_assets_def else ()
        definition = step.assets_def
        return () if definition is None else tuple(sorted(definition.keys))
    except (AttributeError, dg.DagsterError):
        return ()


def _tell(step: Any, assets: Iterable[dg.AssetKey], metadata: dict[str, Any]) -> None:
    for key in assets:
        step.add_asset_metadata(metadata, asset_key=key)


def _last_read(step: Any, assets: Iterable[dg.AssetKey], lake: str) -> int | None:
    """The LSN that all these assets (or their partitions of this run) have read in their last materializations; None if one never did."""
    instance = _instance_of(step)
    if instance is None:
        return None
    partitions: tuple[str | None, ...] = tuple(step.partition_keys) if getattr(step, "has_partition_key", False) else (None,)
    found = [_read_by(instance, key, partition, lake) for key in assets for partition in partitions]
    known = [lsn for lsn in found if lsn is not None]
    return min(known) if known and len(known) == len(found) else None


def _read_by(instance: dg.DagsterInstance, asset: dg.AssetKey, partition: str | None, lake: str) -> int | None:
    records = dg.AssetRecordsFilter(asset, asset_partitions=None if partition is None else [partition])
    for record in instance.fetch_materializations(records, limit=_NEWEST).records:
        materialization = record.asset_materialization
        metadata = {} if materialization is None else materialization.metadata
        of_lake = metadata.get(READ_LAKE)
        if READ_LSN in metadata and (of_lake is None or of_lake.value == lake):
            return parse_lsn(str(metadata[READ_LSN].value))
    return None

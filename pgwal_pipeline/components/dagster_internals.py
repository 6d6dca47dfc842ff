"""The private parts of Dagster that the pipeline uses, as of 1.13.27. `test_dagster_internals` fails if an upgrade removes one.

No other module imports a private module of Dagster or changes one of its objects.
"""

import logging
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import dagster as dg
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.events import AssetMaterializationPlannedData, EngineEventData
from dagster._core.remote_origin import CodeLocationOrigin
from dagster._core.workspace.load import location_origins_from_yaml_paths
from dagster._core.workspace.load_target import get_target_from_toml_data
from dagster._grpc.utils import get_loadable_targets
from dagster.components.utils.project_paths import get_code_server_metadata_key
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver

__all__ = [
    "TranslationFn",
    "TranslationFnResolver",
    "agreed_in_run",
    "build_outside_a_project",
    "configure_logging_once",
    "load_code_location",
    "loading",
    "report_planned",
    "state_is_missing",
]

_SUBJECT = "pgwal/of"


@contextmanager
def loading() -> Iterator[None]:
    """Open a DefinitionsLoadContext for state-backed components where Dagster has opened none (a plain import, a test)."""
    if DefinitionsLoadContext.is_set():
        yield
        return
    with DefinitionsLoadContext.scoped(DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)):
        yield


def build_outside_a_project(component: dg.StateBackedComponent) -> dg.Definitions:
    """Return the definitions of a component that stands in no project. Of its load context Dagster reads the project's folder alone."""
    return component.build_defs(cast(dg.ComponentLoadContext, SimpleNamespace(project_root=Path.cwd())))


def load_code_location(file: Path) -> None:
    """Load the definitions of the code location that a `pyproject.toml`, `dg.toml` or `workspace.yaml` names, as Dagster would.

    Nothing that comes of it is used: whoever wants to know what is in it watches. Raises whatever its modules raise.
    """
    # Dagster is always started in the project's folder, and takes the working directory for it.
    folder = None if file.suffix == ".yaml" else str(file.parent)
    with warnings.catch_warnings(), loading():
        warnings.simplefilter("ignore")
        for origin in _origins(file):
            target = getattr(origin, "loadable_target_origin", None)  # a server elsewhere has none
            if target is not None:
                get_loadable_targets(
                    python_file=target.python_file,
                    module_name=target.module_name,
                    package_name=target.package_name,
                    autoload_defs_module_name=target.autoload_defs_module_name,
                    working_directory=folder or target.working_directory,
                    attribute=target.attribute,
                    resolve_lazy_defs=True,
                )


def _origins(file: Path) -> Sequence[CodeLocationOrigin]:
    if file.suffix == ".yaml":
        return location_origins_from_yaml_paths([str(file)])
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    targets = get_target_from_toml_data(content if file.name == "pyproject.toml" else {"tool": {"dg": content}})
    found = targets if isinstance(targets, list) else [] if targets is None else [targets]
    return [origin for target in found for origin in target.create_origins()]


def state_is_missing(state_key: str) -> bool:
    """Return whether this process rebuilds a code server's definitions without having been given the state `state_key`."""
    context = DefinitionsLoadContext.get()
    handed_over = get_code_server_metadata_key(state_key)
    return context.load_type == DefinitionsLoadType.RECONSTRUCTION and handed_over not in context.reconstruction_metadata


def configure_logging_once(instance: dg.DagsterInstance) -> None:
    """Keep `instance` from configuring Python's logging again at each run.

    Configuring takes logging's module lock and then each handler's lock. Another run in this process that is logging holds a handler's
    lock and may wait for the module lock: the two would deadlock.
    """
    handlers = list(instance.get_yaml_python_handlers())
    instance.get_yaml_python_handlers = lambda: handlers


def agreed_in_run(instance: dg.DagsterInstance, run: dg.DagsterRun, what: str, proposal: tuple[str, str] | None = None) -> dict[str, str]:
    """Return what the steps of a run have agreed on: by subject, the value that was written down first in the run's log.

    `proposal` (a subject and a value) is written down before. So steps that run side by side in processes of their own get the same answer.
    """
    if proposal is not None:
        subject, value = proposal
        data = EngineEventData(metadata={what: dg.MetadataValue.text(value), _SUBJECT: dg.MetadataValue.text(subject)})
        instance.report_engine_event(f"This run reads {subject} at {value}.", run, data)
    agreed: dict[str, str] = {}
    for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        if entry.dagster_event is not None and what in (found := entry.dagster_event.engine_event_data.metadata):
            agreed.setdefault(str(found[_SUBJECT].value), str(found[what].value))
    return agreed


def report_planned(instance: dg.DagsterInstance, run: dg.DagsterRun, step_key: str, keys: Iterable[dg.AssetKey]) -> None:
    """Record that `run` is about to materialize unpartitioned assets. Until it does, or ends, they count as in progress."""
    for key in keys:
        event = dg.DagsterEvent.build_asset_materialization_planned_event(run.job_name, step_key, AssetMaterializationPlannedData(key))
        instance.report_dagster_event(event, run.run_id, logging.DEBUG)

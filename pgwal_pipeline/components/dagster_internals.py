"""What the pipeline needs of Dagster that Dagster keeps to itself. Seen in 1.13.27; `test_dagster_internals` fails where one is gone.

Nothing else imports a private module of Dagster's or changes one of its objects.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster.components.utils.project_paths import get_code_server_metadata_key

AssetsJob = UnresolvedAssetJobDefinition
"""The type of what `define_asset_job` returns."""


@contextmanager
def loading() -> Iterator[None]:
    """Give state-backed components a place for their state, in a process in which Dagster has opened none (a plain import, a test)."""
    if DefinitionsLoadContext.is_set():
        yield
        return
    with DefinitionsLoadContext.scoped(DefinitionsLoadContext(DefinitionsLoadType.INITIALIZATION)):
        yield


def state_is_missing(state_key: str) -> bool:
    """Whether this process is to load the definitions of a code server that has not handed it the state `state_key`."""
    context = DefinitionsLoadContext.get()
    handed_over = get_code_server_metadata_key(state_key)
    return context.load_type == DefinitionsLoadType.RECONSTRUCTION and handed_over not in context.reconstruction_metadata


def configure_logging_once(instance: dg.DagsterInstance) -> None:
    """Keep `instance` from configuring Python's logging anew for each run.

    It does so under logging's own lock and then waits for every handler's. A run beside it that is logging holds a handler's, and may wait
    for logging's: both would wait for ever.
    """
    handlers = list(instance.get_yaml_python_handlers())
    instance.get_yaml_python_handlers = lambda: handlers

"""Postgres change data capture into Delta Lake, as a Dagster project. `docs/python.md` describes the names that others may import.

A name is loaded when it is first used, so that importing the package, or one module of it, loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgwal_pipeline.components.cdc import PostgresCdcComponent
    from pgwal_pipeline.components.published import PublishedLake
    from pgwal_pipeline.components.published_inputs import PublishedTableIOManager
    from pgwal_pipeline.messages.errors import PgwalError
    from pgwal_pipeline.partitions import commit_days, every_window, wal_windows
    from pgwal_pipeline.published.apply import apply_changes
    from pgwal_pipeline.published.changes import Changes
    from pgwal_pipeline.published.state import PublishedState

    __version__: str

__all__ = [
    "Changes",
    "PgwalError",
    "PostgresCdcComponent",
    "PublishedLake",
    "PublishedState",
    "PublishedTableIOManager",
    "__version__",
    "apply_changes",
    "commit_days",
    "every_window",
    "wal_windows",
]

_MODULES = {
    "Changes": "pgwal_pipeline.published.changes",
    "PgwalError": "pgwal_pipeline.messages.errors",
    "PostgresCdcComponent": "pgwal_pipeline.components.cdc",
    "PublishedLake": "pgwal_pipeline.components.published",
    "PublishedState": "pgwal_pipeline.published.state",
    "PublishedTableIOManager": "pgwal_pipeline.components.published_inputs",
    "apply_changes": "pgwal_pipeline.published.apply",
    "commit_days": "pgwal_pipeline.partitions",
    "every_window": "pgwal_pipeline.partitions",
    "wal_windows": "pgwal_pipeline.partitions",
}


def __getattr__(name: str) -> Any:
    """Load a public name. Raises AttributeError for any other."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pgwal-pipeline")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

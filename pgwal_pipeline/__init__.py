"""Postgres change data capture into Delta Lake, as a Dagster project. `docs/python.md` describes the names that others may import.

A name is loaded when it is first used, so that importing the package, or one module of it, loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgwal_pipeline.components.cdc import PostgresCdcComponent
    from pgwal_pipeline.messages.errors import PgwalError
    from pgwal_pipeline.partitions import commit_days, every_window, wal_windows

    __version__: str

__all__ = ["PgwalError", "PostgresCdcComponent", "__version__", "commit_days", "every_window", "wal_windows"]

_MODULES = {
    "PgwalError": "pgwal_pipeline.messages.errors",
    "PostgresCdcComponent": "pgwal_pipeline.components.cdc",
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

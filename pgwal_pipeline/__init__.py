"""Postgres change data capture into Delta Lake, as a Dagster project. `docs/python.md` describes the names that others may import.

A name is loaded when it is first used, so that importing the package, or one module of it, loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgwal_pipeline.components.cdc import PostgresCdcComponent, build_cdc_definitions
    from pgwal_pipeline.components.published import PublishedLake
    from pgwal_pipeline.components.published_inputs import PublishedTableIOManager
    from pgwal_pipeline.messages.errors import PgwalError
    from pgwal_pipeline.partitions import commit_days, every_window, wal_windows
    from pgwal_pipeline.published.apply import apply_changes
    from pgwal_pipeline.published.changes import Changes
    from pgwal_pipeline.published.state import PublishedState
    from pgwal_pipeline.translator import CdcTable, PgwalTranslator

    __version__: str

__all__ = [
    "CdcTable",
    "Changes",
    "PgwalError",
    "PgwalTranslator",
    "PostgresCdcComponent",
    "PublishedLake",
    "PublishedState",
    "PublishedTableIOManager",
    "__version__",
    "apply_changes",
    "build_cdc_definitions",
    "commit_days",
    "every_window",
    "wal_windows",
]

_MODULES = {
    "CdcTable": "pgwal_pipeline.translator",
    "Changes": "pgwal_pipeline.published.changes",
    "PgwalError": "pgwal_pipeline.messages.errors",
    "PgwalTranslator": "pgwal_pipeline.translator",
    "PostgresCdcComponent": "pgwal_pipeline.components.cdc",
    "PublishedLake": "pgwal_pipeline.components.published",
    "PublishedState": "pgwal_pipeline.published.state",
    "PublishedTableIOManager": "pgwal_pipeline.components.published_inputs",
    "apply_changes": "pgwal_pipeline.published.apply",
    "build_cdc_definitions": "pgwal_pipeline.components.cdc",
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


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet: Dagster looks for the component among them."""
    return sorted({*globals(), *__all__})

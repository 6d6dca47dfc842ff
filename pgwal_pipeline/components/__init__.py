"""The component that Dagster's registry finds here. It is loaded when it is first used: the resources beside it need less."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgwal_pipeline.components.cdc import PostgresCdcComponent

__all__ = ["PostgresCdcComponent"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load the component. Raises AttributeError for any other name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pgwal_pipeline.components.cdc import PostgresCdcComponent

    return PostgresCdcComponent

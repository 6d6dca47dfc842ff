import pytest

from pgwal_pipeline.pipeline import catch_up


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catch-up of this process finds four cores, whatever the machine has."""
    monkeypatch.setattr(catch_up, "cores", lambda: 4)

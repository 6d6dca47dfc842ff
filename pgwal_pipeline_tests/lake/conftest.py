import pytest

from pgwal_pipeline.lake import rewrite


@pytest.fixture(params=["small", "large"])
def either_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with its tables as they are, which are small enough to be written anew, and with the MERGE of large ones."""
    if request.param == "large":
        monkeypatch.setattr(rewrite, "_ROWS", -1)

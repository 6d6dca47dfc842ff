import pytest

from pgwal_pipeline.lake import replacing, rewrite


@pytest.fixture(params=["small", "large"])
def either_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with its tables as they are, which are small enough to be written anew, and with the MERGE of large ones.

    These have several files, by ranges of the key.
    """
    if request.param == "large":
        monkeypatch.setattr(rewrite, "_ROWS", -1)
        monkeypatch.setattr(replacing, "FILE_BYTES", 8 << 10)

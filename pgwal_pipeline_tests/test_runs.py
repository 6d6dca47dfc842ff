"""Runs that this process executes itself, also two at once."""

import logging.config
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline import runs
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.settings import Settings


def test_logging_is_not_configured_while_another_run_may_be_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who configures it holds logging's lock and waits for the handlers'; who logs holds a handler's and may wait for logging's."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    settings = Settings.from_environment({}, source_dsn="postgresql://127.0.0.1:1/none", lake=str(tmp_path / "lake"))

    def configured(*_: Any) -> None:
        raise AssertionError("logging was configured in the middle")

    with runs._jobs(settings, None) as run:
        monkeypatch.setattr(logging.config, "dictConfig", configured)
        assert run("publish")
        assert run("publish")


@pytest.mark.parametrize(
    ("file", "octets"), [("dagster.yaml", b"storage: ["), ("dagster.yaml", b"nosuch: 1\n"), ("history/runs.db", b"x" * 5000)]
)
def test_an_instance_that_is_damaged(file: str, octets: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    settings = Settings.from_environment({}, source_dsn="postgresql://127.0.0.1:1/none", lake=str(tmp_path / "lake"))
    damaged = tmp_path / "dagster" / file
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(octets)
    with pytest.raises(PgwalError) as caught, runs._jobs(settings, None) as run:
        run("publish")
    assert str(caught.value).startswith(f"Dagster's instance in {tmp_path}/dagster cannot be used (")
    assert str(caught.value).endswith("what was drained and published is in the lake.")
    assert "\n" not in str(caught.value)

"""Runs that this process executes itself, also two at once."""

import logging.config
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline import runs
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

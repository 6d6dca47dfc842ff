from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from pgwal_pipeline.components.environment import DSN_VARIABLE
from pgwal_pipeline_tests.components.instances import dagster_instance


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dagster_instance() as instance:
        yield instance


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names no source, and a DAGSTER_HOME and a lake of the test's own."""
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE", DSN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PGWAL_LAKE", str(tmp_path / "lake"))

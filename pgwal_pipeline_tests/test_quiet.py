"""Syncs that find nothing committed since the last drain."""

import subprocess
import sys
from pathlib import Path

import pytest

from pgwal_pipeline import quiet
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import drain, next_target
from pgwal_pipeline.pipeline.status import lag
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.support import Source


@pytest.fixture
def settings(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    # Left out of our publication, so that it waits for no snapshot.
    source.sql("CREATE UNLOGGED TABLE t (id int PRIMARY KEY)")
    source.sql("CREATE TABLE u (id int)")
    return Settings.from_environment({}, source_dsn=source.dsn, lake=str(tmp_path / "lake"), tables="public.none")


def test_what_was_not_drained_before_is_left_to_a_run(settings: Settings) -> None:
    assert not quiet.sync(settings, progress=Silent()).done
    drain(settings, progress=Silent())
    assert not quiet.sync(settings, progress=Silent()).done


def test_with_nothing_committed_the_frontier_moves_on(settings: Settings, source: Source) -> None:
    drain(settings, progress=Silent())
    reading = lag(settings)
    drain(settings, end_lsn=reading.flush_lsn, progress=Silent())
    quiet.remember(settings, reading)
    source.sql("CHECKPOINT")
    target = next_target(settings)
    done = quiet.sync(settings, progress=Silent())
    assert done.done
    frontier = Ledger(Lake(settings.lake)).frontier()
    assert frontier is not None
    assert frontier >= target

    source.sql("INSERT INTO u VALUES (1)")
    assert quiet.sync(settings, progress=Silent()) == quiet.QuietSync()
    assert Ledger(Lake(settings.lake)).frontier() == frontier


def test_neither_dagster_nor_sqlalchemy_is_loaded_for_it() -> None:
    code = "import sys; import pgwal_pipeline.runs; print(sorted({'dagster', 'sqlalchemy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

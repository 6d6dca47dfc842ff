"""What `doctor` says: of what needs no source, with nothing made by looking, and of what would stop a run."""

from pathlib import Path

import pytest

from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline.doctor import Check, examine
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.support import Source


def dagster(home: Path, tmp_path: Path) -> Check:
    environment = {
        "PGWAL_SOURCE_DSN": "host=127.0.0.1 port=1",
        "PGWAL_LAKE": str(tmp_path / "lake"),
        "PGWAL_SPARK_REMOTE": "sc://127.0.0.1:1",
        "DAGSTER_HOME": str(home),
    }
    return next(check for check in examine(environment) if check.name == "dagster")


def test_a_place_for_dagster_is_looked_at_and_not_made(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "dagster"
    found = dagster(home, tmp_path)
    assert found.ok
    assert str(home) in found.found
    assert list(tmp_path.iterdir()) == []
    home.mkdir(parents=True)
    assert dagster(home, tmp_path).ok
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/below", "nowhere", "x" * 300])
def test_a_place_that_dagster_cannot_have(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    found = dagster(tmp_path / where, tmp_path)
    assert not found.ok
    assert "DAGSTER_HOME" in found.found
    assert found.mend


def test_the_doctor_finds_what_would_stop_a_run(source: Source, make_pipeline: MakePipeline) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    pipeline = make_pipeline()

    def wrong(**environment: str) -> dict[str, str]:
        return {check.name: check.found for check in examine(pipeline.environment(**environment)) if not check.ok}

    assert wrong() == {}
    pipeline.drain()
    assert wrong() == {}
    assert list(wrong(PGWAL_LAKE=f"{pipeline.settings.lake}_new")) == ["agreement"]
    assert list(wrong(PGWAL_SPARK_REMOTE="sc://127.0.0.1:1")) == ["spark"]
    source.drop_slot(pipeline.settings.slot)
    assert "is gone from the source" in wrong()["agreement"]
    assert wrong(PGWAL_ON_SLOT_LOSS="resnapshot") == {}
    drains.renew(pipeline.settings, progress=Silent())
    assert wrong() == {}

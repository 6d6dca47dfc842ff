"""What `doctor` says of what needs no source: each is looked at though no source is there, and nothing is made by looking."""

from pathlib import Path

import pytest

from pgwal_pipeline.pipeline.doctor import Check, examine


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

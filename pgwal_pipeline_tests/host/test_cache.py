"""Where the cache is, and what is found there. A process of another user looks, as root can write everywhere."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgwal_pipeline.host.cache import find_cached, user_cache
from pgwal_pipeline.messages.errors import PgwalError

_NOBODY = 65534


def _as_nobody(look: Callable[[], list[str]], **environment: str) -> list[str]:
    """What `look` returns in a process of another user, under `environment` alone."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(_NOBODY, _NOBODY, _NOBODY)
                os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None
            try:
                said = look()
            except PgwalError as error:
                said = [str(error)]
            os.write(writing, json.dumps(said).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return json.loads(pipe.read())


def _found() -> list[str]:
    return [str(find_cached("jar")), str(find_cached("none")), str(user_cache())]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach, with an image's cache that only its owner can write, and a home for everyone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "image/pgwal_pipeline").mkdir(parents=True)
    (folder / "image/pgwal_pipeline/jar").touch()
    (folder / "image/pgwal_pipeline").chmod(0o555)
    for name in ("home", "temporary"):
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_what_an_image_has_is_found_though_it_cannot_be_written(place: Path) -> None:
    found = _as_nobody(_found, XDG_CACHE_HOME=str(place / "image"), HOME=str(place / "home"))
    assert found == [str(place / "image/pgwal_pipeline/jar"), "None", str(place / "home/.cache/pgwal_pipeline")]


def test_without_a_home_new_files_go_to_a_private_folder(place: Path) -> None:
    found = _as_nobody(_found, XDG_CACHE_HOME=str(place / "image"), HOME="/nonexistent", TMPDIR=str(place / "temporary"))
    assert found[0] == str(place / "image/pgwal_pipeline/jar")
    assert Path(found[2]).parent == place / "temporary"
    assert Path(found[2]).stat().st_mode & 0o777 == 0o700


def test_a_cache_that_can_be_written_is_the_only_one(place: Path) -> None:
    (place / "home/.cache/pgwal_pipeline").mkdir(parents=True)
    (place / "home/.cache/pgwal_pipeline/jar").touch()
    own = place / "temporary"
    assert _as_nobody(_found, XDG_CACHE_HOME=str(own), HOME=str(place / "home")) == ["None", "None", str(own / "pgwal_pipeline")]


@pytest.mark.skipif(os.geteuid() != 0, reason="a cache of another user cannot be made")
def test_what_another_user_made_is_not_taken(place: Path) -> None:
    os.chown(place / "image/pgwal_pipeline", 4242, 4242)
    found = _as_nobody(_found, XDG_CACHE_HOME=str(place / "image"), HOME=str(place / "home"))
    assert found[0] == "None"


def test_no_folder_for_temporary_files_is_one_sentence(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nothing"])
    (said,) = _as_nobody(_found, HOME="/nonexistent", XDG_CACHE_HOME=str(place / "image"))
    assert said.startswith("No folder for temporary files can be written")
    assert said.endswith("mount a tmpfs at /tmp.")

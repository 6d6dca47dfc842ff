"""Find the user's cache folder, for files that can be downloaded or made again: jars, a Java home, a trust store."""

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pgwal_pipeline.messages.errors import PgwalError


def user_cache() -> Path:
    """Return the cache folder, created if needed.

    It is under `XDG_CACHE_HOME` or the system's usual folder; if neither can be written, it is a private folder for temporary files.
    Raises PgwalError if others may write to that one, or if there is no folder for temporary files.
    """
    for folder in _places():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(_temporary(), f"pgwal_pipeline-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def find_cached(name: str) -> Path | None:
    """Return the file or folder `name` of the cache, None if it is not there.

    Folders that come before the user's and cannot be written, such as an image's, are looked in too if they are root's or the user's.
    """
    usual = user_cache()
    for folder in _places():
        if folder == usual:
            break
        with contextlib.suppress(OSError):
            if (folder / name).exists() and folder.stat().st_uid in (0, os.geteuid()):
                return folder / name
    return usual / name if (usual / name).exists() else None


def check_private(folder: Path) -> None:
    """Raise PgwalError unless this user owns `folder` and no other may write to it: programs in it are run later."""
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PgwalError(
            f"The folder {folder} belongs to another user or others may write to it, so programs are not safe there; remove it."
        )


@contextlib.contextmanager
def held(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache for the block: one process makes a file, the others wait and find it made."""
    with (user_cache() / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _temporary() -> str:
    """The folder for temporary files. Raises PgwalError if none can be written."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise PgwalError(
            "No folder for temporary files can be written (TMPDIR, /tmp, /var/tmp); set TMPDIR to one that can, or with a read-only root "
            "file system mount a tmpfs at /tmp."
        ) from None


def _places() -> Iterator[Path]:
    named = os.environ.get("XDG_CACHE_HOME")
    if named and Path(named).is_absolute():
        yield Path(named) / "pgwal_pipeline"
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no such user in the password file
        return
    yield home / "Library/Caches/pgwal_pipeline" if sys.platform == "darwin" else home / ".cache/pgwal_pipeline"

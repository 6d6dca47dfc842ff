"""Run a Postgres server for the demo and the tests: create its data folder, start, stop, kill and restart it.

The server listens on 127.0.0.1 and on a Unix socket that only its user can reach. Over TCP the superuser has a password, which is made with
the data. The server ends with the process that started it, however that one ends; the data stays in its folder.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote

import psutil

from pgwal_pipeline.embedded.installations import Installation, default_installation, installation, reachable, runnable_by, servers
from pgwal_pipeline.host.spawn import free_port, port_free, spawn
from pgwal_pipeline.messages.errors import PgwalError

__all__ = ["Installation", "Postgres", "default_installation", "installation", "servers"]

DEFAULT_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    # In the data folder, and removed with it: otherwise a killed server leaves it in the machine's memory.
    "dynamic_shared_memory_type": "mmap",
}

_PASSWORD_FILE = "pgwal_password"  # noqa: S105 (the name of a file)
_LOG_LIMIT = 16 << 20
_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class _Account:
    """The user that the server runs as; `change`: whether it is not this process's user."""

    uid: int
    gid: int
    name: str
    change: bool


class Postgres:
    """One server on one data folder.

    `settings` are configuration parameters by name, which override `DEFAULT_SETTINGS`. If `port` is None, one is chosen at the first start
    and kept. If this process is root, the server runs as the data's owner, or as `nobody` for new data, since Postgres refuses to run as
    root.
    """

    def __init__(
        self,
        data_dir: Path,
        installation: Installation | None = None,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.installation = installation or default_installation()
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        self.port = port
        self.log_file = self._beside(".log")
        self._process: subprocess.Popen[Any] | None = None
        self._lock: IO[str] | None = None
        # On the command line of every server for this folder and of no other: tells it from another process with its old id.
        self._mark = f"pgwal-{hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]}"
        self._password = ""

    def __repr__(self) -> str:
        return f"Postgres({str(self.data_dir)!r}, version={self.installation.version}, port={self.port})"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the server that this object started is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id of the running server."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def socket_dir(self) -> Path:
        """The folder of the Unix socket, for `host=` of a connection: the data folder, which other users cannot enter."""
        return self.data_dir

    def dsn(self, database: str = "postgres", user: str = "postgres", *, password: str | None = None) -> str:
        """Return the URI of `database` over TCP, for the superuser with the server's password unless another is given."""
        secret = self._password if password is None and user == "postgres" else password
        login = quote(user, safe="") + (f":{quote(secret, safe='')}" if secret else "")
        return f"postgresql://{login}@127.0.0.1:{self.port}/{quote(database, safe='')}"

    def start(self) -> None:
        """Create the data folder if it is missing, start the server, and return when it accepts connections.

        Raises PgwalError if the folder is in use, is not a data folder or is of another major version, if the port is taken, or with the
        last lines of the server's log if it does not start.
        """
        if self.running:
            return
        try:
            self.data_dir.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            account = _account(self.data_dir)
            programs = runnable_by(self.installation, account.uid, account.gid) if account.change else self.installation
            self._make_data(programs, account)
            self._stop_leftover()
            self._password = (self.data_dir / _PASSWORD_FILE).read_text() if (self.data_dir / _PASSWORD_FILE).exists() else ""
            self._launch(programs, account)
        except PermissionError as error:
            self._release()
            raise PgwalError(
                f"The Postgres data in {self.data_dir} belongs to another user ({error.filename} is closed to this one); "
                "run as that user, or choose another folder."
            ) from None
        except BaseException:
            self._release()
            raise

    def stop(self) -> None:
        """End all sessions, write everything to disk and stop. Does nothing if the server is not running."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
                process.wait()
        self._gone()

    def kill(self) -> None:
        """End the server and all its processes as a crash would: by SIGKILL, with nothing written to disk."""
        process = self._process
        if process is not None and process.poll() is None:
            children = _children(process.pid)
            process.kill()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.wait()
        self._gone()

    def restart(self) -> None:
        """Stop the server and start it on the same port: connections break, slots and data stay."""
        self.stop()
        self.start()

    def destroy(self) -> None:
        """Kill the server and remove its data, log and lock file."""
        self.kill()
        shutil.rmtree(self.data_dir, ignore_errors=True)
        for path in (self.log_file, self._beside(".lock")):
            path.unlink(missing_ok=True)

    def _beside(self, suffix: str) -> Path:
        return self.data_dir.with_name(self.data_dir.name + suffix)

    def _take_lock(self) -> None:
        """Lock the folder for this process. The lock ends with the process, so whoever holds it knows that no other one uses the folder."""
        lock = self._beside(".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise PgwalError(
                f"The Postgres data in {self.data_dir} is in use by another process; stop that one or choose another folder."
            ) from None
        self._lock = lock

    def _gone(self) -> None:
        self._process = None
        _running.discard(self)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make_data(self, programs: Installation, account: _Account) -> None:
        if (self.data_dir / "PG_VERSION").exists():
            self._check_data(programs)
            return
        if self.data_dir.exists() and any(self.data_dir.iterdir()):
            raise PgwalError(f"{self.data_dir} is not empty and holds no Postgres data; empty it or choose another folder.")
        # Made beside the folder and renamed when complete, so that a crash leaves no incomplete data.
        fresh = self._beside(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        password = secrets.token_urlsafe(18)
        options = ["-U", "postgres", "-E", "UTF8", "--locale=C", "--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync"]
        # initdb takes the password from a file and needs an empty folder, so the file is elsewhere; it is removed afterwards.
        with tempfile.TemporaryDirectory(prefix="pgwal-", dir=_open_temporary()) as place, _Folder(fresh, account) as folder:
            told = Path(place, "password")
            told.touch(mode=0o600)
            told.write_text(password)
            if account.change:
                for path in (fresh, place, told):
                    os.chown(path, account.uid, account.gid)
            done = subprocess.run(
                [programs.bin / "initdb", "-D", folder.path, f"--pwfile={told}", *options],
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                pass_fds=folder.fds,
                **_as(account),
            )
        if done.returncode != 0:
            shutil.rmtree(fresh, ignore_errors=True)
            raise PgwalError(f"Postgres data could not be made in {self.data_dir}: {_last_lines(done.stderr or done.stdout)}")
        (fresh / _PASSWORD_FILE).touch(mode=0o600)
        (fresh / _PASSWORD_FILE).write_text(password)
        if self.data_dir.exists():
            self.data_dir.rmdir()
        fresh.rename(self.data_dir)

    def _check_data(self, programs: Installation) -> None:
        found = (self.data_dir / "PG_VERSION").read_text().strip()
        if found != str(programs.version):
            raise PgwalError(
                f"The Postgres data in {self.data_dir} is of version {found}, but the server at hand is {programs.version}; "
                f"use a server of version {found} or remove the folder."
            )

    def _stop_leftover(self) -> None:
        """Stop a server that outlived the process that started it. This process has the lock, so no other one uses the server."""
        lines = self._pid_file()
        if not lines or not lines[0].isdigit() or not _was_started_with(pid := int(lines[0]), self._mark):
            return
        for way, seconds in ((signal.SIGINT, _STOP_SECONDS), (signal.SIGQUIT, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, way)
            if _until(lambda: not _was_started_with(pid, self._mark), seconds):
                return
        raise PgwalError(f"A Postgres server left over on {self.data_dir} (process {pid}) does not stop; end it and try again.")

    def _launch(self, programs: Installation, account: _Account) -> None:
        chosen_here = self.port is None
        deadline = time.monotonic() + _START_SECONDS
        while True:
            port = self.port = free_port() if self.port is None else self.port
            if not chosen_here and not port_free(port):
                raise PgwalError(f"Port {port} on 127.0.0.1 is taken by another program; choose another one for the Postgres server.")
            shown = self._attempt(programs, account, port, deadline)
            if shown is None:
                return
            again = "still in use" in shown  # the processes of a killed server take a moment to end
            if chosen_here and "Address already in use" in shown:
                self.port, again = None, True
            if not again or time.monotonic() > deadline:
                raise PgwalError(f"The Postgres server on {self.data_dir} did not start: {_last_lines(shown)}")
            time.sleep(0.1)

    def _attempt(self, programs: Installation, account: _Account, port: int, deadline: float) -> str | None:
        """Start the server once; return None when it accepts connections, or its log if it ended."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            # Relative to the data folder, the server's working directory: a socket's path may have only about 100 bytes.
            "unix_socket_directories": ".",
            "unix_socket_permissions": "0700",
            **self.settings,
            "cluster_name": self._mark,
        }
        if self.log_file.exists() and self.log_file.stat().st_size > _LOG_LIMIT:
            self.log_file.unlink()
        with self.log_file.open("ab") as log, _Folder(self.data_dir, account) as folder:
            begin = log.tell()
            command = [str(programs.bin / "postgres"), "-D", folder.path]
            for name, value in settings.items():
                command += ["-c", f"{name}={value}"]
            process = self._process = spawn(command, log, death_signal=signal.SIGINT, pass_fds=folder.fds, **_as(account))
        while process.poll() is None:
            lines = self._pid_file()
            if len(lines) >= 8 and lines[0] == str(process.pid) and lines[7].strip() == "ready":
                _running.add(self)
                return None
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
            time.sleep(0.01)
        self._process = None
        with self.log_file.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def _pid_file(self) -> list[str]:
        try:
            return (self.data_dir / "postmaster.pid").read_text().splitlines()
        except OSError:
            return []


class _Folder:
    """A path by which the server's account can reach a folder.

    If the folder is under a home that only its owner can enter, the account cannot use its path, but can use a descriptor opened by us.
    """

    def __init__(self, folder: Path, account: _Account) -> None:
        self.path = str(folder)
        self.fds: tuple[int, ...] = ()
        if not account.change or reachable(folder.parent, account.uid, account.gid):
            return
        if not Path("/proc/self/fd").is_dir():
            raise PgwalError(
                f"The Postgres server runs as user {account.name}, who cannot enter {folder}; choose a folder open to all users."
            )
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.path = f"/proc/self/fd/{descriptor}"
        self.fds = (descriptor,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.fds:
            os.close(descriptor)


_OWNER = os.getpid()
_running: set[Postgres] = set()


@atexit.register
def _stop_all() -> None:
    if os.getpid() == _OWNER:  # not at the end of a fork
        for server in list(_running):
            server.stop()


def _account(data_dir: Path) -> _Account:
    if os.geteuid() != 0:
        return _Account(os.geteuid(), os.getegid(), "", change=False)
    if data_dir.exists() and data_dir.stat().st_uid != 0:
        status = data_dir.stat()
        return _Account(status.st_uid, status.st_gid, f"with id {status.st_uid}", change=True)
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise PgwalError("Postgres cannot run as root, and this machine has no user nobody to run it as; run as another user.") from None
    return _Account(nobody.pw_uid, nobody.pw_gid, "nobody", change=True)


def _as(account: _Account) -> dict[str, Any]:
    """The arguments of a subprocess that runs as `account`, with a working directory and variables that do not depend on ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_")) and name not in {"LANG", "LANGUAGE"}}
    identity = {"user": account.uid, "group": account.gid, "extra_groups": []} if account.change else {}
    return {"cwd": "/", "env": {**kept, "LC_ALL": "C"}, **identity}


def _children(pid: int) -> list[int]:
    """The ids of the processes that `pid` started."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _open_temporary() -> str:
    """A folder for temporary files that every user may enter."""
    return next((place for place in ("/tmp", "/var/tmp") if Path(place).is_dir()), tempfile.gettempdir())  # noqa: S108


def _was_started_with(pid: int, argument: str) -> bool:
    """Whether `pid` is a live process with `argument` somewhere on its command line."""
    try:
        return argument in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _last_lines(text: str, count: int = 3) -> str:
    """The end of a log on one line: of the lines that tell of a failure, if there are any."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if any(mark in line for mark in ("FATAL:", "PANIC:", "error:", "HINT:", "DETAIL:"))]
    return " / ".join((telling or lines)[-count:]) or "it said nothing"

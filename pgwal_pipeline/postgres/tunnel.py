"""The way to a source through SSH: a child process `ssh` with a port on this machine, where connections to the source are made.

The program itself is used, so that keys, agents, known hosts, jump hosts and the configuration are as the user's `ssh` has them.
"""

import atexit
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pgwal_pipeline.host.spawn import free_port, spawn
from pgwal_pipeline.messages.errors import PgwalError, SettingError, SourceRefused, SourceUnavailable
from pgwal_pipeline.values.ssh_address import SshAddress

VARIABLE = "PGWAL_SSH_TUNNEL"
"""The setting, as errors name it."""

_OPEN = "pgwal: the tunnel is open"
_LINES = 40  # of what ssh says, to explain a failure
_LOOK_EVERY = 0.1  # seconds between looks whether it is open
_LONGEST_CONNECT = 30.0  # seconds for ssh to connect
_LOGIN = 20.0  # more seconds, for its keys and what the host asks
_TRIES = 3  # at ports of this machine
_LAST_WORDS = 0.5  # seconds for what ssh says of a connection to arrive
_FIRST_OPEN_PORT = 1024

_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to be asked
    "StrictHostKeyChecking": "yes",
    "ExitOnForwardFailure": "yes",
    # This process owns the tunnel: one that is shared with others would outlive it, or end with them.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "LogLevel": "INFO",
    # It runs once the local port takes connections.
    "PermitLocalCommand": "yes",
    "LocalCommand": f"echo '{_OPEN}'",
}


@dataclass(frozen=True, slots=True)
class _Route:
    """From this machine by way of `tunnel` to `host` and `port`, as the tunnel's other end knows them."""

    tunnel: SshAddress
    host: str
    port: int


@dataclass
class _Tunnel:
    """A running `ssh`, and its end on this machine. `said` is the newest of what it said, `lines` how many lines it has said."""

    process: "subprocess.Popen[Any]"
    address: str
    port: int
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    lines: int = 0
    opened: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def listen(self, reader: int) -> None:
        """Take in what ssh says, until it ends."""
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip() == _OPEN:
                    self.opened.set()
                else:
                    self.said.append(line.strip())
                    self.lines += 1
        self.ended.set()

    def close(self) -> None:
        """End the ssh, if it has not ended."""
        if self.process.poll() is None:
            self.process.terminate()


_tunnels: dict[_Route, _Tunnel] = {}
_locks: dict[_Route, threading.Lock] = {}
_guard = threading.Lock()


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """Where connections through a tunnel are made: an address and a port of this machine."""

    address: str
    port: int
    _tunnel: _Tunnel = field(repr=False)
    _heard: int = 0

    @property
    def broken(self) -> bool:
        """Whether its ssh has ended."""
        return self._tunnel.process.poll() is not None

    def complaint(self) -> str | None:
        """Return why the tunnel's other end did not connect, if ssh has said so since this was made."""
        deadline = time.monotonic() + _LAST_WORDS
        while True:
            new = self._tunnel.lines - self._heard
            for line in reversed(list(self._tunnel.said)[-new:] if new else []):
                if found := re.search(r"open failed: (?:connect failed: )?(.+)", line):
                    return found[1]
            if self.broken or time.monotonic() > deadline:
                return None
            time.sleep(0.02)


def local_end(tunnel: SshAddress, host: str, port: int, *, connect_timeout: float) -> LocalEnd:
    """Return this machine's end of the way through `tunnel` to `host` and `port`; ssh is started unless it runs.

    One ssh serves all connections of this process to that host and port. Raises SettingError if there is no ssh, SourceRefused for a host
    key that is unknown or has changed and for a refused login, SourceUnavailable if the tunnel cannot be made now.
    """
    route = _Route(tunnel, host, port)
    with _guard:
        lock = _locks.setdefault(route, threading.Lock())
    with lock:
        found = _tunnels.get(route)
        if found is None or found.process.poll() is not None:
            found = _tunnels[route] = _opened(route, connect_timeout)
        return LocalEnd(found.address, found.port, found, found.lines)


def close_all() -> None:
    """End every ssh of this process. On Linux they also end with it, however it ends."""
    for tunnel in list(_tunnels.values()):
        tunnel.close()


atexit.register(close_all)


def _opened(route: _Route, connect_timeout: float) -> _Tunnel:
    program = shutil.which("ssh")
    if program is None:
        raise SettingError(f"{VARIABLE} needs the program ssh, which is not on this machine; install OpenSSH's client.")
    seconds = min(connect_timeout, _LONGEST_CONNECT)
    said: list[str] = []
    for attempt in range(_TRIES):
        address, port = _place(route.port, attempt)
        tunnel = _started([program, *_arguments(route, address, port, seconds)], address, port)
        try:
            _await(tunnel, route, seconds + _LOGIN)
        except BaseException:
            tunnel.close()
            raise
        if tunnel.opened.is_set() and tunnel.process.poll() is None:
            return tunnel
        said = list(tunnel.said)
        if not any("Address already in use" in line for line in said):
            break
    raise _failure(route, said)


def _place(port: int, attempt: int) -> tuple[str, int]:
    """Return an address and a port of this machine for a tunnel.

    On Linux all of 127.0.0.0/8 is this machine's. An address of its own lets the port be the source's, by which libpq finds the line of a
    password file.
    """
    if sys.platform.startswith("linux") and port >= _FIRST_OPEN_PORT and attempt < _TRIES - 1:
        return ".".join(["127", *(str(random.SystemRandom().randint(1, 254)) for _ in range(3))]), port
    return "127.0.0.1", free_port()


def _arguments(route: _Route, address: str, port: int, seconds: float) -> list[str]:
    target = f"[{route.host}]" if ":" in route.host else route.host
    options = [f"{name}={value}" for name, value in {**_OPTIONS, "ConnectTimeout": f"{max(1, seconds):.0f}"}.items()]
    return [
        "-N",
        "-T",
        "-a",
        "-x",
        *(word for option in options for word in ("-o", option)),
        "-L",
        f"{address}:{port}:{target}:{route.port}",
        *([] if route.tunnel.user is None else ["-l", route.tunnel.user]),
        *([] if route.tunnel.port is None else ["-p", str(route.tunnel.port)]),
        "--",
        route.tunnel.host,
    ]


def _started(command: list[str], address: str, port: int) -> _Tunnel:
    reader, writer = os.pipe()
    # A user's login shell may be one that runs nothing; ssh has it run the local command and the configuration's proxy commands.
    environment = {**os.environ, "SHELL": "/bin/sh"}
    try:
        with os.fdopen(writer, "wb") as log:
            process = spawn(command, log, death_signal=signal.SIGTERM, env=environment)
    except BaseException:
        os.close(reader)
        raise
    tunnel = _Tunnel(process, address, port)
    threading.Thread(target=tunnel.listen, args=[reader], name="pgwal-tunnel", daemon=True).start()
    return tunnel


def _await(tunnel: _Tunnel, route: _Route, seconds: float) -> None:
    """Wait until the tunnel is open, or its ssh has ended and its last words are known."""
    deadline = time.monotonic() + seconds
    while not tunnel.opened.wait(_LOOK_EVERY):
        if tunnel.process.poll() is not None:
            tunnel.ended.wait(_LAST_WORDS)
            return
        if time.monotonic() > deadline:
            raise SourceUnavailable(f"{VARIABLE}: {route.tunnel} did not let ssh in within {seconds:.0f} s; try again in a while.")


# Pairs of what ssh says, and what to do. They last until somebody changes something.
_REFUSALS = (
    (
        r"IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "its host key is not the one in known_hosts: the host was made anew, or somebody stands in between. Ask its administrator, and "
        "only then remove the old key with `ssh-keygen -R`",
    ),
    (r"REVOKED HOST KEY|is revoked", "its host key is marked as revoked in known_hosts"),
    (
        r"host key is known for|Host key verification failed",
        "its host key is not in known_hosts; connect to it once with `ssh`, and compare the fingerprint that it shows before you say yes",
    ),
    (
        r"Permission denied|Too many authentication failures|No supported authentication methods",
        "it lets this user in by none of ssh's keys; `ssh -o BatchMode=yes` to it has to work without a question",
    ),
    (
        r"Bad owner or permissions|Bad configuration option|bad configuration options|No user exists for uid",
        "ssh does not start: {said}",
    ),
)


def _failure(route: _Route, said: list[str]) -> PgwalError:
    """Return the error of a tunnel whose ssh ended before it was open."""
    for pattern, advice in _REFUSALS:
        line = next((line for line in said if re.search(pattern, line)), None)
        if line is not None:
            return SourceRefused(f"{VARIABLE}: no tunnel through {route.tunnel}: {advice.format(said=line.rstrip('.'))}.")
    reason = next((line for line in reversed(said) if line), "ssh gave no reason").rstrip(".")
    return SourceUnavailable(f"{VARIABLE}: no tunnel through {route.tunnel} now: {reason}; check it, and that this host is up.")

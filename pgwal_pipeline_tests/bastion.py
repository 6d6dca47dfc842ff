"""A host that is reached by SSH: a real sshd on a port of this machine, with keys of its own, and an `ssh` that is set up for it."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

from pgwal_pipeline.host.spawn import free_port
from pgwal_pipeline.postgres import tunnel
from pgwal_pipeline_tests.support import wait_for

_SERVER = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/authorized
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
AllowTcpForwarding yes
LogLevel ERROR
"""
_CLIENT = """
Host *
  IdentitiesOnly {only}
  IdentityFile {identity}
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking accept-new
  ControlMaster auto
  ControlPath {folder}/shared-%C
  ControlPersist 60
"""


def refusal() -> str | None:
    """Why there is no sshd here, None where there is one."""
    missing = [program for program in ("ssh", "ssh-keygen") if shutil.which(program) is None]
    missing += [] if _daemon() else ["sshd"]
    return f"no {', '.join(missing)} here; apt-get install openssh-server openssh-client" if missing else None


def _daemon() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Bastion:
    """A running sshd that lets this user in with the key in `folder/key`. A context manager.

    `bin` has an `ssh` that reads its configuration from `folder`, which shares connections and takes new hosts as a user may have it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("host", "key"):
            self.make_key(name)
        self.authorize("key")
        (folder / "sshd_config").write_text(_SERVER.format(port=self.port, folder=folder))
        self.configure()
        script = self.bin / "ssh"
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        script.chmod(0o755)
        self.trust()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        tunnel.close_all()
        self.stop()

    @property
    def url(self) -> str:
        """What PGWAL_SSH_TUNNEL takes."""
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}"

    def make_key(self, name: str) -> None:
        """Make a key in the folder, in place of one of that name."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)

    def authorize(self, name: str) -> None:
        """Let the holder of the key in, and nobody else."""
        shutil.copy(self.folder / f"{name}.pub", self.folder / "authorized")

    def configure(self, *, identity: str | None = "key") -> None:
        """Set what `ssh` logs in with: a key of the folder, or those that an agent has."""
        path, only = ("none", "no") if identity is None else (self.folder / identity, "yes")
        (self.folder / "config").write_text(_CLIENT.format(folder=self.folder, identity=path, only=only))

    def trust(self) -> None:
        """Have the client know the host's key."""
        key = (self.folder / "host.pub").read_text()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}")

    def start(self) -> None:
        """Start sshd, and wait until it takes connections."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        program = _daemon()
        assert program is not None
        command = [program, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: self._greeting() == "SSH-2.0-", what="sshd to take connections")

    def _greeting(self) -> str:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
            return probe.recv(8).decode(errors="replace")
        return ""

    def break_connections(self) -> int:
        """Kill whoever serves a connection; how many these were."""
        assert self._process is not None
        serving = psutil.Process(self._process.pid).children(recursive=True)
        for process in serving:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        return len(serving)

    def serves(self, port: int) -> bool:
        """Whether the connection from `port` of this machine comes from this sshd."""
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(connection.laddr and connection.laddr.port == port for connection in process.net_connections("tcp")):
                    return True
        return False

    def stop(self) -> None:
        """Kill sshd with all its connections."""
        if self._process is not None:
            self.break_connections()
            self._process.kill()
            self._process.wait()
            self._process = None


def tunnels_of(pid: int) -> list[psutil.Process]:
    """The `ssh` that a process has started."""
    with suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if child.name() == "ssh"]
    return []


def require_sshd() -> None:
    """Skip the test where there is no sshd."""
    reason = refusal()
    if reason is not None:
        pytest.skip(reason)

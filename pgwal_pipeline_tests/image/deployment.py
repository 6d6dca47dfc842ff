"""What docker-compose.yaml describes, started under a project of the tests' own: by the commands that a user types."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pgwal_pipeline_tests.support import wait_for

ROOT = Path(__file__).parents[2]
PROJECT = "pgwal-image-test"
SERVICES = ("postgres", "spark", "code", "webserver", "daemon")
# Quotes, a backslash and spaces: nothing on its way may take it for syntax.
PASSWORD = 'it\'s a \\ "pass"word; $HOME #1'
_ACTIVE = "('STARTED', 'STARTING', 'CANCELING')"


def run(*command: str, seconds: float = 120.0, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command; AssertionError with what it printed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, **options)
    said = f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert not check or done.returncode == 0, said
    return done


def docker(*arguments: str, **options: Any) -> str:
    """What `docker …` prints."""
    return run("docker", *arguments, **options).stdout.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Deployment:
    """The compose file's services, with the shop; `files` are further compose files."""

    def __init__(self, *files: str, **environment: str) -> None:
        self._files = [part for file in ("docker-compose.yaml", *files) for part in ("-f", file)]
        self.port = free_port()
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
        self._compose = ["docker", "compose"] if plugin else [shutil.which("docker-compose") or "docker-compose"]
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "DAGSTER", "AWS"))}
        self._environment |= {"DAGSTER_PORT": str(self.port), "POSTGRES_PORT": str(free_port()), **environment}

    def compose(self, *arguments: str, seconds: float = 300.0, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command of compose."""
        command = [*self._compose, *self._files, "-p", PROJECT, "--profile", "shop", *arguments]
        return run(*command, seconds=seconds, check=check, cwd=ROOT, env=self._environment)

    def up(self, *services: str) -> float:
        """Start what is not running; return after how many seconds every service says that it is healthy."""
        began = time.monotonic()
        self.compose("up", "-d", "--no-build", *services)
        self.wait_until_healthy()
        return time.monotonic() - began

    def down(self, *, volumes: bool = False) -> None:
        self.compose("down", "--remove-orphans", *(["--volumes"] if volumes else []))

    def container(self, service: str) -> str:
        """The id of the service's container."""
        return self._ids(f"label=com.docker.compose.service={service}")[0]

    def containers(self) -> list[str]:
        """The ids of all containers."""
        return self._ids()

    def _ids(self, *labels: str) -> list[str]:
        filters = [part for label in (f"label=com.docker.compose.project={PROJECT}", *labels) for part in ("--filter", label)]
        return docker("ps", "-aq", *filters).split()

    def inspect(self, service: str) -> Mapping[str, Any]:
        return json.loads(docker("inspect", self.container(service)))[0]

    def kill(self, service: str) -> None:
        """End the container's first process as the system does when memory is short; the engine starts the container again."""
        state = self.inspect(service)["State"]
        os.kill(state["Pid"], signal.SIGKILL)
        wait_for(lambda: self.inspect(service)["State"]["StartedAt"] != state["StartedAt"], what=f"a new start of {service}")

    def wait_until_healthy(self, seconds: float = 180.0) -> None:
        def healthy() -> bool:
            states = [self.inspect(service)["State"] for service in SERVICES]
            return all(state["Running"] and state["Health"]["Status"] == "healthy" for state in states)

        wait_for(healthy, seconds=seconds, pause=1.0, what=lambda: docker("ps", "-a", "--format", "{{.Names}} {{.Status}}"))

    def execute(
        self, service: str, *command: str, check: bool = True, options: Sequence[str] = (), seconds: float = 120.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in a service's container."""
        return run("docker", "exec", *options, self.container(service), *command, check=check, seconds=seconds)

    def pgwal(self, *arguments: str, check: bool = True, seconds: float = 300.0) -> "subprocess.CompletedProcess[str]":
        return self.execute("code", "pgwal", *arguments, check=check, seconds=seconds)

    def sql(self, statement: str, database: str = "source") -> str:
        """What psql prints, as the superuser on the server's own socket."""
        command = ("psql", "-h", "/var/run/postgresql", "-U", "postgres", "-d", database, "-v", "ON_ERROR_STOP=1", "-Atc", statement)
        return self.execute("postgres", *command).stdout.strip()

    def published(self) -> Mapping[str, Any] | None:
        """The newest publish, None before the first or while the code server is away."""
        done = self.pgwal("as-of", "--json", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def wait_for_publish_past(self, lsn: int, seconds: float = 600.0) -> Mapping[str, Any]:
        """Wait until the pipeline by itself has published everything before `lsn`."""

        def past() -> Mapping[str, Any] | None:
            publish = self.published()
            return publish if publish is not None and _position(publish["lsn"]) >= lsn else None

        def state() -> str:
            return f"a publish past {lsn:X}: {self.pgwal('status', check=False).stdout}{self.runs()}"

        return wait_for(past, seconds=seconds, pause=2.0, what=state)

    def position(self) -> int:
        """Where the source's WAL ends now."""
        return _position(self.sql("SELECT pg_current_wal_flush_lsn()"))

    def assert_equal(self) -> None:
        """`pgwal verify`: `current` equals the source, every value, at one LSN."""
        found = json.loads(self.pgwal("verify", "--json").stdout)
        assert found["equal"], found
        assert len(found["tables"]) == 6

    def runs(self) -> str:
        """Dagster's runs, newest first, one a line."""
        columns = "substr(run_id, 1, 8), pipeline_name, status, to_timestamp(start_time)"
        return self.sql(f"SELECT {columns} FROM runs ORDER BY id DESC LIMIT 8", "dagster")

    def active_runs(self) -> list[str]:
        """The ids of the runs that Dagster takes for being at work."""
        return self.sql(f"SELECT run_id FROM runs WHERE status IN {_ACTIVE}", "dagster").split()

    def wait_until_ended(self, runs: Sequence[str], seconds: float) -> None:
        wait_for(lambda: not set(runs) & set(self.active_runs()), seconds=seconds, pause=1.0, what=lambda: f"runs to end: {self.runs()}")

    def ui(self, query: str) -> Any:
        """What the UI's own interface answers."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql", json.dumps({"query": query}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())["data"]


def _position(lsn: str) -> int:
    high, low = lsn.split("/")
    return int(high, 16) << 32 | int(low, 16)

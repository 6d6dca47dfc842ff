"""The source's password, however it is given, stands nowhere: not in output, Dagster's folder, the lake or the process list."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline_tests.commands import Commands, command_lines
from pgwal_pipeline_tests.octets import octets_in
from pgwal_pipeline_tests.support import wait_for

# Its middle is in every way of writing it, but for the one in which each byte is percent-encoded.
CORE = "Zq7hunter2Zq"
PASSWORD = f'/p@s\'s "{CORE}" 50%&\\ü'
WRONG = f"{CORE}-but-wrong"
PERCENT = "".join(f"%{octet:02X}" for octet in PASSWORD.encode())
SECRETS = [CORE.encode(), PERCENT.encode(), quote(PERCENT).encode(), CORE.encode("utf-16-le")]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server that asks for a password over TCP, with a role that has all that the pipeline needs."""
    server = Postgres(tmp_path_factory.mktemp("guarded") / "data", settings={"fsync": "off"})
    server.start()
    with plain_session(server.dsn()) as admin:
        admin.execute(b"CREATE ROLE alice LOGIN REPLICATION PASSWORD '" + PASSWORD.replace("'", "''").encode() + b"'")
        admin.execute(b"CREATE DATABASE shop OWNER alice")
    with plain_session(server.dsn("shop")) as inside:
        inside.execute(b"CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t OWNER TO alice")
        inside.execute(b"INSERT INTO t SELECT i, 'v' FROM generate_series(1, 50) i")
    yield server
    server.destroy()


def _escaped(password: str) -> str:
    return password.replace("\\", "\\\\").replace("'", "\\'")


@dataclass
class Runs:
    """Commands with everything that they leave behind in one folder."""

    commands: Commands
    said: list[str]

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        code, out, err = self.commands.run(*arguments, **environment)
        self.said += [out, err]
        return code, err

    def ok(self, *arguments: str, **environment: str) -> None:
        code, err = self.run(*arguments, **environment)
        assert code == 0, err

    def fails(self, *arguments: str, **environment: str) -> None:
        code, err = self.run(*arguments, **environment)
        assert code not in (0, 130, 143)
        assert "Traceback" not in err or "PGWAL_DEBUG" in environment

    def search(self) -> None:
        """Fail where the password stands in what was said or written."""
        for text in self.said:
            _without_secret(text.encode(), text)
        files = [path for path in self.commands.folder.rglob("*") if path.is_file()]
        for path in files:
            for octets in octets_in(path):
                _without_secret(octets, path)


def _without_secret(octets: bytes, where: object) -> None:
    for secret in SECRETS:
        assert secret not in octets, where


@pytest.fixture
def runs(guarded: Postgres, tmp_path: Path) -> Runs:
    commands = Commands(tmp_path, f"host=127.0.0.1 port={guarded.port} dbname=shop user=alice password='{_escaped(PASSWORD)}'")
    commands.environment["PYTHONFAULTHANDLER"] = "1"
    return Runs(commands, [])


@pytest.mark.long
def test_a_whole_run_leaves_no_trace_of_the_password(guarded: Postgres, runs: Runs, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    marker = tmp_path / "reached"
    process = runs.commands.start("sync", "--json", PGWAL_FAILPOINTS=f"publish.in_merge=touch:{marker}@1")

    def reached() -> bool:
        if marker.exists():
            return True
        assert process.poll() is None, process.communicate()
        for pid, line in command_lines().items():
            if pid != os.getpid():
                _without_secret(line, line)
        return False

    wait_for(reached, seconds=180, pause=0.1, what="the merge")
    if Path("/proc/self/environ").exists():
        java = [pid for pid, line in command_lines().items() if b"SparkSubmit" in line and _parent(pid) == process.pid]
        assert java
        for pid in java:
            # Spark never speaks to the source.
            _without_secret(Path(f"/proc/{pid}/environ").read_bytes(), "the JVM's environment")
    marker.unlink()
    runs.said += process.communicate(timeout=120)
    assert process.returncode == 0, runs.said
    runs.commands.environment["PGWAL_SPARK_REMOTE"] = request.getfixturevalue("connect_address")
    for command in (["status"], ["doctor"], ["verify", "--json"]):
        runs.ok(*command)
    _failures(guarded, runs)
    assert len(list(tmp_path.rglob("*"))) > 50
    runs.search()
    runs.ok("drop", "--yes")


def _parent(pid: int) -> int:
    return psutil.Process(pid).ppid()


def _failures(guarded: Postgres, runs: Runs) -> None:
    """Every way to fail that has the DSN at hand."""
    uri = f"postgresql://alice:{PERCENT}@127.0.0.1:{guarded.port}"
    bad = [
        f"{uri}/nosuch",
        f"postgresql://alice:{PERCENT}@127.0.0.1:1/shop",
        f"postgresql://alice:{PASSWORD}@127.0.0.1:{guarded.port}/shop",
        f"postgresql://alice:{CORE}/x@127.0.0.1:{guarded.port}/shop",
        f"host=127.0.0.1 port={guarded.port} dbname=shop user=alice password={PASSWORD}",
        f"host=127.0.0.1 port={guarded.port} dbname=shop user=alice password={WRONG}",
        f"{uri}/shop?sslmode={CORE}",
    ]
    for dsn in bad:
        runs.fails("doctor", PGWAL_SOURCE_DSN=dsn)
    runs.fails("drain", PGWAL_SOURCE_DSN=bad[0])
    runs.fails("drain", PGWAL_SOURCE_DSN=bad[2])
    runs.fails("sync", PGWAL_SOURCE_DSN=bad[5], PGWAL_DEBUG="1")
    runs.ok("status", "--json", PGWAL_SOURCE_DSN=bad[5])
    with plain_session(guarded.dsn("shop")) as admin:
        admin.execute(b"INSERT INTO t VALUES (1000, 'x')")
        runs.fails("drain", PGWAL_FAILPOINTS="drain.before_confirm=error")
        # Refused in the middle of a run, so that Dagster records the failure.
        marker = runs.commands.folder / "changed"
        process = runs.commands.start("resnapshot", "public.t", PGWAL_FAILPOINTS=f"snapshot.between_read_and_write=touch:{marker}@1")

        def reached() -> bool:
            there = marker.exists()
            assert there or process.poll() is None, process.communicate()
            return there

        wait_for(reached, pause=0.05, what="the snapshot to be read")
        admin.execute(b"ALTER ROLE alice PASSWORD 'changed'")
        marker.unlink()
        out, err = process.communicate(timeout=120)
        runs.said += [out, err]
        assert process.returncode == 1
        assert "the password of alice is missing or wrong" in err
        admin.execute(b"ALTER ROLE alice PASSWORD '" + PASSWORD.replace("'", "''").encode() + b"'")


def _as_uri(server: Postgres, _: Path) -> dict[str, str]:
    return {"PGWAL_SOURCE_DSN": f"postgresql://alice:{PERCENT}@127.0.0.1:{server.port}/shop"}


def _as_variables(server: Postgres, _: Path) -> dict[str, str]:
    parts = {"PGHOST": "127.0.0.1", "PGPORT": str(server.port), "PGUSER": "alice", "PGDATABASE": "shop", "PGPASSWORD": PASSWORD}
    return {"PGWAL_SOURCE_DSN": "", **parts}


def _as_password_file(server: Postgres, folder: Path) -> dict[str, str]:
    path = folder / "passes"
    path.touch(0o600)
    path.write_text(f"127.0.0.1:{server.port}:*:alice:{PASSWORD.replace(chr(92), chr(92) * 2).replace(':', chr(92) + ':')}\n")
    return {"PGWAL_SOURCE_DSN": f"host=127.0.0.1 port={server.port} dbname=shop user=alice", "PGPASSFILE": str(path)}


def _as_service(server: Postgres, folder: Path) -> dict[str, str]:
    path = folder / "services.conf"
    path.write_text(f"[shop]\nhost=127.0.0.1\nport={server.port}\ndbname=shop\nuser=alice\npassword={PASSWORD}\n")
    return {"PGWAL_SOURCE_DSN": "service=shop", "PGSERVICEFILE": str(path)}


def _as_service_alone(server: Postgres, folder: Path) -> dict[str, str]:
    return {**_as_service(server, folder), "PGWAL_SOURCE_DSN": "", "PGSERVICE": "shop"}


@pytest.mark.parametrize("way", [_as_uri, _as_variables, _as_password_file, _as_service, _as_service_alone])
def test_each_way_to_give_the_password(
    way: Callable[[Postgres, Path], dict[str, str]], guarded: Postgres, runs: Runs, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("given")
    given = way(guarded, elsewhere)
    runs.ok("doctor", **given)  # which makes a replication connection, too
    assert "alice@127.0.0.1" in runs.said[-2] or "service shop" in runs.said[-2]
    without = {name: value for name, value in given.items() if name not in ("PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSERVICE")}
    if without != given:
        runs.fails("doctor", **{**without, "HOME": str(elsewhere)})
    runs.search()

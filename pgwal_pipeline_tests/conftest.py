"""Fixtures for all rooms: real servers and sessions, started once a run, and a fresh database for each test.

- `postgres`: the server of the run; `source`: a fresh database on it (`.dsn`, `.connect()`, `.sql(...)`, `.value(...)`).
- `postgres_matrix`, `source_matrix`: the same, once for each major version at hand (mark `matrix`).
- `make_server(**settings)`: a server of the test's own, for tests that kill it or need other settings, as in
  `make_server(max_slot_wal_keep_size="1MB")`; `fresh_source(server)` of `support` makes a database on it.
- `bastion`: a real sshd, which the tests' `ssh` on the PATH knows; skips where there is none.
- `spark`: the run's Spark session, on this machine, with `-n` in one JVM for all processes; `connect_address`: where that JVM takes
  Connect's clients too, which saves each of them the start of a JVM; `spark_connect`: a session there.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pgwal_pipeline.embedded.postgres import Installation, Postgres, default_installation, servers
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline_tests import shared_spark
from pgwal_pipeline_tests.bastion import Bastion, require_sshd
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import MADE_ONCE, DockerServer, Source, docker_refusal, fresh_source, start_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's JVMs in tests are short-lived: Java's first compiler alone takes 40 % less of the machine until they end (measured). Room for the
# classes from the start spares each of them collections of all that it has.
_QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC -XX:MetaspaceSize=256m"
if sys.platform == "linux":
    # Hadoop starts a `chmod` for each file that it writes, fifty in a small merge; so each is one process rather than two.
    _QUICK_JAVA += " -Djdk.lang.Process.launchMechanism=VFORK"

# Thousands of small files are made and removed: on a disk a database alone can cost ten times as much of the machine (measured: 0.25 s).
_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30  # bytes; a run has taken 0.7 GB at most

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell without job control: interrupts would be ignored here and in every child.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MATRIX = [pytest.param(found, id=f"pg{found.version}", marks=pytest.mark.matrix) for found in servers()]
_MATRIX += [pytest.param(version, id=f"docker{version}", marks=[pytest.mark.matrix, pytest.mark.docker]) for version in range(14, 19)]


def pytest_configure(config: pytest.Config) -> None:
    """Set what this run and all programs that its tests start go by: what a Spark starts with, and where temporary files are."""
    # A session per run, but where a test says otherwise: engines would outlive their tests.
    os.environ["PGWAL_SPARK_IDLE"] = "0"
    os.environ["SPARK_SUBMIT_OPTS"] = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} {_QUICK_JAVA}".strip()
    if "TMPDIR" not in os.environ and _has_room(_MEMORY):
        os.environ["TMPDIR"] = os.environ["SPARK_LOCAL_DIRS"] = tempfile.tempdir = str(_MEMORY)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[MADE_ONCE] = tempfile.mkdtemp(prefix="pgwal-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ[MADE_ONCE], ignore_errors=True))


def _has_room(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > _ROOM


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest: at the end it would keep one process while the others have nothing left.

    Of several processes each gets a part of the list at first, the parts following one another, and so its share of the long ones.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if not item.get_closest_marker("long")]
    total = len(items)
    items.clear()
    for worker in range(workers):
        share = long[worker::workers]
        size = (total - len(items)) // (workers - worker)
        items += [*share, *rest[: size - len(share)]]
        del rest[: size - len(share)]
    items += rest


def pytest_collection_finish() -> None:
    """Nothing of what was loaded until now will ever be garbage: looking for it there took a twentieth of the tests' own time."""
    gc.freeze()


@pytest.fixture(scope="session")
def _server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Installation], Postgres]]:
    running: dict[int, Postgres] = {}

    def server_of(installation: Installation) -> Postgres:
        if installation.version not in running:
            running[installation.version] = start_server(tmp_path_factory.mktemp("postgres") / str(installation.version), installation)
        return running[installation.version]

    yield server_of
    for server in running.values():
        server.destroy()


@pytest.fixture(scope="session")
def postgres(_server_of: Callable[[Installation], Postgres]) -> Postgres:
    """The server of this run, of the preferred version."""
    return _server_of(default_installation())


@pytest.fixture
def source(postgres: Postgres) -> Iterator[Source]:
    """A fresh database; its slots and itself are dropped afterwards."""
    with fresh_source(postgres) as fresh:
        yield fresh


@pytest.fixture(scope="session", params=_MATRIX)
def postgres_matrix(request: pytest.FixtureRequest, _server_of: Callable[[Installation], Postgres]) -> Iterator[Postgres | DockerServer]:
    """A server of each major version at hand, one after the other, then the official images where Docker is."""
    if isinstance(request.param, Installation):
        yield _server_of(request.param)
        return
    refusal = docker_refusal(request.param)
    if refusal is not None:
        pytest.skip(refusal)
    server = DockerServer(request.param)
    yield server
    server.destroy()


@pytest.fixture
def source_matrix(postgres_matrix: Postgres | DockerServer) -> Iterator[Source]:
    """A fresh database on each major version at hand, one after the other."""
    with fresh_source(postgres_matrix) as fresh:
        yield fresh


@pytest.fixture
def bastion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bastion]:
    """A real sshd on this machine; `ssh` is found that is set up for it, with no other keys."""
    require_sshd()
    with Bastion(tmp_path / "ssh") as made:
        monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        yield made


@pytest.fixture
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Postgres]]:
    """`make_server(installation=None, **settings)`: a started server of the test's own; removed afterwards."""
    made: list[Postgres] = []

    def make(installation: Installation | None = None, **settings: Any) -> Postgres:
        values = {name: str(value) for name, value in settings.items()}
        made.append(start_server(tmp_path_factory.mktemp("server") / "data", installation, values))
        return made[-1]

    yield make
    for server in made:
        server.destroy()


@pytest.fixture(scope="session")
def _spark_place(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any] | None:
    """Where the Spark is that the processes of this run share; None in a run of one process."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    return shared_spark.started(tmp_path_factory.getbasetemp().parent, os.getppid())


@pytest.fixture(scope="session")
def spark_settings(tmp_path_factory: pytest.TempPathFactory, _spark_place: Mapping[str, Any] | None) -> Settings:
    """Settings under which this run's Spark was started, but for the lake."""
    port = None if _spark_place is None else int(_spark_place["connect"])
    return shared_spark.spark_settings(str(tmp_path_factory.mktemp("lake")), port=port)


@pytest.fixture(scope="session")
def spark(spark_settings: Settings, _spark_place: Mapping[str, Any] | None) -> "Iterator[SparkSession]":
    """The Spark session of this run; starting it takes seconds, so all tests share it."""
    if _spark_place is not None:
        yield shared_spark.attached(_spark_place)
        return
    session = spark_session(spark_settings, app_name="pgwal-tests")
    yield session
    session.stop()


@pytest.fixture
def several_parts(spark: "SparkSession") -> Iterator[None]:
    """While the test runs, `spark` has rows in several parts, as it has where there are many of them."""
    for name in shared_spark.PARTS:
        spark.conf.set(name, "2")
    yield
    for name, value in shared_spark.PARTS.items():
        spark.conf.set(name, value)


@pytest.fixture(scope="session")
def connect_address(spark: "SparkSession", spark_settings: Settings) -> str:
    """What `PGWAL_SPARK_REMOTE` takes: Spark Connect in the JVM of `spark`, which is warm already."""
    return f"sc://127.0.0.1:{spark_settings.spark_conf['spark.connect.grpc.binding.port']}"


@pytest.fixture
def spark_connect(connect_address: str, spark_settings: Settings) -> "Iterator[SparkSession]":
    """A session on the Connect server. While the test runs, pyspark's functions make columns for Connect, not for `spark`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        session = spark_session(spark_settings.model_copy(update={"spark_remote": connect_address, "spark_conf": {}}))
        yield session
        session.stop()


@pytest.fixture
def make_pipeline(source: Source, tmp_path: Path) -> Callable[..., Pipeline]:
    """`make_pipeline(**settings)`: a pipeline without Spark on the test's database."""

    def make(**overrides: Any) -> Pipeline:
        name = f"t_{uuid.uuid4().hex[:10]}"
        values = {"source_dsn": source.dsn, "slot": name, "publication": name, "lake": str(tmp_path / "lake")}
        values |= {"busy_timeout": 20, "blocked_timeout": 20, "spark_idle": 0}
        settings = Settings.from_environment({}, **(values | overrides))

        def no_spark() -> Any:
            raise AssertionError("this test has no Spark")

        return Pipeline(source, settings, no_spark)

    return make


@pytest.fixture
def pipeline(make_pipeline: Callable[..., Pipeline], spark: Any) -> Iterator[Pipeline]:
    """A pipeline with the run's Spark session."""
    made = make_pipeline()
    made.spark = lambda: spark
    yield made


@pytest.fixture
def commands(source: Source, tmp_path: Path) -> Commands:
    return Commands(tmp_path, source.dsn)

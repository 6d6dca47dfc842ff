"""Fixtures for all rooms: real servers and sessions, started once a run, and a fresh database for each test.

- `postgres`: the server of the run; `source`: a fresh database on it (`.dsn`, `.connect()`, `.sql(...)`, `.value(...)`).
- `postgres_matrix`, `source_matrix`: the same, once for each major version at hand (mark `matrix`).
- `make_server(**settings)`: a server of the test's own, for tests that kill it or need other settings, as in
  `make_server(max_slot_wal_keep_size="1MB")`; `fresh_source(server)` of `support` makes a database on it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pgwal_pipeline.local.postgres import Installation, Postgres, default_installation, servers
from pgwal_pipeline_tests.support import Source, fresh_source, start_server

_MATRIX = [pytest.param(found, id=f"pg{found.version}", marks=pytest.mark.matrix) for found in servers()]


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
def postgres_matrix(request: pytest.FixtureRequest, _server_of: Callable[[Installation], Postgres]) -> Postgres:
    """A server of each major version at hand, one after the other."""
    return _server_of(request.param)


@pytest.fixture
def source_matrix(postgres_matrix: Postgres) -> Iterator[Source]:
    """A fresh database on each major version at hand, one after the other."""
    with fresh_source(postgres_matrix) as fresh:
        yield fresh


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

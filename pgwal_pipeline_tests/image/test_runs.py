"""Runs in containers of their own, as deploy/docker-compose.runs.yaml has them: part of `make image-test`."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pgwal_pipeline.settings import PREFIX, Settings
from pgwal_pipeline_tests.image.deployment import ROOT, Deployment, docker
from pgwal_pipeline_tests.support import wait_for


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    socket = Path("/var/run/docker.sock")
    made = Deployment("deploy/docker-compose.runs.yaml", PGWAL_MAX_STALENESS="10s", DOCKER_GID=str(socket.stat().st_gid))
    made.down(volumes=True)
    made.up()
    yield made
    for container in _containers():
        docker("rm", "-f", container, check=False)
    made.down(volumes=True)


def _containers() -> list[str]:
    """The ids of the runs' containers."""
    return docker("ps", "-q", "--filter", "label=dagster/run_id").split()


@pytest.mark.image
@pytest.mark.timeout(900)
def test_a_run_outlives_the_code_server(deployment: Deployment) -> None:
    deployment.wait_for_publish_past(deployment.position())
    tags = "SELECT count(DISTINCT run_id) FROM run_tags WHERE key = 'docker/container_id'"
    assert int(deployment.sql(tags, "dagster")) >= 2
    deployment.sql("CREATE TABLE many (id int PRIMARY KEY, text text)")
    deployment.sql("INSERT INTO many SELECT n, repeat('x', 500) FROM generate_series(1, 400000) n")
    containers = wait_for(_containers, seconds=60, pause=0.5, what="a run")
    time.sleep(2)
    runs = deployment.active_runs()
    docker("rm", "-f", deployment.container("code"))
    assert set(_containers()) >= set(containers)
    deployment.compose("up", "-d", "--no-build", "--no-deps", "code")
    deployment.wait_until_healthy()
    deployment.wait_until_ended(runs, 180)
    ended = deployment.sql("SELECT DISTINCT status FROM runs WHERE run_id IN ('" + "', '".join(runs) + "')", "dagster")
    assert ended == "SUCCESS", deployment.runs()
    deployment.wait_for_publish_past(deployment.position())
    deployment.sql("DROP TABLE many")
    deployment.assert_equal()


@pytest.mark.image
@pytest.mark.timeout(900)
def test_a_run_whose_container_is_killed_is_ended(deployment: Deployment) -> None:
    deployment.sql("CREATE TABLE more (id int PRIMARY KEY, text text)")
    deployment.sql("INSERT INTO more SELECT n, repeat('x', 500) FROM generate_series(1, 400000) n")
    containers = wait_for(_containers, seconds=60, pause=0.2, what="a run")
    runs = deployment.active_runs()
    for container in containers:
        docker("kill", container, check=False)
    deployment.wait_until_ended(runs, 90)
    deployment.wait_for_publish_past(deployment.position())
    deployment.sql("DROP TABLE more")


def test_runs_get_every_setting() -> None:
    """Here a run's settings come from the daemon; one that lacked the slot's name would read another slot."""
    instance = yaml.safe_load((ROOT / "deploy/dagster.runs.yaml").read_text())
    passed = set(instance["run_launcher"]["config"]["env_vars"])
    daemon = yaml.safe_load((ROOT / "deploy/docker-compose.runs.yaml").read_text())["services"]["daemon"]["environment"]
    assert passed - {"DAGSTER_POSTGRES_URL"} == set(daemon)
    assert {PREFIX + name.upper() for name in Settings.model_fields} <= passed
    plain = yaml.safe_load((ROOT / "deploy/dagster.yaml").read_text())
    del instance["run_launcher"]
    assert instance == plain

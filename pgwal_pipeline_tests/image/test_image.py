"""The images and docker-compose.yaml, on a real engine: `make image-test`. The tests follow one another on one deployment.

`.ci/engine` has the engine and `.ci/image` builds; what they took is printed at the end.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgwal_pipeline_tests.image.deployment import PASSWORD, PROJECT, ROOT, SERVICES, Deployment, docker, run
from pgwal_pipeline_tests.support import wait_for

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

_MB = 1 << 20
_GRACE = {"code": 40, "spark": 20, "daemon": 40, "webserver": 30}  # seconds, as the compose file has them; 10 for the others


def _note(figure: str) -> None:
    """Print a figure for the closing summary (`-rA`)."""
    sys.stdout.write(f"{figure}\n")


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    made = Deployment(PGWAL_MAX_STALENESS="10s", CODE_MEMORY="3g", SPARK_MEMORY="2g")
    made.down(volumes=True)
    made.compose("run", "--rm", "--no-deps", "-e", f"IT={PASSWORD}", "passwords", "sh", "-c", 'printf "%s\\n" "$IT" > /run/pgwal/postgres')
    _note(f"Up and healthy after {made.up():.0f} s.")
    yield made
    made.down(volumes=True)


def test_the_ui_answers_and_has_the_code_location(deployment: Deployment) -> None:
    (entry,) = deployment.ui(
        "{ workspaceOrError { ... on Workspace { locationEntries { name loadStatus locationOrLoadError { __typename } } } } }"
    )["workspaceOrError"]["locationEntries"]
    assert entry == {"name": "pgwal_pipeline", "loadStatus": "LOADED", "locationOrLoadError": {"__typename": "RepositoryLocation"}}


def test_a_start_says_nothing_but_what_it_does(deployment: Deployment) -> None:
    logs = {service: docker("logs", deployment.container(service), seconds=30) for service in ("webserver", "spark", "migrate")}
    for service in ("code", "daemon", "webserver"):
        done = run("docker", "logs", deployment.container(service))
        logs[service] = done.stdout + done.stderr
    warned = {service: [line for line in log.splitlines() if "Warning" in line or "Traceback" in line] for service, log in logs.items()}
    assert {service: lines for service, lines in warned.items() if lines} == {}


def test_the_sensors_bring_the_shop_to_current(deployment: Deployment) -> None:
    publish = deployment.wait_for_publish_past(deployment.position())
    assert len(publish["tables"]) == 6
    deployment.assert_equal()


@pytest.mark.parametrize("how", ["killed", "stopped", "made anew"])
def test_containers_that_end_in_turn_lose_nothing(deployment: Deployment, how: str) -> None:
    for service in SERVICES:
        runs = deployment.active_runs()
        _ENDS[how](deployment, service)
        deployment.wait_until_healthy()
        deployment.wait_until_ended(runs, 60)
    deployment.wait_for_publish_past(deployment.position())
    assert deployment.ui("{ version }")


def _stop_and_start(deployment: Deployment, service: str) -> None:
    began = time.monotonic()
    docker("stop", "-t", str(_GRACE.get(service, 10)), deployment.container(service))
    assert time.monotonic() - began < _GRACE.get(service, 10) - 1, f"{service} was killed"
    docker("start", deployment.container(service))


def _make_anew(deployment: Deployment, service: str) -> None:
    docker("rm", "-f", deployment.container(service))
    deployment.compose("up", "-d", "--no-build", "--no-deps", service)


_ENDS = {"killed": Deployment.kill, "stopped": _stop_and_start, "made anew": _make_anew}


def test_nothing_was_lost(deployment: Deployment) -> None:
    deployment.assert_equal()


def test_runs_that_were_killed_leave_nothing_in_tmp(deployment: Deployment) -> None:
    left = deployment.execute("code", "sh", "-c", "ls -d /tmp/spark-* /tmp/blockmgr-* /tmp/*.so 2>/dev/null", check=False).stdout.split()
    assert left == []
    scratch = deployment.execute("spark", "sh", "-c", "ls -d /var/lib/pgwal/spark/blockmgr-*").stdout.split()
    assert len(scratch) == 1


def test_postgres_is_away_for_a_minute(deployment: Deployment) -> None:
    docker("stop", deployment.container("postgres"))
    time.sleep(60)
    assert all(deployment.inspect(service)["State"]["Running"] for service in SERVICES if service != "postgres")
    docker("start", deployment.container("postgres"))
    deployment.wait_until_healthy()
    deployment.wait_for_publish_past(deployment.position())
    deployment.assert_equal()


def test_a_drain_ends_within_the_grace_period(deployment: Deployment) -> None:
    deployment.sql("CREATE TABLE many (id int PRIMARY KEY, text text)")
    deployment.sql("INSERT INTO many SELECT n, repeat('x', 500) FROM generate_series(1, 600000) n")
    wait_for(lambda: deployment.active_runs(), seconds=60, pause=0.5, what="a run")
    time.sleep(2)
    runs = deployment.active_runs()
    began = time.monotonic()
    docker("stop", "-t", "40", deployment.container("code"))
    took = time.monotonic() - began
    state = deployment.inspect("code")["State"]
    docker("start", deployment.container("code"))
    _note(f"The code server ended after {took:.1f} s with a run at work.")
    assert took < 38
    assert not state["OOMKilled"]
    assert state["ExitCode"] in (0, 143)
    deployment.wait_until_healthy()
    deployment.wait_until_ended(runs, 60)
    deployment.wait_for_publish_past(deployment.position())
    deployment.sql("DROP TABLE many")


def test_volumes_outlive_the_containers(deployment: Deployment) -> None:
    before = deployment.published()
    assert before is not None
    deployment.down()
    assert deployment.containers() == []
    deployment.up()
    after = deployment.wait_for_publish_past(deployment.position())
    assert after["lsn"] != before["lsn"]
    deployment.assert_equal()


def test_a_dsn_that_cannot_be_read_makes_the_code_server_unhealthy(deployment: Deployment) -> None:
    done = deployment.execute("code", "health", "code", options=["-e", "PGWAL_SOURCE_DSN=host='x s3cret"], check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("PGWAL_SOURCE_DSN cannot be read as a connection string")
    assert "s3cret" not in done.stderr
    assert deployment.execute("code", "health", "code").returncode == 0


def test_health_checks_are_cheap(deployment: Deployment) -> None:
    """All together take less than 5 % of a core."""
    share = 0.0
    for service in SERVICES:
        check = deployment.inspect(service)["Config"]["Healthcheck"]
        if service != "postgres":
            timed = deployment.execute(service, "bash", "-c", f"TIMEFORMAT='%U %S'; time {' '.join(check['Test'][1:])}").stderr
            share += sum(float(part) for part in timed.split()) / (check["Interval"] / 1e9)
    assert share < 0.05


def test_memory_and_logs_are_bounded(deployment: Deployment) -> None:
    for service in SERVICES:
        host = deployment.inspect(service)["HostConfig"]
        assert 0 < host["Memory"] <= 4 << 30, service
        assert host["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "3"}, service
        if service != "postgres":
            assert (host["ReadonlyRootfs"], host["CapDrop"]) == (True, ["ALL"]), service
    assert "-Xmx1228m" in deployment.execute("spark", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'").stdout.split()


def test_dagsters_events_have_a_user_of_their_own(deployment: Deployment) -> None:
    powers = "rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication"
    assert deployment.sql(f"SELECT {powers} FROM pg_roles WHERE rolname = 'dagster'") == "f"
    users = "SELECT DISTINCT usename FROM pg_stat_activity WHERE datname = 'dagster' AND backend_type = 'client backend'"
    assert deployment.sql(users).split() == ["dagster"]
    assert deployment.sql("SELECT has_database_privilege('dagster', 'source', 'CONNECT')") == "f"


def test_no_secret_is_shown(deployment: Deployment) -> None:
    secrets = {PASSWORD, deployment.execute("postgres", "cat", "/run/pgwal/dagster").stdout.strip()}
    assert all(len(secret) > 20 for secret in secrets)
    shown = {"inspect": docker("inspect", *deployment.containers()), "logs": deployment.compose("logs", "--no-color").stdout}
    for service in SERVICES:
        shown[f"processes of {service}"] = docker("top", deployment.container(service), "-eo", "pid,args")
    for image in ("pgwal-pipeline", "pgwal-dagster"):
        shown[f"layers of {image}"] = docker("history", "--no-trunc", image) + docker("inspect", image)
    shown["volumes"] = deployment.execute("code", "sh", "-c", "grep -rlF -f /run/pgwal/dagster /var/lib/pgwal || true").stdout
    assert shown["volumes"] == ""
    found = [place for place, text in shown.items() for secret in secrets if secret in text or json.dumps(secret)[1:-1] in text]
    assert found == []


# What prints a line if an image holds a compiler, a cache, tests or a repository.
_LOOK = """
for program in gcc cc g++ make git pip uv; do command -v $program; done
find / -xdev -name .git -o -xdev -name pgwal_pipeline_tests -o -xdev -name '*.deb'
find /build /root/.cache /var/lib/apt/lists /var/cache/apt /opt/cache/pip -type f 2>/dev/null
"""


def test_images_hold_what_they_need_and_no_more() -> None:
    sizes = {}
    for image in ("pgwal-dagster", "pgwal-pipeline"):
        found = run("docker", "run", "--rm", "--user", "0", "--entrypoint", "sh", image, "-c", _LOOK, check=False).stdout
        assert found == "", image
        sizes[image] = int(docker("image", "inspect", "--format", "{{.Size}}", image)) // _MB
        label = docker("image", "inspect", "--format", '{{index .Config.Labels "org.opencontainers.image.version"}}', image)
        assert f'version = "{label}"' in (ROOT / "pyproject.toml").read_text()
    _note(f"Sizes in MB: {sizes}")
    assert sizes["pgwal-dagster"] <= 500
    assert sizes["pgwal-pipeline"] <= 2100


_READ_ONLY = ("--read-only", "--tmpfs", "/tmp:noexec,size=1g")
_ALONE = {
    "PGWAL_SOURCE_DSN": "service=pgwal-source",
    "PGWAL_SLOT": "alone",
    "PGWAL_PUBLICATION": "alone",
    "DAGSTER_HOME": "/tmp/dagster",
    "PGWAL_LAKE": "/tmp/lake",
}


def _alone(*command: str, options: tuple[str, ...] = (), seconds: float = 300.0) -> "subprocess.CompletedProcess[str]":
    """Run a container of the image by itself, beside the deployment's server, with an engine and a lake of its own."""
    given = [part for name, value in _ALONE.items() for part in ("-e", f"{name}={value}")]
    volume = f"{PROJECT}_passwords:/run/pgwal:ro"
    return run("docker", "run", "--rm", "-v", volume, *given, *options, "pgwal-pipeline", *command, seconds=seconds, check=False)


def test_any_user_with_a_read_only_root_and_a_tmp_without_programs(deployment: Deployment) -> None:
    """As OpenShift runs it: a user id without a name, of group 0. No internet either: only the deployment's network, without a route."""
    docker("network", "create", "--internal", f"{PROJECT}-alone")
    try:
        docker("network", "connect", "--alias", "postgres", f"{PROJECT}-alone", deployment.container("postgres"))
        options = (
            "--network",
            f"{PROJECT}-alone",
            "--user",
            "1000680000:0",
            "--read-only",
            "--tmpfs",
            "/tmp:noexec,size=1g",
            "--memory",
            "2g",
        )
        done = _alone("sh", "-c", "pgwal sync && pgwal verify && pgwal drop --yes", options=options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "Fetching" not in done.stdout + done.stderr
        done = _alone("python", "-m", "pgwal_pipeline.spark.jars", "s3", options=options)
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        docker("network", "disconnect", "-f", f"{PROJECT}-alone", deployment.container("postgres"), check=False)
        docker("network", "rm", f"{PROJECT}-alone")


def test_without_a_place_for_temporary_files_it_says_so() -> None:
    done = _alone("pgwal", "status", options=("--read-only",))
    assert done.returncode == 2
    assert done.stderr.strip() == "No file can be written in /tmp/pgwal; with a read-only root file system mount a tmpfs at /tmp."


def test_a_change_of_the_code_is_built_quickly_and_adds_little(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "lake", ".dagster", "artifacts"))
    with (copy / "pgwal_pipeline/pipeline/drain.py").open("a") as code:
        code.write(f"\n_CHANGED = {time.time()}\n")
    before = set(json.loads(docker("image", "inspect", "pgwal-pipeline"))[0]["RootFS"]["Layers"])
    began = time.monotonic()
    run(str(copy / ".ci/image"), "--build-arg", "CHANGED=1", seconds=600, env={**os.environ, "TAG": "changed"})
    took = time.monotonic() - began
    image = json.loads(docker("image", "inspect", "pgwal-pipeline:changed"))[0]
    sizes = [int(size) for size in docker("history", "--human=false", "--format", "{{.Size}}", "pgwal-pipeline:changed").split()]
    new = [layer for layer in image["RootFS"]["Layers"] if layer not in before]
    added = sum([size for size in sizes if size][: len(new)]) / _MB  # the newest come first
    _note(f"A change of the code: {took:.0f} s, {added:.1f} MB in {len(new)} layers")
    assert len(new) == 1
    assert added <= 20
    assert took <= 30

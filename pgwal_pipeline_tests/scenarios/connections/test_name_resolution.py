"""A source whose name is no longer found in the middle of a drain: it is waited for as any broken connection is, and named in the end."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from pgwal_pipeline import failpoints
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.proxy import Proxy, proxied, tcp
from pgwal_pipeline_tests.scenarios.connections.workload import assert_raw_is_whole, at_reads, drained, fill, prepared
from pgwal_pipeline_tests.support import Source

_NAME = "source.example"
_UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
_NO_ANSWER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class Names:
    """What stands in for the resolver: `_NAME` is this machine, but `failure` is raised the next `times` it is asked for."""

    def __init__(self) -> None:
        self.failure = _UNKNOWN
        self.times = 0
        self.asked = 0
        self._resolve = socket.getaddrinfo

    def look_up(self, host: Any, *args: Any, **named: Any) -> Any:
        if host != _NAME:
            return self._resolve(host, *args, **named)
        self.asked += 1
        if self.times > 0:
            self.times -= 1
            raise self.failure
        return self._resolve("127.0.0.1", *args, **named)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    monkeypatch.setattr(drains, "_PAUSE", 0.05)
    monkeypatch.setattr(drains, "_LONGEST_PAUSE", 0.2)
    return names


@pytest.fixture
def proxy(source: Source) -> Iterator[Proxy]:
    """Stands before the source, and ends each connection that has brought a part of what there is to read."""
    with Proxy(*tcp(source)) as proxy:
        proxy.cut_after = 900_000
        yield proxy


def by_name(source: Source, proxy: Proxy) -> str:
    """The DSN of the source behind `proxy`, with a name that only `names` knows."""
    return make_dsn(**{**parse_dsn(proxied(source, proxy)), "host": _NAME})


def test_a_name_that_is_not_found_for_a_while(
    source: Source, proxy: Proxy, make_pipeline: Callable[..., Pipeline], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(source)
    pipeline = make_pipeline(source_dsn=by_name(source, proxy), memory_budget="1MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    fill(source, 60)
    outages = [_UNKNOWN, _NO_ANSWER]

    def forget(passed: int) -> None:
        if passed > 4 and outages and not names.times:
            names.failure, names.times = outages.pop(), 3

    at_reads(monkeypatch, forget)
    report = drained(pipeline)
    assert not outages
    said = [warning for warning in report.warnings if f"@{_NAME}:" in warning]
    assert all("goes on from there in" in warning for warning in report.warnings)
    assert any("its host name is not known just now;" in warning for warning in said)
    assert any("its host name is not known;" in warning for warning in said)
    assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes


def test_a_name_that_is_never_found_again(
    source: Source, proxy: Proxy, make_pipeline: Callable[..., Pipeline], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "_PATIENCE", 0.5)
    prepared(source)
    pipeline = make_pipeline(source_dsn=by_name(source, proxy), memory_budget="1MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    fill(source, 60)

    def forget(passed: int) -> None:
        if passed == 8:
            names.times = 1 << 30

    at_reads(monkeypatch, forget)
    with pytest.raises(SourceUnavailable) as caught:
        pipeline.drain()
    monkeypatch.setattr(failpoints, "hit", lambda name: None)
    user, database = source.sql("SELECT user, current_database()")[0]
    sentence = (
        f"The source {user}@{_NAME}:{proxy.port}/{database} cannot be reached: its host name is not known; check PGWAL_SOURCE_DSN and that "
        f"the server is up."
    )
    assert str(caught.value) == sentence
    plan = pipeline.ledger.plan()
    assert plan is not None
    (read,) = pipeline.ledger.reads(plan).values()
    assert read.window.changes > 0
    # One that was never reached is not waited for.
    asked = names.asked
    with pytest.raises(SourceUnavailable) as caught:
        pipeline.drain()
    assert str(caught.value) == sentence
    assert names.asked == asked + 1
    names.times = 0
    # On a busy machine the drain that failed may have finished a window before.
    finished = sum(window.changes for window in pipeline.ledger.windows())
    report = drained(pipeline)
    assert (report.windows[0].end_lsn, report.windows[0].changes) == (read.window.end_lsn, read.window.changes)
    assert assert_raw_is_whole(source, pipeline.settings.lake) == finished + report.changes


# In a mount namespace of its own this process has an /etc/hosts of its own, and asks no name server but one that is not there.
_OWN_NAMES = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/nsswitch.conf && mount --bind "$3" /etc/resolv.conf && shift 3 && "$@"'
_DRAIN = """
import json
from pathlib import Path
from pgwal_pipeline import failpoints
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.settings import Settings

passed, refused, known = 0, 0, Path("/etc/hosts").read_text()

def warn(text):
    global refused
    print(json.dumps(text))
    refused += "host name" in text
    if "host name" in text and refused == 2:
        Path("/etc/hosts").write_text(known)

def hit(name):
    global passed
    passed += name == "drain.read"
    if name == "drain.read" and passed > 4 and Path("/etc/hosts").read_text():
        Path("/etc/hosts").write_text("")

failpoints.hit, drains._PAUSE, drains._PATIENCE = hit, 0.05, 1.5
told = Silent()
told.warn = warn
try:
    drains.drain(Settings.from_environment(), progress=told)
except SourceUnavailable as error:
    print(json.dumps(f"ended: {error}"))
"""


def test_a_name_that_the_machine_itself_does_not_find(
    source: Source, proxy: Proxy, make_pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    """As the two above, by the resolver that every program of the machine asks."""
    files = {
        "hosts": f"127.0.0.1 {_NAME}\n",
        "nsswitch": "hosts: files dns\n",
        "resolv": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    inside = ["unshare", "-rm", "sh", "-c", _OWN_NAMES, "sh", *(str(tmp_path / name) for name in files)]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make a namespace with an /etc/hosts of its own; the tests above stand in for the resolver")
    prepared(source)
    pipeline = make_pipeline(memory_budget="1MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    fill(source, 60)
    environment = pipeline.environment(PGWAL_SOURCE_DSN=by_name(source, proxy), PGWAL_MEMORY_BUDGET="1MB")
    command = [*inside, sys.executable, "-c", _DRAIN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) > 2
    assert said[-1].startswith("ended: The source ")
    assert f"@{_NAME}:" in said[-1]
    assert "its host name is not known" in said[-1]
    assert len([line for line in said if "was lost while reading" in line]) == 2, said
    # What came whole before the second break is not counted yet, if anything did.
    plan = pipeline.ledger.plan()
    reads = {} if plan is None else pipeline.ledger.reads(plan)
    kept = sum(window.changes for window in pipeline.ledger.windows()) + sum(read.window.changes for read in reads.values())
    report = drained(pipeline)
    assert 0 < kept < sum(window.changes for window in pipeline.ledger.windows())
    assert assert_raw_is_whole(source, pipeline.settings.lake) == sum(window.changes for window in pipeline.ledger.windows())
    assert report.warnings == ()

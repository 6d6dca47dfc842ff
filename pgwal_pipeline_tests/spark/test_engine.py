"""The warm engine: one is started and shared, one that cannot be trusted is replaced, and none outlives its use."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark import engine
from pgwal_pipeline.spark.engine_folder import EngineFolder, EngineRecord, write_private
from pgwal_pipeline.spark.session import find_engine, uses_engine
from pgwal_pipeline_tests.commands import command_lines
from pgwal_pipeline_tests.support import wait_for

_USE = """
import sys
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
spark = spark_session(Settings.from_environment())
print(spark.sql("SELECT 6 * 7 AS n").collect()[0]["n"], flush=True)
sys.stdin.readline()
"""


class Engine:
    """An engine of the test's own: no other has its lake."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lake = folder / "lake"
        self.lake.mkdir()
        values = {
            "PGWAL_LAKE": str(self.lake),
            "PGWAL_SPARK_MASTER": "local[2]",
            "PGWAL_SPARK_IDLE": "10min",
            "PGWAL_SPARK_CONF": '{"spark.driver.memory": "1g", "spark.hadoop.secret": "hunter2"}',
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        self.clients: list[subprocess.Popen[str]] = []
        self.folders: set[Path] = set()

    @property
    def folder(self) -> EngineFolder:
        return self.folder_of()

    def folder_of(self, **environment: str) -> EngineFolder:
        found = find_engine(Settings.from_environment({**os.environ, **environment}))
        assert found is not None
        self.folders.add(found.path)
        return found

    def use(self, **environment: str) -> subprocess.Popen[str]:
        """A process that has a session in the engine, until its standard input is closed."""
        self.folder_of(**environment)
        pipe = subprocess.PIPE
        client = subprocess.Popen([sys.executable, "-c", _USE], env=os.environ | environment, stdin=pipe, stdout=pipe, text=True)
        self.clients.append(client)
        return client

    def used(self, **environment: str) -> int:
        """Use the engine, and leave it; returns the JVM's process id."""
        client = self.use(**environment)
        assert answer(client) == "42"
        leave(client)
        return self.jvm

    @property
    def jvm(self) -> int:
        record = self.folder.record()
        assert record is not None
        return record.jvm_pid


def answer(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline().strip()


def leave(client: subprocess.Popen[str]) -> None:
    client.communicate(timeout=60)
    assert client.returncode == 0


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine(tmp_path, monkeypatch)
    yield made
    for client in made.clients:
        client.kill()
        client.wait()
    for path in made.folders:
        engine.stop(EngineFolder(path))
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.long
def test_what_becomes_of_an_engine(own: Engine) -> None:
    """One engine's life, for each start costs many seconds."""
    first, second = own.use(), own.use()
    assert (answer(first), answer(second)) == ("42", "42")
    jvm, record = own.jvm, own.folder.record()
    assert record is not None
    # Two that start at once make one.
    servers = [pid for pid, line in command_lines().items() if str(own.folder.path).encode() in line and b"SparkSubmit" in line]
    assert servers == [jvm]
    # No other user can find it out.
    for path in own.folder.path.rglob("*"):
        if own.folder.scratch not in (path, *path.parents):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    for line in command_lines().values():
        assert record.token.encode() not in line
        assert b"hunter2" not in line
    shown = engine.status(own.folder)
    assert shown["running"]
    assert shown["pid"] == jvm
    assert record.token not in json.dumps(shown)
    # It stays while it is used, and afterwards.
    leave(first)
    leave(second)
    assert own.folder.clients() == ([], [])
    assert own.used() == jvm

    # A wrong token: whoever wrote it is not trusted.
    text = json.dumps({**json.loads((own.folder.path / "engine.json").read_text()), "token": "wrong"})
    write_private(own.folder.path / "engine.json", text)
    another = own.used()
    assert another != jvm
    assert not runs(jvm)

    # A client that is killed takes its engine with it: nothing goes on without its run.
    client = own.use()
    assert answer(client) == "42"
    client.kill()
    wait_for(lambda: not runs(another), what="the engine of a client that was killed to end")
    wait_for(lambda: own.folder.engine_pid() is None, what="its process to end")
    fourth = own.used()
    assert fourth != another

    # The engine's own process killed: its JVM ends with it, and nothing stands in the next one's way.
    pid = own.folder.engine_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not runs(fourth), what="the JVM to end")
    assert own.folder.record() is None
    assert not engine.status(own.folder)["running"]

    # Unused for as long as was wanted.
    fifth = own.used(PGWAL_SPARK_IDLE="1s")
    wait_for(lambda: not runs(fifth), what="an engine that nobody uses to end")
    wait_for(lambda: own.folder.engine_pid() is None, what="its process to end")
    assert not own.folder.scratch.exists()


@pytest.mark.soak
def test_an_engine_of_an_older_version_and_one_whose_jvm_died_are_replaced(own: Engine) -> None:
    older = own.used()
    text = json.dumps({**json.loads((own.folder.path / "engine.json").read_text()), "version": "0.0.1"})
    write_private(own.folder.path / "engine.json", text)
    newer = own.used()
    assert newer != older
    assert not runs(older)
    os.kill(newer, signal.SIGKILL)
    assert own.used() != newer


@pytest.mark.soak
def test_an_engine_that_hangs_is_replaced(own: Engine) -> None:
    jvm = own.used()
    os.kill(jvm, signal.SIGSTOP)
    assert own.used() != jvm
    assert not runs(jvm)


@pytest.mark.soak
def test_an_engine_ends_with_its_owner(own: Engine) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "dagster", "dev"])
    jvm = own.used()
    own.folder.add_owner(owner.pid)
    time.sleep(2)
    assert runs(jvm)
    owner.kill()
    owner.wait()
    wait_for(lambda: not runs(jvm), what="the engine to end with its owner")


@pytest.mark.soak
def test_other_settings_replace_an_engine_that_nobody_uses(own: Engine) -> None:
    jvm = own.used()
    client = own.use(PGWAL_SPARK_CONF='{"spark.driver.memory": "900m"}')
    assert answer(client) == "42"
    wait_for(lambda: not runs(jvm), what="the engine with the old settings to end")
    leave(client)


def _pretended(own: Engine, folder: EngineFolder) -> subprocess.Popen[str]:
    """A process that holds an engine's lock in `folder`, with a record of the test's lake."""
    own.folders.add(folder.path)
    for part in ("clients", "owners"):
        (folder.path / part).mkdir(parents=True, exist_ok=True)
    hold = "from pathlib import Path; from pgwal_pipeline.spark.engine_folder import EngineFolder; import sys, time\n"
    hold += f"lock = EngineFolder(Path({str(folder.path)!r})).be_the_engine()\nprint(lock is not None, flush=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    own.clients.append(process)
    assert answer(process) == "True"
    folder.write_record(EngineRecord(process.pid, process.pid, 1, "token", engine.engine_version(), str(own.lake), 0.0))
    return process


def test_an_engine_of_another_machine_is_left_alone(own: Engine) -> None:
    """Its process id is that of another process here: folders may be shared among hosts and containers."""
    here, there = own.folder.of("older-settings"), EngineFolder(own.folder.path.with_name("0badcafe-older-settings"))
    ours, theirs = _pretended(own, here), _pretended(own, there)
    engine._end_others(str(own.lake), own.folder)
    assert ours.wait(10) == -signal.SIGTERM
    assert theirs.poll() is None
    assert there.record() is not None
    theirs.kill()
    theirs.wait()
    engine._end_others(str(own.lake), own.folder)
    assert (there.path / "engine.json").exists()
    week = time.time() - 8 * 86400
    os.utime(there.path, (week, week))
    engine._end_others(str(own.lake), own.folder)
    assert not there.path.exists()


def _failing(own: Engine, conf: str) -> str:
    own.folder_of(PGWAL_SPARK_CONF=conf)
    code = "import sys\nfrom pgwal_pipeline.settings import Settings\nfrom pgwal_pipeline.spark.session import spark_session\n"
    code += "try:\n    spark_session(Settings.from_environment())\nexcept Exception as error:\n    print(type(error).__name__, error)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PGWAL_SPARK_CONF": conf}, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_an_engine_that_does_not_start_says_why(own: Engine) -> None:
    said = _failing(own, '{"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "many"}')
    assert said.startswith("LakeError Spark did not start on local[2] (")
    assert "PGWAL_SPARK_CONF" in said


@pytest.mark.parametrize(
    ("values", "used"),
    [
        ({}, True),
        ({"spark_master": "local"}, True),
        ({"spark_master": "local[4,2]"}, True),
        ({"spark_master": "local-cluster[2,1,1024]"}, False),
        ({"spark_master": "spark://host:7077"}, False),
        ({"spark_idle": 0}, False),
        ({"spark_remote": "sc://host"}, False),
    ],
)
def test_who_uses_an_engine(values: dict[str, object], used: bool, make_settings: Callable[..., Settings]) -> None:
    assert uses_engine(make_settings(**values)) == used


@pytest.fixture
def make_settings() -> Callable[..., Settings]:
    return lambda **values: Settings.from_environment({}, **values)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgwal_pipeline.messages.errors import PgwalError

    monkeypatch.setattr("pgwal_pipeline.spark.engine_folder.user_cache", lambda: tmp_path)
    EngineFolder.of("a").path.chmod(0o777)
    with pytest.raises(PgwalError, match="others may write to it"):
        EngineFolder.of("a")


def test_a_folder_that_was_removed_by_half_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgwal_pipeline.spark.engine_folder.user_cache", lambda: tmp_path)
    folder = EngineFolder.of("a")
    for part in ("clients", "owners"):
        (folder.path / part).rmdir()
    folder.clear_if_dead()
    assert folder.clients() == ([], [])
    assert list(folder.owners()) == []
    assert EngineFolder.all() == [folder]
    assert folder.is_here


def test_an_engine_whose_file_has_another_form_is_replaced(own: Engine) -> None:
    """An older version wrote other fields: such an engine is ended, rather than waited for as if it were starting."""
    folder = own.folder
    older = _pretended(own, folder)
    folder.remove_record()
    # While it starts there is no file, and it is waited for.
    assert engine._running(folder) is None
    assert older.poll() is None
    write_private(folder.path / "engine.json", json.dumps({"pid": older.pid, "address": "sc://localhost:1", "version": "0.0.1"}))
    assert engine._running(folder) is None
    assert older.wait(10) == -signal.SIGTERM
    assert folder.engine_pid() is None
    assert not folder.has_record()

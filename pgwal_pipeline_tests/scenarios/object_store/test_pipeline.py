"""The whole pipeline on a lake in an object store: the commands, kills, two at once, and a store that fails."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
import polars as pl
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.host.spawn import port_free
from pgwal_pipeline.lake import isolation, rewrite, upkeep
from pgwal_pipeline.lake.layout import storage_options
from pgwal_pipeline.messages.errors import LakeError, PgwalError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline.as_of import find_publish
from pgwal_pipeline.pipeline.doctor import examine
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.pipeline.upkeep import keep_up
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.published.state import open_state
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.commands import Commands, command_lines
from pgwal_pipeline_tests.connect_server import ConnectServer
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.object_store.store import UNSET, VARIABLES, FaultyStore, faulty_store, object_store
from pgwal_pipeline_tests.support import Source, wait_for

_TABLES = ("public.a", "public.b")


@dataclass(frozen=True)
class Place:
    """A store that can fail, and a Spark Connect server that knows the way to it, which the first test that needs it starts."""

    store: FaultyStore
    server: ConnectServer

    @property
    def spark(self) -> str:
        """The server's address."""
        if port_free(self.server.port):
            self.server.start()
        return self.server.address


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("store")
    with object_store() as url, faulty_store(url, folder) as store, pytest.MonkeyPatch.context() as environment:
        for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": store.url}.items():
            environment.setenv(name, value)
        for name in UNSET:
            environment.delenv(name, raising=False)
        settings = Settings(
            lake="s3://lakes/any",
            spark_master="local[2]",
            spark_conf={"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"},
        )
        server = ConnectServer(settings, folder / "connect.log")
        yield Place(store, server)
        server.stop()


@pytest.fixture
def pipeline(place: Place, source: Source, make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """A pipeline on a lake of its own in the store, two tables with some rows before it."""
    made = make_pipeline(lake=f"s3://lakes/{uuid.uuid4().hex}", spark_remote=place.server.address)
    source.sql("CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO a SELECT i, 'a' FROM generate_series(1, 100) i; INSERT INTO b SELECT i, 'b' FROM generate_series(1, 10) i")
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    made.spark = lambda: spark_session(made.settings.model_copy(update={"spark_remote": place.spark}))
    yield made
    place.store.heal()


def change(source: Source, number: int) -> None:
    """Some changes of both tables."""
    source.sql(f"INSERT INTO a VALUES ({1000 + number}, 'n'); UPDATE a SET v = 'u{number}' WHERE id % 7 = {number % 7}")
    source.sql(f"DELETE FROM a WHERE id = {number + 1}; UPDATE b SET id = {500 + number} WHERE id = {number + 1}")


def rows(source: Source, table: str) -> list[tuple[Any, ...]]:
    return sorted(source.sql(f"SELECT * FROM {table}"))


def assert_current(pipeline: Pipeline) -> None:
    """The newest publish, read by Polars at its versions, holds what the source holds."""
    publish = pipeline.ledger.publish()
    assert publish is not None
    for table in _TABLES:
        pointer = publish.tables[TableName.parse(table)]
        assert pointer.path.startswith(pipeline.settings.lake)
        frame = (
            pl.scan_delta(pointer.path, version=pointer.version, storage_options=storage_options(pointer.path)).select("id", "v").collect()
        )
        assert sorted(frame.rows()) == rows(pipeline.source, table)


def assert_readers_agree(pipeline: Pipeline, since: str, session: Any) -> None:
    """Each reader of the newest state has the source's rows, and the changes since `since` lead to them."""
    older, state = open_state(pipeline.settings, since), open_state(pipeline.settings)
    now = {
        "polars": state.polars("public.a").select("id", "v").collect().rows(),
        "arrow": [(row["id"], row["v"]) for row in state.arrow("public.a", ["id", "v"]).to_pylist()],
        "duckdb": state.duckdb(["public.a"]).sql("SELECT id, v FROM public.a").fetchall(),
        **({} if session is None else {"spark": [tuple(row) for row in state.spark("public.a", session).select("id", "v").collect()]}),
    }
    assert {reader: sorted(found) for reader, found in now.items()} == dict.fromkeys(now, rows(pipeline.source, "a"))
    changes = state.changes("public.a", since=older)
    assert not changes.complete, changes.reason
    for found in (changes.arrow().to_pylist(), *([] if session is None else [[row.asDict() for row in changes.spark(session).collect()]])):
        held = dict(older.polars("public.a").select("id", "v").collect().rows())
        held |= {row["id"]: row["v"] for row in found if row["_pgwal_change"] != "delete"}
        for row in found:
            if row["_pgwal_change"] == "delete":
                del held[row["id"]]
        assert sorted(held.items()) == rows(pipeline.source, "a")


def assert_raw_once(pipeline: Pipeline) -> None:
    """Raw has no change twice and every change that was counted, window by window."""
    counted = 0
    for table in _TABLES:
        path = pipeline.lake.raw(TableName.parse(table))
        frame = (
            pl.scan_delta(path, storage_options=storage_options(path)).select("_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op").collect()
        )
        assert frame.is_unique().all()
        counted += len(frame.filter(pl.col("_pgwal_op") != "K"))
    assert counted == sum(window.changes for window in pipeline.ledger.windows())


@pytest.mark.long
@pytest.mark.parametrize("connect", [pytest.param(False, marks=pytest.mark.soak), True], ids=["own_spark", "connect"])
def test_the_commands(connect: bool, place: Place, pipeline: Pipeline, tmp_path: Path) -> None:
    """With a Spark of the command's own first: the way of the keys and the jars to a JVM is another one there."""
    commands = Commands(tmp_path, pipeline.source.dsn)
    settings = {"PGWAL_LAKE": pipeline.settings.lake, "PGWAL_SLOT": pipeline.settings.slot, "PGWAL_PUBLICATION": pipeline.settings.slot}
    commands.environment |= settings
    commands.environment.pop("SPARK_CONNECT_MODE_ENABLED", None)
    secret = VARIABLES["AWS_SECRET_ACCESS_KEY"].encode()
    process = commands.start("sync", "--json")
    while process.poll() is None:
        assert not any(secret in line for line in command_lines().values())
        time.sleep(0.5)
    out, err = process.communicate()
    assert process.returncode == 0, err
    first = json.loads(out)
    assert {taken["table"]: taken["rows"] for taken in first["snapshots"]} == {"public.a": 100, "public.b": 10}
    assert_current(pipeline)
    if connect:
        commands.environment["PGWAL_SPARK_REMOTE"] = place.spark
    change(pipeline.source, 1)
    second = commands.json("sync")
    assert second["changes"] > 10
    assert_current(pipeline)
    assert commands.json("as-of", first["publish"]["lsn"])["lsn"] == first["publish"]["lsn"]
    assert_readers_agree(pipeline, first["publish"]["lsn"], spark_session(pipeline.settings) if connect else None)
    status = commands.json("status")
    assert status["tables"]["public.a"]["rows"] == 100
    assert status["tables"]["public.a"]["current_path"].startswith("s3://lakes/")
    assert commands.json("doctor")["ok"]
    assert secret not in f"{out}{err}{status}".encode()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or secret not in path.read_bytes(), path


def test_a_backlog_is_caught_up(pipeline: Pipeline) -> None:
    pipeline.settings = pipeline.settings.model_copy(update={"catchup_threshold": 1 << 20, "catchup_slots": 1})
    pipeline.drain()
    for first in range(1000, 5000, 100):
        pipeline.source.sql(f"INSERT INTO a SELECT i, repeat(md5(i::text), 10) FROM generate_series({first}, {first + 99}) i")
    report = pipeline.drain()
    assert [window.changes > 0 for window in report.windows] == [True, True]
    assert_raw_once(pipeline)
    path = pipeline.lake.raw(TableName("public", "a"))
    assert sorted(pl.read_delta(path, storage_options=storage_options(path))["id"].to_list()) == list(range(1000, 5000))


def _cut(octets: bytes) -> bytes:
    return octets[: len(octets) // 2]


def _turn_a_bit(octets: bytes) -> bytes:
    return octets[: len(octets) // 2] + bytes([octets[len(octets) // 2] ^ 4]) + octets[len(octets) // 2 + 1 :]


def _garble(octets: bytes) -> bytes:
    return b"\x00\xffgarbage\x1b[31m" * 20


def _gone(octets: bytes) -> None:
    return None


@dataclass(frozen=True)
class Objects:
    """What the store holds of one lake, from which one object at a time is damaged."""

    pipeline: Pipeline
    client: Any

    def refuses(self, work: Callable[[], object], folder: str, suffix: str, damage: Callable[[bytes], bytes | None]) -> None:
        """`work` ends in one sentence with the place and what to do while the newest such object is damaged, or gone."""
        prefix = f"{self.pipeline.settings.lake.removeprefix('s3://lakes/')}/{folder}/"
        found = self.client.list_objects_v2(Bucket="lakes", Prefix=prefix)["Contents"]
        place = {"Bucket": "lakes", "Key": max((one["LastModified"], one["Key"]) for one in found if one["Key"].endswith(suffix))[1]}
        whole = self.client.get_object(**place)["Body"].read()
        before = self.pipeline.ledger.publish(), self.pipeline.ledger.frontier()
        left = damage(whole)
        _ = self.client.delete_object(**place) if left is None else self.client.put_object(**place, Body=left)
        with pytest.raises(LakeError) as caught:
            work()
        sentence = str(caught.value)
        assert folder in sentence, (damage, sentence)
        assert "restore" in sentence, (damage, sentence)
        assert suffix == ".json" or place["Key"].rsplit("/", 1)[1] in sentence, (damage, sentence)
        assert "\n" not in sentence and "\x1b" not in sentence
        assert len(sentence) < 900
        self.client.put_object(**place, Body=whole)
        assert before == (self.pipeline.ledger.publish(), self.pipeline.ledger.frontier())


@pytest.mark.soak
def test_what_is_damaged_or_gone_in_the_store(pipeline: Pipeline, place: Place) -> None:
    objects = Objects(pipeline, boto3.client("s3", region_name="us-east-1", endpoint_url=place.store.url))
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    objects.refuses(pipeline.publish, "snapshot/public/a", ".json", _gone)
    pipeline.publish()
    change(pipeline.source, 1)
    pipeline.drain()
    objects.refuses(pipeline.publish, "current/public/a", ".json", _garble)
    objects.refuses(pipeline.publish, "raw/public/a", ".json", _cut)
    objects.refuses(pipeline.publish, "raw/public/a", ".json", _gone)
    objects.refuses(pipeline.publish, "raw/public/a", ".parquet", _turn_a_bit)
    pipeline.publish()
    assert_current(pipeline)
    change(pipeline.source, 2)
    objects.refuses(pipeline.drain, "_pgwal/windows", ".json", _garble)
    objects.refuses(pipeline.drain, "_pgwal/windows", ".parquet", _gone)
    objects.refuses(pipeline.drain, "_pgwal/tables", ".parquet", _turn_a_bit)
    objects.refuses(pipeline.drain, "raw/public/a", ".json", _cut)
    pipeline.drain()
    assert_raw_once(pipeline)


@pytest.mark.soak
def test_every_stage_and_a_table_read_again(pipeline: Pipeline) -> None:
    assert [check.name for check in examine(pipeline.environment()) if not check.ok] == []
    pipeline.sync()
    first = pipeline.ledger.publish()
    assert first is not None
    before = {table: rows(pipeline.source, table) for table in _TABLES}
    change(pipeline.source, 2)
    pipeline.source.sql("TRUNCATE b; INSERT INTO b VALUES (1, 'again'); ALTER TABLE a ADD COLUMN w int DEFAULT 7")
    pipeline.sync()
    pipeline.sync()
    shown = status(pipeline.settings)
    assert {table["state"] for table in shown["tables"].values()} == {"ready"}
    assert verify(pipeline.settings, pipeline.spark, progress=Silent()).equal
    earlier = find_publish(pipeline.settings, format_lsn(first.lsn))
    for table in _TABLES:
        found = earlier["tables"][table]
        frame = pl.read_delta(found["path"], version=found["version"], storage_options=storage_options(found["path"]))
        assert sorted(frame.select("id", "v").rows()) == before[table]
    assert_raw_once(pipeline)


@pytest.mark.soak
def test_files_are_rewritten_between_publishes(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "_ROWS", -1)
    monkeypatch.setattr(isolation, "_FEW_ROWS", -1)
    monkeypatch.setattr(upkeep, "_SMALL_FILES", 2)
    monkeypatch.setattr(upkeep, "_TINY", 0)
    pipeline.sync()
    for number in range(3):
        change(pipeline.source, number)
        pipeline.sync()
    path = pipeline.lake.current(TableName("public", "a"))
    before = len(DeltaTable(path, storage_options=storage_options(path)).file_uris())
    done = keep_up(pipeline.settings, pipeline.spark, pipeline.ledger, timedelta(days=1), Silent())
    assert (done.tables, done.rewritten, done.warnings) == (2, 2, ())
    assert len(DeltaTable(path, storage_options=storage_options(path)).file_uris()) < before
    assert_current(pipeline)
    change(pipeline.source, 5)
    pipeline.sync()
    assert_current(pipeline)
    assert verify(pipeline.settings, pipeline.spark, progress=Silent()).equal


_CHILD = {
    "drain": "from pgwal_pipeline.pipeline.drain import drain\ndrain(settings, progress=progress)",
    "publish": "from pgwal_pipeline.spark.session import spark_session\nfrom pgwal_pipeline.pipeline.publish import publish\n"
    "publish(settings, lambda: spark_session(settings), progress=progress)",
    "snapshot": "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)",
}


def child(pipeline: Pipeline, place: Place, stage: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PGWAL_SPARK_REMOTE": place.spark, "PGWAL_BUSY_TIMEOUT": "60s", **environment}
    return pipeline.child(_CHILD[stage], environment=given, timeout=240)


@pytest.mark.parametrize(
    ("stage", "point"),
    [
        pytest.param("drain", "drain.after_files", marks=pytest.mark.soak),
        pytest.param("drain", "drain.after_prepared", marks=pytest.mark.soak),
        pytest.param("drain", "raw.between_tables", marks=pytest.mark.soak),
        pytest.param("drain", "drain.before_confirm", marks=pytest.mark.soak),
        pytest.param("publish", "publish.in_merge", marks=pytest.mark.soak),
        pytest.param("publish", "publish.in_merge=kill@2", marks=pytest.mark.soak),
        pytest.param("publish", "publish.before_record", marks=pytest.mark.soak),
    ],
)
def test_killed_at(stage: str, point: str, pipeline: Pipeline, place: Place) -> None:
    pipeline.sync()
    change(pipeline.source, 3)
    if stage == "publish":
        pipeline.drain()
    action = point if "=" in point else f"{point}=kill"
    killed = child(pipeline, place, stage, PGWAL_FAILPOINTS=action)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    change(pipeline.source, 4)
    pipeline.drain()
    pipeline.publish()
    assert_current(pipeline)
    assert_raw_once(pipeline)


@pytest.mark.soak
def test_two_of_each_at_once(pipeline: Pipeline, place: Place) -> None:
    pipeline.sync()
    for number, stage in enumerate(("drain", "drain", "publish")):
        change(pipeline.source, 5 + number)
        if stage == "publish":
            pipeline.drain()
        with ThreadPoolExecutor(2) as pool:
            runs = list(pool.map(lambda _, stage=stage: child(pipeline, place, stage), range(2)))
        assert [run.returncode for run in runs] == [0, 0], [run.stderr for run in runs]
    change(pipeline.source, 9)
    pipeline.sync()
    assert_current(pipeline)
    assert_raw_once(pipeline)


@pytest.mark.soak
def test_a_second_publish_waits_for_the_first(pipeline: Pipeline, place: Place, tmp_path: Path) -> None:
    """Two sessions that commit one version of a table at once: on an object store Spark would take the last one for the only one."""
    pipeline.sync()
    change(pipeline.source, 6)
    pipeline.drain()
    marker = tmp_path / "merging"
    environment = pipeline.environment(PGWAL_SPARK_REMOTE=place.spark, PGWAL_FAILPOINTS=f"publish.in_merge=touch:{marker}@1")
    prelude = "from pgwal_pipeline.settings import Settings\nfrom pgwal_pipeline.messages.progress import Silent\n"
    code = f"{prelude}settings, progress = Settings.from_environment(), Silent()\n{_CHILD['publish']}"
    first = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(marker.exists, seconds=60, what="the merge")
    change(pipeline.source, 7)
    pipeline.drain()
    impatient = replace(pipeline, settings=pipeline.settings.model_copy(update={"busy_timeout": 0.5}))
    with pytest.raises(PgwalError, match=r"\(publish\) is held by another run \(pid \d+"):
        impatient.publish()
    marker.unlink()
    _, said = first.communicate(timeout=120)
    assert first.returncode == 0, said
    pipeline.publish()
    assert_current(pipeline)


@pytest.mark.soak
def test_a_store_that_fails_now_and_then(pipeline: Pipeline, place: Place) -> None:
    pipeline.sync()
    place.store.fail("PUT|POST", ".", "500", chance=0.1, seed=3)
    place.store.fail("GET|HEAD", ".", "503", chance=0.05, seed=4)
    place.store.fail(".*", ".", "reset", chance=0.03, seed=5)
    for number in range(3):
        change(pipeline.source, 10 + number)
        pipeline.drain()
        pipeline.publish()
    place.store.heal()
    assert len(place.store.failed()) > 10
    assert_current(pipeline)
    assert_raw_once(pipeline)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(r"/raw/.*parquet", marks=pytest.mark.soak),
        pytest.param(r"/_pgwal/windows/", marks=pytest.mark.soak),
        pytest.param(r"/current/public/a/.*parquet", marks=pytest.mark.soak),
        pytest.param(r"/current/public/a/_delta_log/", marks=pytest.mark.soak),
    ],
)
def test_a_store_that_fails_for_good_at(path: str, pipeline: Pipeline, place: Place) -> None:
    """One sentence that names the place, and nothing confirmed that is not durable; the next run makes it good."""
    pipeline.sync()
    change(pipeline.source, 14)
    place.store.fail("PUT|POST", path, "500")
    with pytest.raises(LakeError) as caught:
        pipeline.drain()
        pipeline.publish()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 700
    assert pipeline.settings.lake in sentence or "public.a" in sentence
    change(pipeline.source, 15)
    place.store.heal()
    pipeline.drain()
    pipeline.publish()
    assert_current(pipeline)
    assert_raw_once(pipeline)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in sentence

"""The commands as a user runs them: processes of their own, JSON on stdout, one sentence on stderr, exit codes."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.oracle import assert_equal
from pgwal_pipeline_tests.support import Source, wait_for


@pytest.mark.long
def test_the_main_job_from_nothing(source: Source, commands: Commands, connect_address: str) -> None:
    source.sql('CREATE TABLE "Order Lines" (id int, line int, price numeric(8, 2), PRIMARY KEY (id, line))')
    source.sql("CREATE TABLE nokey (a int)")
    source.sql('INSERT INTO "Order Lines" SELECT i, 1, i FROM generate_series(1, 30) i')
    name = 'public."Order Lines"'
    # Commands that start a Spark of their own are in test_secrets, in the demo, and on an object store.
    commands.environment["PGWAL_SPARK_REMOTE"] = connect_address
    before = commands.json("status")
    engine = {"running": False, "pid": None, "since": None, "remote": None, "used_at": None}
    assert before == {"slot": None, "frontier": None, "publish": None, "engine": engine, "tables": {}}
    assert commands.run("as-of")[0] == 1
    first = commands.json("sync")
    assert set(first) == {"windows", "changes", "snapshots", "publish", "warnings", "seconds"}
    assert [(taken["table"], taken["rows"]) for taken in first["snapshots"]] == [(name, 30)]
    assert set(first["seconds"]) == {"drain", "decode", "write", "snapshot", "session", "publish", "total"}
    assert any("nokey" in warning for warning in first["warnings"])
    source.sql('UPDATE "Order Lines" SET line = 2 WHERE id = 3')
    second = commands.json("sync")
    assert (second["changes"], [window["changes"] for window in second["windows"]]) == (1, [1])
    status = commands.json("status")
    assert status["tables"][name]["state"] == "ready"
    assert (status["tables"][name]["key"], status["tables"][name]["rows"]) == (["id", "line"], 30)
    assert status["tables"]["public.nokey"]["state"] == "skipped"
    assert status["slot"]["name"] == "cli_test"
    latest = commands.json("as-of")
    assert latest == second["publish"] == status["publish"]
    assert_equal(source, name, latest["tables"][name]["path"], latest["tables"][name]["version"])
    assert commands.json("as-of", first["publish"]["lsn"])["lsn"] == first["publish"]["lsn"]
    assert commands.json("as-of", first["publish"]["published_at"])["lsn"] == first["publish"]["lsn"]
    assert parse_lsn(first["publish"]["lsn"]) < parse_lsn(latest["lsn"])
    verified = commands.json("verify")
    assert verified["equal"]
    assert verified["tables"][name] == {"equal": True, "rows": 30, "missing": 0, "extra": 0, "different": 0}
    assert commands.json("publish")["publish"]["lsn"] == verified["lsn"]
    again = commands.json("resnapshot", name)
    assert [taken["table"] for taken in again["snapshots"]] == [name]
    assert commands.json("doctor")["ok"]
    dropped = commands.json("drop", "--yes")
    assert dropped == {"dropped": ["slot cli_test", "publication cli_test"]}


@pytest.mark.long
def test_a_table_that_waits_for_an_old_transaction_holds_up_no_other(source: Source, commands: Commands, connect_address: str) -> None:
    commands.environment["PGWAL_SPARK_REMOTE"] = connect_address
    source.sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY)")
    commands.json("drain")
    old = source.connect(autocommit=False)
    old.execute("INSERT INTO other VALUES (1)")
    source.sql("INSERT INTO t VALUES (1); CREATE TABLE joined (id int PRIMARY KEY); INSERT INTO joined VALUES (1)")
    code, out, err = commands.run("sync", "--json", PGWAL_BLOCKED_TIMEOUT="7s")
    assert code == 1
    assert out, err
    answer = json.loads(out)
    assert set(answer["publish"]["tables"]) == {"public.t", "public.other"}
    assert sorted(taken["table"] for taken in answer["snapshots"]) == ["public.other", "public.t"]
    waiting = f"pid {old.info.backend_pid}"
    assert any(waiting in warning for warning in answer["warnings"])
    assert err.strip().splitlines()[-1].startswith("pgwal: public.joined could not be read yet")
    assert waiting in err
    old.commit()
    assert "public.joined" in commands.json("sync")["publish"]["tables"]


BAD = [
    ({"PGWAL_LAG_THRESHOLD": "many"}, 2, "PGWAL_LAG_THRESHOLD"),
    ({"PGWAL_SOURCE_DSN": ""}, 2, "PGWAL_SOURCE_DSN"),
    ({"PGWAL_LAKE": "ftp://host/x"}, 2, "PGWAL_LAKE"),
    ({"PGWAL_LAKE": "~nosuchuser/x"}, 2, "PGWAL_LAKE"),
    ({"PGWAL_SPARK_CONF": '["s3cret"]'}, 2, "PGWAL_SPARK_CONF"),
    ({"PGWAL_SLOT": "Bad-Name"}, 2, "PGWAL_SLOT"),
    ({"PGWAL_SOURCE_DSN": "postgresql://someone:s3cret@127.0.0.1:1/db"}, 1, "127.0.0.1"),
]


@pytest.mark.parametrize(("environment", "code", "named"), BAD)
def test_bad_settings_are_one_sentence(environment: dict[str, str], code: int, named: str, tmp_path: Path) -> None:
    commands = Commands(tmp_path, "")
    found, out, err = commands.run("drain", **environment)
    assert (found, out) == (code, "")
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert named in lines[0]
    assert "s3cret" not in err
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("command", ["status", "publish"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("PGWAL_SOURCE_DSN", "postgresql://host:port:x/db"), ("PGWAL_LAKE", "{file}"), ("PGWAL_LAG_THRESHOLD", "9" * 400)],
)
def test_a_wrong_setting_is_told_by_commands_that_need_no_source_too(command: str, name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = Commands(tmp_path, "").run(command, **{name: value.format(file=tmp_path / "file")})
    assert (code, out) == (2, "")
    assert name in err
    assert len(err.strip().splitlines()) == 1


def test_a_place_that_is_no_folder_for_dagster(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = Commands(tmp_path, "").run("publish", DAGSTER_HOME=str(tmp_path / "file"))
    assert (code, out) == (2, "")
    assert "DAGSTER_HOME" in err


@pytest.mark.parametrize("where", ["environment", ".env"])
def test_a_tilde_is_the_users_folder_for_dagster_as_for_everything(where: str, tmp_path: Path) -> None:
    """Dagster expands it itself: runs of the UI and of the commands would be in two instances."""
    (tmp_path / "user").mkdir()
    commands = Commands(tmp_path, "host=127.0.0.1 port=1")
    commands.environment |= {"HOME": str(tmp_path / "user"), "PGWAL_LAKE": "~/lake"}
    del commands.environment["DAGSTER_HOME"]
    if where == ".env":
        (tmp_path / ".env").write_text("DAGSTER_HOME=~/x\n")
    else:
        commands.environment["DAGSTER_HOME"] = "~/x"
    code, _, err = commands.run("publish")
    assert code == 0, err
    assert (tmp_path / "user/x/history/runs.db").exists()
    assert "~" not in {path.name for path in tmp_path.iterdir()}
    found = {check["name"]: check["found"] for check in json.loads(commands.run("doctor", "--json")[1])["checks"]}
    assert found["dagster"] == f"{tmp_path}/user/x is writable"
    assert found["settings"].startswith(f"lake {tmp_path}/user/lake,")


def test_a_sync_without_a_table_to_follow_says_what_there_is(source: Source, commands: Commands) -> None:
    source.sql("CREATE SCHEMA shop; CREATE TABLE shop.orders (id int PRIMARY KEY)")
    code, out, err = commands.run("sync", PGWAL_TABLES="store.*,x.y")
    assert code == 0, err
    said = (
        "No table that can be published matches PGWAL_TABLES=store.*,x.y, so there is nothing to follow; the database has tables in shop."
    )
    assert f"warning: {said}" in out
    assert commands.json("drop", "--yes")["dropped"]
    source.sql("CREATE PUBLICATION theirs")
    commands.environment |= {"PGWAL_PUBLICATION": "theirs", "PGWAL_LAKE": f"{commands.environment['PGWAL_LAKE']}_other"}
    (warning,) = commands.json("sync")["warnings"]
    assert warning.startswith("Publication theirs holds no table, so there is nothing to follow; the database has tables in shop.")
    # Nor is it forgotten later on.
    assert commands.json("sync")["warnings"] == [warning]


@pytest.mark.parametrize(("answer", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), ("n\n", 1)])
def test_the_question_before_a_drop_may_be_interrupted(answer: signal.Signals | str, code: int, tmp_path: Path) -> None:
    environment = Commands(tmp_path, "host=127.0.0.1 port=1").environment
    command, pipe = [sys.executable, "-m", "pgwal_pipeline.cli", "drop"], subprocess.PIPE
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None
    assert process.stderr is not None
    assert process.stderr.read(len("Drop slot")) == "Drop slot"
    if isinstance(answer, str):
        process.stdin.write(answer)
        process.stdin.flush()
    else:
        process.send_signal(answer)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert ("interrupted" in err) == (code != 1)


_FINALIZED = """
import os, signal, time
from pgwal_pipeline import cli, runs

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIG{name})
        time.sleep(5)

def sync(*_):
    Dying()
    time.sleep(60)

runs.sync = sync
cli.main(["sync"])
"""


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_an_interrupt_while_an_object_is_finalized_is_no_other(name: str, code: int, tmp_path: Path) -> None:
    environment = Commands(tmp_path, "host=127.0.0.1 port=1").environment
    command, started = [sys.executable, "-c", _FINALIZED.format(name=name)], time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr == "pgwal: interrupted; what was complete is safe, and the next run goes on from there.\n"
    assert time.monotonic() - started < 15


def test_who_holds_up_the_slot_is_named_by_the_command_that_makes_it(source: Source, commands: Commands) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    old = source.connect(autocommit=False)
    old.execute("INSERT INTO t VALUES (1)")
    process = commands.start("drain", "--json")
    wait_for(lambda: source.sql("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'cli_test'"), seconds=60, what="the slot to begin")
    time.sleep(12)
    old.commit()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    waiting = f"pid {old.info.backend_pid}"
    assert waiting in err
    assert any(waiting in warning for warning in json.loads(out)["warnings"])


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)])
def test_interrupted_sync_ends_clean(
    number: signal.Signals, code: int, source: Source, commands: Commands, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    source.sql("INSERT INTO t SELECT generate_series(1, 100)")
    marker = tmp_path / "reached"
    process = commands.start("sync", PGWAL_FAILPOINTS=f"publish.in_merge=touch:{marker}")
    wait_for(marker.exists, seconds=120, what="the merge")
    started = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert time.monotonic() - started < 30
    assert "interrupted" in err
    commands.environment["PGWAL_SPARK_REMOTE"] = request.getfixturevalue("connect_address")
    assert commands.json("sync")["publish"] is not None
    assert source.value("SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = 'cli_test'") == 0


def test_dagsters_folder_is_no_part_of_what_is_true(source: Source, tmp_path: Path) -> None:
    """With DAGSTER_HOME wiped the next command goes on where the last one ended."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY)")
    commands = Commands(tmp_path, source.dsn)
    commands.json("drain")
    source.sql("INSERT INTO t VALUES (1)")
    assert commands.json("drain")["changes"] == 1
    source.sql("INSERT INTO t VALUES (2)")
    shutil.rmtree(tmp_path / "dagster")
    assert commands.json("drain")["changes"] == 1
    assert sorted(pl.read_delta(str(tmp_path / "lake/raw/public/t"))["id"].to_list()) == [1, 2]

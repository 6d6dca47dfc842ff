"""Tables in error as a user meets them: commands, Dagster's runs and checks, and sensors all say the same, and the others go on."""

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.scheduler.instigation import TickStatus

from pgwal_pipeline.asset_specs import FOLLOWED_CHECK, AssetNames
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import replace
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.components.ticks import sensor_daemon
from pgwal_pipeline_tests.oracle import assert_equal
from pgwal_pipeline_tests.support import Source, fresh_source

NAMES = AssetNames("pgwal")
FAULTY = ("public.clash", "public.damaged")
SOUND = ("public.a", "public.z")


@pytest.fixture
def quiet(make_server: Callable[..., Postgres]) -> Iterator[Source]:
    """A database on a server where nobody else writes."""
    with fresh_source(make_server(autovacuum="off")) as source:
        yield source


def change(source: Source) -> None:
    for table in (*SOUND, *FAULTY):
        source.sql(f"INSERT INTO {table} (id) SELECT coalesce(max(id), 0) + 1 FROM {table}")


def checked(instance: dg.DagsterInstance, table: str) -> tuple[bool, str | None]:
    """What a table's newest check `followed` came to."""
    key = dg.AssetCheckKey(NAMES.current(TableName.parse(table)), FOLLOWED_CHECK)
    (record,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
    assert record.event is not None
    assert record.event.dagster_event is not None
    evaluation = record.event.dagster_event.asset_check_evaluation_data
    return evaluation.passed, evaluation.description


@pytest.mark.long
def test_what_is_said_of_tables_in_error(quiet: Source, tmp_path: Path, connect_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by its definition, which is a gap; one by its merge, which is tried again. Each command is a process of its own."""
    for table in (*SOUND, *FAULTY):
        quiet.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
    commands = Commands(tmp_path, quiet.dsn)
    commands.environment |= {"PGWAL_SPARK_REMOTE": connect_address, "PGWAL_SLOT": "pgwal", "PGWAL_MAX_STALENESS": "0s"}
    change(quiet)
    assert set(commands.json("sync")["publish"]["tables"]) == {*SOUND, *FAULTY}
    quiet.sql("ALTER TABLE clash ADD COLUMN _pgwal_op text")
    shutil.rmtree(Path(commands.json("status")["tables"]["public.damaged"]["current_path"]) / "_delta_log")
    said = ""
    for _ in range(2):
        change(quiet)
        code, out, err = commands.run("sync", "--json")
        assert code == 1, err
        assert out, err
        answer = json.loads(out)
        for table in SOUND:
            pointer = answer["publish"]["tables"][table]
            assert_equal(quiet, table, pointer["path"], pointer["version"])
        assert set(answer["publish"]["tables"]) == set(SOUND)
        said = err.strip().splitlines()[-1]
        assert said.startswith("pgwal: public.clash, public.damaged could not be published; the other tables were. ")

    status = commands.json("status")["tables"]
    assert {table: status[table]["state"] for table in (*SOUND, *FAULTY)} == {
        **dict.fromkeys(SOUND, "ready"),
        **dict.fromkeys(FAULTY, "error"),
    }
    reasons = {table: status[table]["reason"] for table in FAULTY}
    assert "_pgwal_op" in reasons["public.clash"]
    assert "pgwal resnapshot 'public.damaged'" in reasons["public.damaged"]
    assert all(reason in said for reason in reasons.values())
    code, out, err = commands.run("doctor", "--json")
    assert code == 1
    assert "followed" in err
    found = {check["name"]: check["found"] for check in json.loads(out)["checks"] if not check["ok"]}
    assert set(found) == {"followed"}
    assert all(f"{table}: {reason}" in found["followed"] for table, reason in reasons.items())

    for name, value in commands.environment.items():
        monkeypatch.setenv(name, value)
    with dg.DagsterInstance.get() as instance:
        runs = instance.get_runs()
        assert {run.status for run in runs} == {dg.DagsterRunStatus.SUCCESS}
        assert runs[0].job_name == "sync"
        for table in SOUND:
            assert checked(instance, table) == (True, None)
        for table, reason in reasons.items():
            assert checked(instance, table) == (False, reason)

        # Nothing has changed since: nothing is asked for. The merge is tried again after a pause, and no sooner.
        ledger = Ledger(Lake(commands.environment["PGWAL_LAKE"]))
        later = datetime.now(UTC) + timedelta(hours=1)
        ledger.amend_tables(lambda known: [replace(state, retry_at=later) for state in known.values() if state.retry_at is not None])
        with sensor_daemon(instance) as daemon:
            for _ in range(5):
                daemon.tick()
            for sensor in ("wal_lag", "new_tables"):
                assert [(tick.status, tick.run_ids) for tick in daemon.ticks(sensor)] == [(TickStatus.SKIPPED, [])] * 5
            change(quiet)
            for _ in range(3):
                daemon.tick()
            asked = [tick.run_ids for tick in daemon.ticks("wal_lag")]
            assert [len(ids) for ids in asked] == [0, 0, 1, *[0] * 5], "the control: one run for what has changed, and none beside it"
            assert not any(tick.run_ids for tick in daemon.ticks("new_tables"))

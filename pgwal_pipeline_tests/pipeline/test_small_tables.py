"""Small tables read in groups: one table's fault costs that table alone, and whatever dies in the middle loses and doubles nothing."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake import maintenance
from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.messages.errors import LakeError, SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import small_tables
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.table_chunks import TableChunks
from pgwal_pipeline.postgres.copy import ChunkReader
from pgwal_pipeline.values.own_columns import CHUNK, GENERATION
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import READ, WRITTEN, at_each_pass, at_tables, at_the_first, injected
from pgwal_pipeline_tests.oracle import rows_of, source_rows
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source, wait_for

NAMES = "abcde"
TABLES = [f"public.{name}" for name in NAMES]
READ_ALL = "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)"

WRITES = (
    "INSERT INTO {t} VALUES (100 + {n}, 'new'); UPDATE {t} SET v = v || '.' WHERE id IN (1, 5);"
    " UPDATE {t} SET id = 1000 + {n} WHERE id = 6; DELETE FROM {t} WHERE id = 2"
)


@pytest.fixture
def five(source: Source, make_pipeline: MakePipeline) -> Pipeline:
    """Five tables that one worker reads in the order of their names, all in the ledger: `d` has no key, `e` is empty."""
    for name in NAMES:
        key = "" if name == "d" else "PRIMARY KEY"
        source.sql(f"CREATE TABLE {name} (id int {key}, v text)")
        source.sql(f"INSERT INTO {name} SELECT i, '{name}' FROM generate_series(1, {0 if name == 'e' else 20}) i")
    source.sql("ALTER TABLE d REPLICA IDENTITY FULL; INSERT INTO d SELECT * FROM d WHERE id < 4")
    pipeline = make_pipeline(snapshot_workers=1)
    source.sql(f"CREATE PUBLICATION {pipeline.settings.publication} FOR TABLE a, b, c, d, e")
    drains.bootstrap(pipeline.settings, progress=Silent())
    return pipeline


@pytest.fixture
def merged(five: Pipeline, spark: Any) -> Pipeline:
    """The same, whose changes can be merged."""
    five.spark = lambda: spark
    return five


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that are read by themselves, in their order."""
    read: list[str] = []
    run = TableChunks.run

    def noted(self: TableChunks) -> Any:
        read.append(self.state.table.name)
        return run(self)

    monkeypatch.setattr(TableChunks, "run", noted)
    return read


def states(pipeline: Pipeline) -> dict[str, TableState]:
    return {state.table.name: state for state in pipeline.ledger.tables().values()}


def before_the_locks(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` when a group has been looked up in the catalog and is about to be locked, the first time."""
    begin = ChunkReader.begin_together

    def begun(self: ChunkReader, *args: Any) -> Any:
        monkeypatch.setattr(ChunkReader, "begin_together", begin)
        act()
        return begin(self, *args)

    monkeypatch.setattr(ChunkReader, "begin_together", begun)


def files_beside_the_log(pipeline: Pipeline) -> set[str]:
    """The snapshots' files that no Delta table names."""
    found = {str(path) for path in Path(pipeline.settings.lake, "snapshot").rglob("part-*")}
    for table in TABLES:
        path = pipeline.lake.snapshot(TableName.parse(table))
        if Path(path, "_delta_log").exists():
            found -= set(DeltaTable(path).file_uris())
    return found


def counted_rows(pipeline: Pipeline, name: str) -> pl.DataFrame:
    """The rows of the snapshot in force that count."""
    state = states(pipeline)[name]
    attempts = [chunk.attempt for chunk in pipeline.ledger.chunks(state.location, state.generation or "")]
    rows = pl.scan_delta(pipeline.lake.snapshot(state.location)).filter(pl.col(GENERATION) == state.generation)
    return rows.filter(pl.col(CHUNK).is_in(attempts)).collect()


def assert_read(pipeline: Pipeline, names: str) -> None:
    """The snapshots in force hold just what the source holds now (nobody may have written since they were read)."""
    for name in names:
        with pipeline.source.connect() as conn:
            columns, expected = source_rows(conn, name)
        assert rows_of(counted_rows(pipeline, name).select(columns)) == expected, name


def without(name: str) -> str:
    return NAMES.replace(name, "")


# ---- one table's fault


@pytest.mark.parametrize("name", ["a", "c", "e"])
def test_one_that_is_dropped_meanwhile(
    name: str, source: Source, five: Pipeline, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_locks(monkeypatch, lambda: source.sql(f"DROP TABLE {name}"))
    five.snapshot()
    assert {other: state.state for other, state in states(five).items() if other != name} == dict.fromkeys(without(name), "ready")
    assert alone == []
    assert_read(five, without(name))
    five.drain()
    assert states(five)[name].state == "gone"
    assert snapshots.needed(five.settings) == ()


@pytest.mark.parametrize("name", ["a", "c", "e"])
def test_one_that_is_altered_meanwhile(
    name: str, source: Source, five: Pipeline, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before_the_locks(monkeypatch, lambda: source.sql(f"ALTER TABLE {name} RENAME v TO w; INSERT INTO {name} VALUES (50, 'altered')"))
    five.snapshot()
    found = states(five)
    assert {other: state.state for other, state in found.items() if other != name} == dict.fromkeys(without(name), "ready")
    assert "altered" in (found[name].reason or "")
    assert snapshots.needed(five.settings) == (TableName("public", name),)
    assert alone == []
    assert_read(five, without(name))
    five.drain()
    five.snapshot()
    assert_read(five, NAMES)


@pytest.mark.parametrize("name", ["a", "c", "e"])
def test_one_that_is_locked_comes_last(
    name: str, source: Source, five: Pipeline, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = source.connect(autocommit=False)
    before_the_locks(monkeypatch, lambda: holder.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE".encode()))
    monkeypatch.setattr(snapshots, "_LOCKED_FOR", 60.0)
    reader = threading.Thread(target=five.snapshot)
    reader.start()
    try:
        wait_for(lambda: sum(state.state == "ready" for state in states(five).values()) == 4, what="the others to be read")
        assert states(five)[name].state == "snapshotting"
        assert alone == [], "it waits for the lock before it is read"
    finally:
        holder.rollback()
        reader.join()
    assert alone == [name]
    assert_read(five, NAMES)


def test_locked_ones_are_left_to_a_later_run(source: Source, five: Pipeline, alone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, they hold up a run for one while; large ones too, and one that is locked in the middle of the group."""
    source.sql("CREATE TABLE large (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO large SELECT i, repeat('x', 500) FROM generate_series(1, 9000) i")
    source.sql("VACUUM ANALYZE large")
    source.sql(f"ALTER PUBLICATION {five.settings.publication} ADD TABLE large")
    drains.bootstrap(five.settings, progress=Silent())
    holder = source.connect(autocommit=False)
    before_the_locks(monkeypatch, lambda: holder.execute("LOCK TABLE b, d, large IN ACCESS EXCLUSIVE MODE"))
    monkeypatch.setattr(snapshots, "_LOCKED_FOR", 1.0)
    began = time.monotonic()
    report = snapshots.snapshot(five.settings, progress=Silent())
    assert time.monotonic() - began < 15
    assert sorted(table.table.name for table in report.tables) == ["a", "c", "e"]
    assert alone == []
    for name in ("b", "d", "large"):
        state = states(five)[name]
        assert state.state in ("pending", "snapshotting")
        assert f"pid {holder.info.backend_pid}" in (state.reason or "")
    assert sum(f"pid {holder.info.backend_pid}" in warning for warning in report.warnings) == 3
    holder.rollback()
    assert_read(five, "ace")
    five.snapshot()
    assert {state.reason for state in states(five).values()} == {None}
    assert_read(five, NAMES)
    assert counted_rows(five, "large").height == 9000


def test_a_ready_one_that_is_locked_when_it_is_to_be_read_again_is_read_later(
    source: Source, five: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    five.snapshot()
    five.ledger.amend_tables(lambda known: [replace(state, published=state.generation) for state in known.values()])
    first = {name: state.generation for name, state in states(five).items()}
    holder = source.connect(autocommit=False)
    before_the_locks(monkeypatch, lambda: holder.execute("LOCK TABLE b IN ACCESS EXCLUSIVE MODE"))
    monkeypatch.setattr(snapshots, "_LOCKED_FOR", 0.1)
    five.snapshot(*TABLES)
    found = states(five)
    assert {name for name in NAMES if found[name].generation == first[name]} == {"b"}
    assert found["b"].state == "ready"
    holder.rollback()
    assert snapshots.needed(five.settings) == (TableName("public", "b"),)
    five.snapshot()
    assert states(five)["b"].generation != first["b"]
    assert_read(five, NAMES)


@pytest.mark.parametrize("name", ["a", "c", "e"])
def test_one_with_a_row_that_cannot_be_read(name: str, source: Source, five: Pipeline, alone: list[str]) -> None:
    """The publication's own condition fails on it; so would a damaged block."""
    publication = five.settings.publication
    source.sql(f"INSERT INTO {name} VALUES (77, 'bad')")
    filtered = ", ".join(f"{other} WHERE (10 / (id - 77) < 100)" if other == name else other for other in NAMES)
    source.sql(f"ALTER PUBLICATION {publication} SET TABLE {filtered}")
    drains.bootstrap(five.settings, progress=Silent())
    five.snapshot()
    found = states(five)
    assert (found[name].state, found[name].stage) == ("error", "read")
    assert "division by zero" in (found[name].reason or "")
    assert {other: state.state for other, state in found.items() if other != name} == dict.fromkeys(without(name), "ready")
    assert alone == []
    assert_read(five, without(name))
    source.sql(f"ALTER PUBLICATION {publication} SET TABLE {', '.join(NAMES)}")
    five.drain()
    five.snapshot()
    assert_read(five, NAMES)


def test_one_that_a_drain_finds_altered_before_the_group_is_recorded(
    source: Source, merged: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered() -> None:
        source.sql("ALTER TABLE b ALTER v TYPE varchar(40); INSERT INTO b VALUES (60, 'after')")
        source.sql("ALTER TABLE c RENAME TO f; INSERT INTO f VALUES (60, 'after')")
        merged.drain()

    at_the_first(monkeypatch, WRITTEN, altered)
    merged.snapshot()
    monkeypatch.undo()
    for _ in range(2):
        merged.sync()
    assert {name: state.state for name, state in states(merged).items() if state.oid} == dict.fromkeys("abdef", "ready")
    merged.assert_current("public.a", "public.b", "public.d", "public.e", "public.f")


# ---- what is written meanwhile


@pytest.mark.parametrize(("group", "workers"), [(100, 1), (2, 2)])
def test_what_is_written_while_a_group_is_read(
    group: int, workers: int, source: Source, merged: Pipeline, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tables that are read and to those to come, with a drain each time; one transaction was open before and ends in the middle."""
    merged.settings = merged.settings.model_copy(update={"snapshot_workers": workers})
    monkeypatch.setattr(snapshots, "_GROUP_TABLES", group)
    older = source.connect(autocommit=False)
    for name in NAMES:
        older.execute(f"INSERT INTO {name} VALUES (500, 'older')".encode())
    one_by_one = threading.Lock()

    def write(passed: int) -> None:
        with one_by_one:
            for name in NAMES:
                for statement in WRITES.split("; "):
                    source.sql(statement.format(t=name, n=passed))
            if passed == 2:
                older.commit()
            merged.drain()

    at_each_pass(monkeypatch, READ, write)
    merged.snapshot()
    monkeypatch.undo()
    assert alone == []
    assert {state.state for state in states(merged).values()} == {"ready"}
    merged.drain()
    merged.publish()
    merged.assert_current(*TABLES)


# ---- what dies in the middle


def killed_at(pipeline: Pipeline, point: str) -> None:
    died = pipeline.child(READ_ALL, environment={"PGWAL_FAILPOINTS": point, "PGWAL_SNAPSHOT_WORKERS": "1"})
    assert died.returncode == -signal.SIGKILL, died.stderr


@pytest.mark.parametrize(
    ("point", "chunks"),
    [
        pytest.param(f"{READ}=kill@3", 0, id="in the middle of the group"),
        pytest.param(f"{READ}=kill@5", 0, id="between the files and their commits"),
        pytest.param(f"{WRITTEN}=kill", 0, id="between the commits and the ledger"),
        pytest.param("snapshot.after_table=kill@2", 5, id="after the ledger"),
    ],
)
def test_killed_and_run_again(point: str, chunks: int, source: Source, merged: Pipeline) -> None:
    killed_at(merged, point)
    known = states(merged)
    assert sum(len(merged.ledger.chunks(state.location, state.reading or state.generation or "")) for state in known.values()) == chunks
    left = files_beside_the_log(merged)
    assert bool(left) == point.startswith(READ)
    for number, name in enumerate(NAMES):
        for statement in WRITES.split("; "):
            source.sql(statement.format(t=name, n=number))
    merged.sync()
    merged.assert_current(*TABLES)
    for name in NAMES:
        rows = counted_rows(merged, name)
        assert name == "d" or rows["id"].is_unique().all()
    assert left <= files_beside_the_log(merged), "they may be of a process that still runs"
    maintenance.vacuum(merged.lake, merged.ledger, timedelta(), timedelta())
    assert files_beside_the_log(merged) == set()
    merged.assert_current(*TABLES)


def test_files_of_a_table_that_never_came_to_be_are_removed(source: Source, five: Pipeline) -> None:
    killed_at(five, f"{READ}=kill@3")
    source.sql("DROP TABLE a, b, c, d, e")
    five.drain()
    assert files_beside_the_log(five)
    assert maintenance.vacuum(five.lake, five.ledger) == 0
    assert files_beside_the_log(five), "they are not old yet"
    maintenance.vacuum(five.lake, five.ledger, timedelta(), timedelta())
    assert files_beside_the_log(five) == set()


def test_a_group_that_fails_leaves_no_files(five: Pipeline) -> None:
    with injected(at_tables("read", ["public.d"], "TransientLakeError")), pytest.raises(LakeError):
        five.snapshot()
    assert not list(Path(five.settings.lake, "snapshot").rglob("part-*"))
    assert "error" not in {state.state for state in states(five).values()}
    five.snapshot()
    assert_read(five, NAMES)


def test_a_connection_that_breaks_costs_the_rest_another_read(
    source: Source, five: Pipeline, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_tables, "_PAUSE", 0.01)
    read, met = ChunkReader.read, list[str]()

    def broken(self: ChunkReader, relation: Any, *args: Any, **named: Any) -> Any:
        met.append(relation.table.name)
        if met == ["a", "b", "c"]:
            terminate(source, self)
        return read(self, relation, *args, **named)

    monkeypatch.setattr(ChunkReader, "read", broken)
    report = snapshots.snapshot(five.settings, progress=Silent())
    assert any("read again" in warning for warning in report.warnings)
    assert [name for name in met if name in "ab"] == ["a", "b"], "what came whole is not read again"
    assert alone == []
    assert_read(five, NAMES)


def test_one_at_which_the_connection_breaks_each_time_does_not_keep_the_others(
    source: Source, five: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_tables, "_PAUSE", 0.01)
    read = ChunkReader.read

    def broken(self: ChunkReader, relation: Any, *args: Any, **named: Any) -> Any:
        if relation.table.name == "b":
            terminate(source, self)
        return read(self, relation, *args, **named)

    monkeypatch.setattr(ChunkReader, "read", broken)
    with pytest.raises(SourceUnavailable):
        five.snapshot()
    known = states(five)
    assert {name for name in NAMES if five.ledger.chunks(known[name].location, known[name].reading or "")} == set("acde")
    monkeypatch.undo()
    five.snapshot()
    assert_read(five, NAMES)


def terminate(source: Source, reader: ChunkReader) -> None:
    pid = reader._conn.info.backend_pid
    source.sql("SELECT pg_terminate_backend(%s)", pid)
    wait_for(lambda: source.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0, what="the end of the session")

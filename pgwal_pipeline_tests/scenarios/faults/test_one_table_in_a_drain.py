"""A table that cannot be described, decoded, written or committed costs nobody but itself: the drain goes on without it, and says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import psycopg2
import pytest

from pgwal_pipeline.messages.errors import DecodeError, LakeError, PgwalError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import catch_up
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.postgres.stream import Messages, ReplicationStream
from pgwal_pipeline.values.lsn import parse_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import RUNS_OWN, TABLES_OWN, at_tables, injected
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.scenarios.faults.three_tables import CASES, TABLES, create, insert
from pgwal_pipeline_tests.support import Source, wait_for

_STAGES = ("describe", "decode", "write", "commit")
_SHORT = {("describe", "RuntimeError", "first"), ("decode", "ArrowInvalid", "last"), ("write", "LakeError", "only")}
_SHORT |= {("commit", "DeltaError", "all"), ("commit", "RuntimeError", "first"), ("decode", "RuntimeError", "all")}
_MATRIX = [
    pytest.param(stage, kind, case, marks=() if (stage, kind, case) in _SHORT else pytest.mark.soak)
    for stage in _STAGES
    for kind in TABLES_OWN
    for case in CASES
]
_RUNS = [
    pytest.param(
        stage, kind, marks=() if (stage, kind) in {("decode", "MemoryError"), ("commit", "TransientLakeError")} else pytest.mark.soak
    )
    for stage in _STAGES
    for kind in RUNS_OWN
    if (stage, kind) != ("describe", "TransientLakeError")
]


def raw_ids(pipeline: Pipeline, table: str) -> list[int]:
    """The ids of a raw table's inserts."""
    frame = pl.read_delta(pipeline.lake.raw(TableName.parse(table)))
    return sorted(frame.filter(pl.col("_pgwal_op") == "I")["id"])


def confirmed(pipeline: Pipeline) -> int:
    found = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return parse_lsn(pipeline.source.value(found, pipeline.settings.slot))


def three_tables(source: Source, pipeline: Pipeline) -> None:
    create(source)
    drains.bootstrap(pipeline.settings, progress=Silent())
    insert(source, TABLES, 1)
    snapshots.snapshot(pipeline.settings, progress=Silent())
    pipeline.drain()


@pytest.mark.parametrize(("stage", "kind", "case"), _MATRIX)
def test_a_tables_fault_costs_that_table_alone(stage: str, kind: str, case: str, source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    three_tables(source, pipeline)
    faulty, changed = CASES[case]
    frontier = pipeline.ledger.frontier()
    insert(source, changed, 2)
    with injected(at_tables(stage, faulty, kind)):
        report = pipeline.drain()
    sound = [table for table in TABLES if table not in faulty]
    assert confirmed(pipeline) == pipeline.ledger.frontier() == report.windows[-1].end_lsn
    assert report.changes == len(set(changed) - set(faulty))
    states = pipeline.ledger.tables()
    for table in faulty:
        state = states[TableName.parse(table)]
        assert (state.state, state.stage, state.gap_lsn, state.generation) == ("error", stage, frontier, None)
        assert "failpoint" in (state.reason or "")
        assert f"pgwal resnapshot '{table}'" in (state.reason or "")
        assert any(table in warning for warning in report.warnings)
        assert raw_ids(pipeline, table) == [1]
    for table in sound:
        assert states[TableName.parse(table)].state == "ready"
        assert raw_ids(pipeline, table) == ([1, 2] if table in changed else [1])
    # The cause is gone; the table has a gap all the same, and nothing of it is taken until it is read again.
    insert(source, TABLES, 3)
    pipeline.drain()
    assert all(raw_ids(pipeline, table) == [1] for table in faulty)
    assert all(raw_ids(pipeline, table)[-1] == 3 for table in sound)
    assert all(pipeline.ledger.tables()[TableName.parse(table)].state == "error" for table in faulty)


@pytest.mark.parametrize(("stage", "kind"), _RUNS)
def test_the_runs_fault_changes_no_tables_state(stage: str, kind: str, source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    three_tables(source, pipeline)
    before = confirmed(pipeline)
    insert(source, TABLES, 2)
    with injected(at_tables(stage, ["public.b"], kind)), pytest.raises(MemoryError if kind == "MemoryError" else LakeError):
        pipeline.drain()
    assert confirmed(pipeline) == before
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}
    pipeline.drain()
    assert all(raw_ids(pipeline, table) == [1, 2] for table in TABLES)


@pytest.mark.parametrize(
    ("stage", "point"),
    [("commit", "drain.after_uncommitted"), ("commit", "drain.before_complete"), ("decode", "drain.after_refusal")],
)
def test_killed_between_the_tables_record_and_the_windows(stage: str, point: str, source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    three_tables(source, pipeline)
    insert(source, TABLES, 2)
    faults = f"{at_tables(stage, ['public.b'], 'RuntimeError')};{point}=kill"
    code = "from pgwal_pipeline.pipeline.drain import drain\ndrain(settings, progress=progress)"
    assert pipeline.child(code, environment={"PGWAL_FAILPOINTS": faults}).returncode == -9
    # What was left out before the kill stays so, though the cause is gone; a commit is tried again first.
    with injected(at_tables(stage, ["public.b"], "RuntimeError") if stage == "commit" else ""):
        pipeline.drain()
    assert [raw_ids(pipeline, table) for table in TABLES] == [[1, 2], [1], [1, 2]]
    assert {str(name): state.state for name, state in pipeline.ledger.tables().items()} == {
        "public.a": "ready",
        "public.b": "error",
        "public.c": "ready",
    }
    assert confirmed(pipeline) == pipeline.ledger.frontier()


def test_a_fault_in_one_window_of_a_long_drain_leaves_the_table_out_of_the_rest(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline(window_size="1MB")
    three_tables(source, pipeline)
    for number in range(2, 60):
        source.sql("INSERT INTO a SELECT %s, string_agg(md5(random()::text), '') FROM generate_series(1, 3000)", number)
        insert(source, ["public.b", "public.c"], number)
    with injected("table.write/public.b=raise:RuntimeError@5"):
        report = pipeline.drain()
    assert len(report.windows) > 2
    state = pipeline.ledger.tables()[TableName("public", "b")]
    assert (state.state, state.stage) == ("error", "write")
    assert raw_ids(pipeline, "public.a") == raw_ids(pipeline, "public.c") == list(range(1, 60))
    kept = raw_ids(pipeline, "public.b")
    assert kept == list(range(1, len(kept) + 1))


def test_a_table_in_error_is_read_again_and_back(source: Source, pipeline: Pipeline) -> None:
    create(source)
    insert(source, TABLES, 1)
    pipeline.sync()
    insert(source, TABLES, 2)
    with injected(at_tables("decode", ["public.b"], "RuntimeError")):
        pipeline.drain()
    source.sql("UPDATE b SET v = 'changed in the gap' WHERE id = 1")
    source.sql("DELETE FROM b WHERE id = 2")
    report = pipeline.sync()
    assert TableName("public", "b") not in {name for name, table in report.tables.items() if table.version is not None}
    pipeline.assert_current("public.a", "public.c")
    snapshots.snapshot(pipeline.settings, [TableName("public", "b")], progress=Silent())
    insert(source, TABLES, 3)
    pipeline.drain()
    pipeline.publish()
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}
    pipeline.assert_current(*TABLES)


def _damage(monkeypatch: pytest.MonkeyPatch, damaged: Callable[[bytes], bytes]) -> None:
    """Every message comes as `damaged` makes it of what the server sent."""
    read = ReplicationStream.read

    def changed(self: ReplicationStream, *args: Any) -> Messages:
        messages = read(self, *args)
        return Messages([damaged(payload) for payload in messages.payloads], messages.positions)

    monkeypatch.setattr(ReplicationStream, "read", changed)


def test_a_change_that_cannot_be_read_is_kept_whole_and_its_table_left_out(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline()
    three_tables(source, pipeline)
    oid = source.value("SELECT 'b'::regclass::oid::int8")
    insert(source, TABLES, 2)
    cut: list[bytes] = []

    def damaged(message: bytes) -> bytes:
        if message[:1] == b"I" and int.from_bytes(message[1:5]) == oid:
            cut.append(message[:-1])
            return message[:-1]
        return message

    with monkeypatch.context() as patched:
        _damage(patched, damaged)
        report = pipeline.drain()
    (file,) = (pipeline_folder(pipeline) / "undecodable").iterdir()
    assert file.read_bytes() in cut
    state = pipeline.ledger.tables()[TableName("public", "b")]
    assert (state.state, state.stage) == ("error", "decode")
    assert str(file) in (state.reason or "")
    assert any(str(file) in warning for warning in report.warnings)
    assert [raw_ids(pipeline, table) for table in TABLES] == [[1, 2], [1], [1, 2]]
    assert confirmed(pipeline) == pipeline.ledger.frontier()


def test_a_message_that_belongs_to_no_table_ends_the_drain_and_is_kept_whole(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline()
    three_tables(source, pipeline)
    before = confirmed(pipeline)
    insert(source, TABLES, 2)
    with monkeypatch.context() as patched:
        _damage(patched, lambda message: message[:-1] if message[:1] == b"C" else message)
        with pytest.raises(DecodeError, match="Nothing past it is confirmed") as raised:
            pipeline.drain()
    (file,) = (pipeline_folder(pipeline) / "undecodable").iterdir()
    assert str(file) in str(raised.value)
    assert file.read_bytes() == raised.value.payload
    assert confirmed(pipeline) == before
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}
    pipeline.drain()
    assert all(raw_ids(pipeline, table) == [1, 2] for table in TABLES)


def pipeline_folder(pipeline: Pipeline) -> Path:
    return Path(pipeline.settings.lake) / "_pgwal"


@pytest.mark.parametrize(
    ("stage", "kind", "where"),
    [
        ("write", "RuntimeError", "worker"),
        ("decode", "ArrowInvalid", "here"),
        ("commit", "DeltaError", "here"),
        pytest.param("describe", "RuntimeError", "worker", marks=pytest.mark.soak),
        pytest.param("decode", "RuntimeError", "worker", marks=pytest.mark.soak),
        pytest.param("write", "DeltaError", "here", marks=pytest.mark.soak),
    ],
)
def test_a_fault_in_one_window_of_a_catch_up(
    stage: str, kind: str, where: str, source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows side by side, of which some cannot take one table: the others are whole, the slot is past all of them."""
    monkeypatch.setattr(catch_up, "cores", lambda: 4)
    pipeline = make_pipeline(catchup_threshold="512kB", catchup_slots=2)
    three_tables(source, pipeline)
    frontier = fill(source, pipeline)
    points = at_tables(stage, ["public.b"], kind)
    if where == "worker":
        monkeypatch.setenv("PGWAL_FAILPOINTS", points)
    with injected(points if where == "here" else ""):
        report = pipeline.drain()
    assert len(report.windows) == 3
    state = pipeline.ledger.tables()[TableName("public", "b")]
    assert (state.state, state.stage, state.generation) == ("error", stage, None)
    assert frontier <= (state.gap_lsn or 0) < report.windows[-1].end_lsn
    assert raw_ids(pipeline, "public.a") == raw_ids(pipeline, "public.c") == list(range(1, 40))
    assert confirmed(pipeline) == pipeline.ledger.frontier() == report.windows[-1].end_lsn


def test_a_fault_beside_a_snapshot(source: Source, make_pipeline: MakePipeline) -> None:
    """One table is being read, another one's changes fail meanwhile: the reading goes on, and so does the drain."""
    pipeline = make_pipeline(snapshot_chunk_rows=50)
    three_tables(source, pipeline)
    source.sql("CREATE TABLE d (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO d SELECT i, 'x' FROM generate_series(1, 1000) i")
    pipeline.drain()
    code = "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)"
    with pipeline.started(code, environment={"PGWAL_FAILPOINTS": "snapshot.before_chunk_record=sleep:0.2"}) as reading:
        wait_for(lambda: pipeline.ledger.tables()[TableName("public", "d")].reading, what="the reading to begin")
        insert(source, ["public.a", "public.b", "public.d"], 2000)
        with injected(at_tables("write", ["public.b"], "RuntimeError")):
            pipeline.drain()
        assert reading.poll() is None, "the drain is done before the snapshot"
        assert reading.wait(60) == 0
    states = {str(name): state.state for name, state in pipeline.ledger.tables().items()}
    assert states == {"public.a": "ready", "public.b": "error", "public.c": "ready", "public.d": "ready"}
    assert raw_ids(pipeline, "public.a") == [1, 2000]
    assert raw_ids(pipeline, "public.d") == [2000]


@pytest.mark.parametrize("kind", RUNS_OWN)
def test_an_error_of_a_worker_reaches_the_drain_whole(
    kind: str, source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transient one has the window read here; any other ends the drain. No table's state changes."""
    monkeypatch.setattr(catch_up, "cores", lambda: 4)
    pipeline = make_pipeline(catchup_threshold="512kB", catchup_slots=2)
    three_tables(source, pipeline)
    fill(source, pipeline)
    monkeypatch.setenv("PGWAL_FAILPOINTS", at_tables("write", ["public.b"], kind))
    if kind == "TransientLakeError":
        pipeline.drain()
    else:
        with pytest.raises(PgwalError, match="MemoryError"):
            pipeline.drain()
        monkeypatch.delenv("PGWAL_FAILPOINTS")
        pipeline.drain()
    assert all(raw_ids(pipeline, table) == list(range(1, 40)) for table in TABLES)
    assert {state.state for state in pipeline.ledger.tables().values()} == {"ready"}


def fill(source: Source, pipeline: Pipeline) -> int:
    """Ids 2 to 39 in each table, with about 4 MB of WAL; the frontier before them."""
    for number in range(2, 40):
        source.sql("INSERT INTO a SELECT %s, string_agg(md5(random()::text), '') FROM generate_series(1, 3000)", number)
        insert(source, ["public.b", "public.c"], number)
    return pipeline.ledger.frontier() or 0


@pytest.mark.timeout(120)
def test_a_table_that_somebody_has_locked_holds_up_no_drain(pipeline: Pipeline) -> None:
    """VACUUM FULL, or an ALTER TABLE that takes hours: meanwhile the WAL of the others is read and confirmed."""
    create(pipeline.source)
    pipeline.sync()
    insert(pipeline.source, TABLES, 7)
    with psycopg2.connect(pipeline.source.dsn) as holder:
        holder.cursor().execute(f"LOCK TABLE {TABLES[0]} IN ACCESS EXCLUSIVE MODE")
        target = drains.next_target(pipeline.settings)
        pipeline.drain()
        assert confirmed(pipeline) >= target
        for table in TABLES:
            assert 7 in raw_ids(pipeline, table)
    holder.close()

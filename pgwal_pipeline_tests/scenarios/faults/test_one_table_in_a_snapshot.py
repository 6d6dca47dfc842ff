"""A table that cannot be read, or has to wait, costs nobody but itself; once the cause is gone it comes back."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg2.extensions import make_dsn, parse_dsn
from pydantic import SecretStr

from pgwal_pipeline.messages.errors import BlockedByTransaction, LakeError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline import table_chunks
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.faults import RUNS_OWN, TABLES_OWN, at_tables, injected
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

_TABLES = ["public.a", "public.b", "public.c"]
_B = TableName("public", "b")
_CASES = {"first": ["public.a"], "last": ["public.c"], "all": _TABLES}
_SHORT = {("read", "RuntimeError", "first"), ("read", "ArrowInvalid", "all"), ("describe", "LakeError", "last")}
_MATRIX = [
    pytest.param(stage, kind, case, marks=() if (stage, kind, case) in _SHORT else pytest.mark.soak)
    for stage in ("read", "describe")
    for kind in TABLES_OWN
    for case in _CASES
]


def made(source: Source) -> None:
    for table in _TABLES:
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        source.sql(f"INSERT INTO {table} SELECT i, 'x' FROM generate_series(1, 20) i")


def states(pipeline: Pipeline) -> dict[str, str]:
    return {str(name): state.state for name, state in pipeline.ledger.tables().items()}


@pytest.mark.parametrize(("stage", "kind", "case"), _MATRIX)
def test_a_tables_fault_costs_that_table_alone(stage: str, kind: str, case: str, source: Source, pipeline: Pipeline) -> None:
    made(source)
    drains.bootstrap(pipeline.settings, progress=Silent())
    faulty = _CASES[case]
    with injected(at_tables(stage, faulty, kind)):
        pipeline.snapshot()
    pipeline.drain()
    pipeline.publish()
    sound = [table for table in _TABLES if table not in faulty]
    if sound:
        pipeline.assert_current(*sound)
    for table in faulty:
        state = pipeline.ledger.tables()[TableName.parse(table)]
        assert (state.state, state.stage, state.left_out) == ("error", stage, stage == "describe")
        assert "failpoint" in (state.reason or "")
    if stage == "read":  # raw has its changes: it is tried again by itself
        assert sorted(map(str, snapshots.needed(pipeline.settings))) == faulty
        pipeline.sync()
    else:
        pipeline.resnapshot(*faulty)
    assert set(states(pipeline).values()) == {"ready"}
    pipeline.assert_current(*_TABLES)


@pytest.mark.parametrize("kind", RUNS_OWN)
def test_the_runs_fault_changes_no_tables_state(kind: str, source: Source, pipeline: Pipeline) -> None:
    made(source)
    drains.bootstrap(pipeline.settings, progress=Silent())
    with injected(at_tables("read", ["public.b"], kind)), pytest.raises(MemoryError if kind == "MemoryError" else LakeError):
        pipeline.snapshot()
    assert "error" not in states(pipeline).values()
    pipeline.sync()
    pipeline.assert_current(*_TABLES)


def test_types_that_borrow_anothers_output_function(source: Source, pipeline: Pipeline) -> None:
    """As a column, in a table without a key, in an array and in a domain: refcursor is written by text's."""
    source.sql("CREATE DOMAIN place AS refcursor")
    source.sql("CREATE TABLE r (id int PRIMARY KEY, c refcursor, d place, e refcursor[])")
    source.sql("CREATE TABLE k (c refcursor, v int); ALTER TABLE k REPLICA IDENTITY FULL")
    source.sql("CREATE TABLE s (id int PRIMARY KEY)")
    source.sql("INSERT INTO r VALUES (1, 'one', 'two', '{three,NULL}'), (2, NULL, NULL, NULL), (3, '', '%s', '{}')")
    source.sql("INSERT INTO k SELECT ('c' || i)::refcursor, i FROM generate_series(1, 50) i")
    pipeline.settings = pipeline.settings.model_copy(update={"snapshot_chunk_rows": 10})
    pipeline.sync()
    source.sql("INSERT INTO r VALUES (4, 'four', 'five', '{six}')")
    source.sql("UPDATE k SET v = v + 1")
    source.sql("INSERT INTO s VALUES (1)")
    pipeline.sync()
    assert set(states(pipeline).values()) == {"ready"}
    pipeline.assert_current("public.r", "public.k", "public.s")


@pytest.fixture
def role(source: Source) -> Iterator[str]:
    name = f"reader_{source.database}"
    source.sql(f"CREATE ROLE {name} LOGIN REPLICATION")
    source.sql(f"GRANT CREATE ON DATABASE {source.database} TO {name}; GRANT USAGE, CREATE ON SCHEMA public TO {name}")
    yield name
    source.sql(f"DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.parametrize("bar", ["privilege", "row security"])
def test_a_table_that_may_be_read_after_all_is_read_by_the_next_run(
    bar: str, source: Source, role: str, make_pipeline: Callable[..., Pipeline], spark: Any
) -> None:
    made(source)
    pipeline = make_pipeline(source_dsn=source.dsn_of(role))
    pipeline.spark = lambda: spark
    source.sql(f"CREATE PUBLICATION {pipeline.settings.publication} FOR TABLE a, b, c")
    source.sql(f"GRANT SELECT ON a, c TO {role}")
    if bar == "row security":
        source.sql(f"GRANT SELECT ON b TO {role}; ALTER TABLE b ENABLE ROW LEVEL SECURITY")
    for _ in range(3):  # until the pauses have begun to grow
        pipeline.sync()
    state = pipeline.ledger.tables()[_B]
    assert (state.state, state.stage) == ("error", "access")
    assert _B not in snapshots.needed(pipeline.settings), "it has to wait for a pause"
    pipeline.assert_current("public.a", "public.c")
    source.sql("INSERT INTO b VALUES (100, 'while it could not be read')")
    source.sql(f"GRANT SELECT ON b TO {role}" if bar == "privilege" else "ALTER TABLE b DISABLE ROW LEVEL SECURITY")
    pipeline.sync()
    assert set(states(pipeline).values()) == {"ready"}
    pipeline.assert_current(*_TABLES)


def test_a_column_renamed_takes_the_table_in_again(source: Source, pipeline: Pipeline) -> None:
    """With changes to it before and after, while it is in error."""
    made(source)
    source.sql("ALTER TABLE b ADD COLUMN _pgwal_op text")
    pipeline.sync()
    assert states(pipeline)["public.b"] == "error"
    source.sql("UPDATE b SET _pgwal_op = 'x'")
    pipeline.sync()
    assert states(pipeline)["public.b"] == "error"
    pipeline.assert_current("public.a", "public.c")
    source.sql("ALTER TABLE b RENAME COLUMN _pgwal_op TO op")
    source.sql("INSERT INTO b VALUES (100, 'x', 'y')")
    pipeline.sync()
    assert set(states(pipeline).values()) == {"ready"}
    pipeline.assert_current(*_TABLES)


def test_a_table_that_waits_holds_up_nobody(source: Source, pipeline: Pipeline) -> None:
    """It is pending with who is waited for; the others are read, drained and published, and a later run looks again."""
    made(source)
    pipeline.sync()
    source.sql("CREATE TABLE d (id int PRIMARY KEY)")
    source.sql("CREATE TABLE e (id int PRIMARY KEY)")
    older = source.connect(autocommit=False)
    older.execute("INSERT INTO d VALUES (1)")
    pid = older.info.backend_pid
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO a VALUES (100, 'beside')")
    began = time.monotonic()
    report = snapshots.snapshot(pipeline.settings, progress=Silent())
    assert time.monotonic() - began < 5
    assert {str(table) for table in report.blocked} == {"public.d", "public.e"}
    state = pipeline.ledger.tables()[TableName("public", "d")]
    assert state.state == "pending"
    assert f"pid {pid}" in (state.reason or "")
    assert "INSERT INTO d" in (state.reason or "")
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current(*_TABLES)
    assert set(snapshots.blocked(pipeline.settings, snapshots.needed(pipeline.settings))) == set(report.blocked)
    with pytest.raises(BlockedByTransaction, match=f"pid {pid}"):
        settings = pipeline.settings.model_copy(update={"blocked_timeout": 0.5})
        snapshots.wait_for_blocked(settings, list(report.blocked), progress=Silent())
    older.commit()
    snapshots.snapshot(pipeline.settings, progress=Silent())
    pipeline.drain()
    pipeline.publish()
    assert all(state.reason is None for state in pipeline.ledger.tables().values())
    pipeline.assert_current(*_TABLES, "public.d", "public.e")


def test_a_table_altered_in_each_reading_gets_pauses(source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    made(source)
    pipeline.settings = pipeline.settings.model_copy(update={"snapshot_chunk_rows": 10})  # none is small then, each is read by itself
    drains.bootstrap(pipeline.settings, progress=Silent())
    read = table_chunks.TableChunks.run

    def altered(self: Any) -> Any:
        if self.state.table == _B:
            source.sql("ALTER TABLE b ALTER v TYPE varchar")
            source.sql("ALTER TABLE b ALTER v TYPE text")
            raise snapshots.copy.TableChanged("public.b", "Table public.b was altered while it was read; read it again.")
        return read(self)

    monkeypatch.setattr(table_chunks.TableChunks, "run", altered)
    attempts = 0
    for _ in range(6):
        attempts += _B in snapshots.needed(pipeline.settings)
        pipeline.snapshot()
    assert attempts == 2, "the second is made at once, the third after a pause"
    state = pipeline.ledger.tables()[_B]
    assert state.state == "pending"
    assert state.retry_at is not None
    assert state.retry_at - datetime.now(UTC) < timedelta(seconds=11)
    pipeline.drain()
    pipeline.publish()
    pipeline.assert_current("public.a", "public.c")


def test_where_it_is_asked_for_a_table_is_read_again_by_itself_so_many_times(source: Source, pipeline: Pipeline) -> None:
    pipeline.settings = pipeline.settings.model_copy(update={"on_table_error": "resnapshot"})
    made(source)
    pipeline.sync()
    source.sql("INSERT INTO b VALUES (100, 'x')")
    with injected(at_tables("write", ["public.b"], "RuntimeError")):
        pipeline.drain()
    assert states(pipeline)["public.b"] == "error"
    source.sql("INSERT INTO b VALUES (101, 'x')")
    pipeline.sync()
    assert set(states(pipeline).values()) == {"ready"}
    pipeline.assert_current(*_TABLES)
    assert pipeline.ledger.tables()[_B].rereads == 0, "a publish begins the count anew"

    # One that fails again and again is left alone in the end.
    with injected(at_tables("write", ["public.b"], "RuntimeError")):
        for number in range(200, 206):
            source.sql("INSERT INTO b VALUES (%s, 'x')", number)
            pipeline.drain()
            pipeline.ledger.amend_tables(
                lambda known: [snapshots.replace(state, retry_at=datetime.now(UTC)) for state in known.values() if state.state == "error"]
            )
            pipeline.snapshot()
    source.sql("INSERT INTO b VALUES (300, 'x')")
    state = pipeline.ledger.tables()[_B]
    assert state.rereads == 3
    pipeline.resnapshot("public.b")
    pipeline.assert_current(*_TABLES)


def test_nothing_to_follow_is_a_warning_that_names_what_there_is(source: Source, make_pipeline: Callable[..., Pipeline]) -> None:
    source.sql("CREATE SCHEMA shop; CREATE TABLE shop.orders (id int PRIMARY KEY)")
    pipeline = make_pipeline(tables="store.*")
    (warning,) = pipeline.drain().warnings
    assert "PGWAL_TABLES=store.*" in warning
    assert "shop" in warning
    source.sql("CREATE PUBLICATION theirs")
    other = make_pipeline(publication="theirs", lake=f"{pipeline.settings.lake}_other")
    (warning,) = other.drain().warnings
    assert "Publication theirs holds no table" in warning


def test_a_source_that_goes_away_is_the_runs_fault(source: Source, pipeline: Pipeline) -> None:
    made(source)
    pipeline.sync()
    gone = pipeline.settings.model_copy(update={"source_dsn": unreachable_dsn(source)})
    with pytest.raises(Exception, match=r"cannot be reached|refused"):
        snapshots.snapshot(gone, [_B], progress=Silent())
    assert set(states(pipeline).values()) == {"ready"}


def unreachable_dsn(source: Source) -> SecretStr:
    """The source's DSN with a port on which nobody listens."""
    return SecretStr(make_dsn(**{**parse_dsn(source.dsn), "port": "1"}))

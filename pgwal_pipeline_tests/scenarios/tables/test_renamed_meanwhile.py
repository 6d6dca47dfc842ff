"""Names that change hands while tables are read, while the stream is, or behind a process that died: no row comes to another table's."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.lake import maintenance
from pgwal_pipeline.lake.ledger import Publish, TablePointer, TableState
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline import status as statuses
from pgwal_pipeline.pipeline import table_chunks
from pgwal_pipeline.postgres import copy
from pgwal_pipeline.values.own_columns import CHUNK, GENERATION
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.support import Source

Late = Callable[[str], None]

A, B = TableName("public", "a"), TableName("public", "b")
AB = (
    "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text);"
    " INSERT INTO a SELECT i, 'a' FROM generate_series(1, 1000) i; INSERT INTO b SELECT i, 'b' FROM generate_series(1, 400) i; ANALYZE a, b"
)
OF_ITS_OWN = 300  # rows a chunk: neither table of AB fits one, so each is read by itself
SWAP = "ALTER TABLE a RENAME TO t; ALTER TABLE b RENAME TO a; ALTER TABLE t RENAME TO b"
LATE_IN_A_CHILD = """
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.postgres.connection import plain_session
attach = drains.attach
def late(*args, **named):
    found = attach(*args, **named)
    with plain_session(settings.dsn) as conn:
        conn.execute(STATEMENTS)
    return found
drains.attach = late
drains.drain(settings, progress=progress)
"""


def states(pipeline: Pipeline) -> dict[str, TableState]:
    return {state.table.name: state for state in pipeline.ledger.tables().values()}


def read_rows(pipeline: Pipeline, state: TableState) -> pl.DataFrame:
    """What the snapshot in force has of a table."""
    assert state.generation is not None
    attempts = [chunk.attempt for chunk in pipeline.ledger.chunks(state.location, state.generation)]
    rows = pl.scan_delta(pipeline.lake.snapshot(state.location)).filter(pl.col(GENERATION) == state.generation)
    return rows.filter(pl.col(CHUNK).is_in(attempts)).collect()


@pytest.fixture
def late(source: Source, monkeypatch: pytest.MonkeyPatch) -> Late:
    """`late(statements)`: have them run in the next drain, right after its look at the catalog."""
    attach = drains.attach

    def next_time(statements: str) -> None:
        def looked(*args: Any, **named: Any) -> Any:
            monkeypatch.setattr(drains, "attach", attach)
            found = attach(*args, **named)
            source.sql(statements)
            return found

        monkeypatch.setattr(drains, "attach", looked)

    return next_time


def followed(source: Source, pipeline: Pipeline, tables: str) -> Pipeline:
    """`pipeline` with all tables read, those that `tables` makes, of a publication of everything."""
    source.sql(f"{tables}; CREATE PUBLICATION {pipeline.settings.publication} FOR ALL TABLES")
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    return pipeline


@pytest.mark.parametrize("killed", [False, True])
def test_swapped_before_they_are_read_whole(killed: bool, source: Source, make_pipeline: MakePipeline) -> None:
    source.sql(AB)
    pipeline = make_pipeline(snapshot_chunk_rows=100, snapshot_workers=1)
    drains.bootstrap(pipeline.settings, progress=Silent())
    if killed:
        code = "from pgwal_pipeline.pipeline.snapshot import snapshot\nsnapshot(settings, progress=progress)"
        pipeline.child(code, environment={"PGWAL_FAILPOINTS": "snapshot.before_chunk_record=kill@6", "PGWAL_SNAPSHOT_WORKERS": "1"})
    source.sql(SWAP)
    pipeline.snapshot()
    pipeline.drain()
    pipeline.snapshot()
    for name, value, rows in (("a", "b", 400), ("b", "a", 1000)):
        assert read_rows(pipeline, states(pipeline)[name])["v"].to_list() == [value] * rows


def test_a_name_taken_between_two_chunks_of_a_table_without_a_key(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql("CREATE TABLE x (v text); ALTER TABLE x REPLICA IDENTITY FULL")
    source.sql("INSERT INTO x SELECT repeat('x', 500) || i FROM generate_series(1, 2000) i; ANALYZE x")
    pipeline = make_pipeline(snapshot_chunk_rows=500, snapshot_workers=1)
    drains.bootstrap(pipeline.settings, progress=Silent())
    end = copy.ChunkReader.__exit__

    def taken(*args: Any) -> None:
        monkeypatch.setattr(copy.ChunkReader, "__exit__", end)
        end(*args)
        source.sql("ALTER TABLE x RENAME TO y; CREATE TABLE x (v text); ALTER TABLE x REPLICA IDENTITY FULL")

    monkeypatch.setattr(copy.ChunkReader, "__exit__", taken)
    pipeline.snapshot()
    pipeline.drain()
    pipeline.snapshot()
    assert read_rows(pipeline, states(pipeline)["y"]).height == 2000


def test_swapped_while_the_copy_waits_for_its_table(source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    source.sql(AB)
    pipeline = make_pipeline(snapshot_workers=1, snapshot_chunk_rows=OF_ITS_OWN)
    drains.bootstrap(pipeline.settings, progress=Silent())
    fields = copy._fields

    def swapped(conn: Any, relation: Any, binary: Any) -> Any:
        if relation.table == A:
            monkeypatch.setattr(copy, "_fields", fields)
            other = source.connect(autocommit=False)
            other.execute(SWAP)
            threading.Timer(1.0, other.commit).start()
        return fields(conn, relation, binary)

    monkeypatch.setattr(copy, "_fields", swapped)
    pipeline.snapshot()
    pipeline.drain()
    pipeline.snapshot()
    assert set(read_rows(pipeline, states(pipeline)["b"])["v"]) == {"a"}
    assert set(read_rows(pipeline, states(pipeline)["a"])["v"]) == {"b"}


def test_a_table_that_joins_again_while_others_are_read_waits_again(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline(blocked_timeout=3, snapshot_chunk_rows=OF_ITS_OWN)
    name = pipeline.settings.publication
    source.sql(f"{AB}; CREATE PUBLICATION {name} FOR TABLE a, b")
    drains.bootstrap(pipeline.settings, progress=Silent())
    writer = source.connect(autocommit=False)
    run, other = table_chunks.TableChunks.run, {"a": "b", "b": "a"}
    met = []

    def joins_again(reading: Any) -> Any:
        report = run(reading)
        if not met:
            met.append(other[reading.state.table.name])
            source.sql(f"ALTER PUBLICATION {name} DROP TABLE {met[0]}")
            writer.execute(f"INSERT INTO {met[0]} VALUES (-1)".encode())
            source.sql(f"ALTER PUBLICATION {name} ADD TABLE {met[0]}")
            pipeline.drain()
        return report

    monkeypatch.setattr(table_chunks.TableChunks, "run", joins_again)
    found = snapshots.snapshot(pipeline.settings, progress=Silent())
    assert [table.name for table in found.blocked] == met
    writer.commit()
    pipeline.drain()
    pipeline.snapshot()
    assert -1 in set(read_rows(pipeline, states(pipeline)[met[0]])["id"])


def test_renamed_or_gone_while_it_is_read_again(source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = followed(source, make_pipeline(snapshot_chunk_rows=OF_ITS_OWN), AB)
    pipeline.ledger.amend_tables(lambda known: [replace(state, published=state.generation) for state in known.values()])
    first = states(pipeline)["a"].generation
    begun, insert_lsn = table_chunks.begun, snapshots.catalog.insert_lsn

    def renamed(*args: Any) -> TableState:
        monkeypatch.setattr(table_chunks, "begun", begun)
        source.sql("ALTER TABLE a RENAME TO c")
        return begun(*args)

    monkeypatch.setattr(table_chunks, "begun", renamed)
    snapshots.snapshot(pipeline.settings, [A], progress=Silent())
    pipeline.drain()
    pipeline.snapshot()
    again = states(pipeline)["c"]
    assert (again.state, again.reason, again.generation != first) == ("ready", None, True)

    def dropped(conn: Any) -> int:
        monkeypatch.setattr(snapshots.catalog, "insert_lsn", insert_lsn)
        source.sql("DROP TABLE b")
        pipeline.drain()
        return insert_lsn(conn)

    monkeypatch.setattr(snapshots.catalog, "insert_lsn", dropped)
    snapshots.snapshot(pipeline.settings, [B], progress=Silent())
    assert states(pipeline)["b"].state == "gone"


@pytest.mark.parametrize("files", ["there", "gone"])
def test_a_name_taken_behind_a_drain_that_died(files: str, source: Source, make_pipeline: MakePipeline) -> None:
    """What is prepared comes into raw before the table that has its name now."""
    pipeline = followed(source, make_pipeline(), "CREATE TABLE x (id int PRIMARY KEY)")
    made = "INSERT INTO x VALUES (7); ALTER TABLE x RENAME TO y; CREATE TABLE x (id int PRIMARY KEY, v int); INSERT INTO x VALUES (1, 1)"
    died = {"PGWAL_FAILPOINTS": "drain.after_prepared=kill"}
    pipeline.child(f"STATEMENTS = {made!r}\n{LATE_IN_A_CHILD}", environment=died)
    (window,) = pipeline.ledger.prepared()
    if files == "gone":
        for write in window.tables:
            for file in write.files:
                Path(write.path, file.path).unlink()
    source.sql("ALTER TABLE x ALTER v TYPE text")
    pipeline.drain()
    pipeline.snapshot()
    pipeline.drain()
    found = states(pipeline)
    assert {name: state.state for name, state in found.items()} == {"x": "ready", "y": "ready"}
    assert pl.scan_delta(pipeline.lake.raw(found["y"].location)).collect()["id"].to_list() == [7]
    assert pl.scan_delta(pipeline.lake.raw(found["x"].location)).collect()["id"].to_list() == [1]


def test_a_name_taken_while_the_stream_is_read(source: Source, make_pipeline: MakePipeline, late: Late) -> None:
    pipeline = followed(source, make_pipeline(), "CREATE TABLE x (id int PRIMARY KEY); INSERT INTO x VALUES (1)")
    first = states(pipeline)["x"]
    late("INSERT INTO x VALUES (2), (3); ALTER TABLE x RENAME TO y; CREATE TABLE x (id int PRIMARY KEY, a int, \"A\" int);"
         " INSERT INTO x VALUES (1, 1, 1)")  # fmt: skip
    report = pipeline.drain()
    assert sum(counts.rows for counts in report.windows[0].tables.values()) == 2
    pipeline.drain()
    found = states(pipeline)
    assert (found["y"].state, found["y"].generation, found["x"].state) == ("ready", first.generation, "error")
    # Made anew again and again: what each has written is where that one stands, and none is left out when the lake is tidied up.
    for number in range(2):
        late(f"DROP TABLE x; CREATE TABLE x (id int PRIMARY KEY); INSERT INTO x VALUES (1{number})")
        report = pipeline.drain()
        assert sum(counts.rows for counts in report.windows[0].tables.values()) == 1
        pipeline.drain()
        state = states(pipeline)["x"]
        assert pl.scan_delta(pipeline.lake.raw(state.location)).collect()["id"].to_list() == [10 + number]
    assert len(maintenance.locations(pipeline.lake)) == 3
    # One that is dropped before it is read, and made anew under another type: its last changes stand before the other's.
    source.sql("INSERT INTO y VALUES (4); DROP TABLE y; CREATE TABLE y (id text PRIMARY KEY); INSERT INTO y VALUES ('new')")
    pipeline.drain()
    rows = pl.scan_delta(pipeline.lake.raw(states(pipeline)["y"].location)).collect()
    assert (set(rows["id"]), set(rows["_pgwal_string_id"])) == ({2, 3, 4, None}, {None, "new"})


def test_no_two_tables_share_a_place(source: Source, make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    source.sql(AB)
    pipeline.drain()
    pipeline.snapshot()
    source.sql("ALTER TABLE a RENAME TO c; CREATE TABLE a (v text); CREATE TABLE a_0 (v text)")
    pipeline.drain()
    assert {name: state.state for name, state in states(pipeline).items()}["a_0"] == "skipped"
    source.sql("ALTER TABLE a_0 ADD id int PRIMARY KEY; ALTER TABLE a ADD id int PRIMARY KEY")
    for _ in range(2):
        pipeline.drain()
        pipeline.snapshot()
    found = states(pipeline)
    assert {name: state.state for name, state in found.items()} == dict.fromkeys(["a", "a_0", "b", "c"], "ready")
    assert len({state.location for state in found.values()}) == len(found)


def test_swapped_at_the_lsn_of_a_publish(source: Source, make_pipeline: MakePipeline) -> None:
    """The next publish names each Delta table under its table's new name, though no row has changed, and may be at the same LSN."""
    pipeline = followed(source, make_pipeline(), AB)
    pipeline.ledger.amend_tables(lambda known: [replace(state, published=state.generation) for state in known.values()])
    at, lsn = datetime.now(UTC), pipeline.ledger.frontier()
    assert lsn is not None
    one, other = TablePointer(pipeline.lake.current(A), 9), TablePointer(pipeline.lake.current(B), 2)
    pipeline.ledger.record_publish(Publish(lsn, at, {A: one, B: other}))
    assert not statuses.publish_due(pipeline.ledger)
    source.sql(SWAP)
    drains.bootstrap(pipeline.settings, progress=Silent())
    assert statuses.publish_due(pipeline.ledger)
    pipeline.ledger.record_publish(Publish(lsn, at, {A: other, B: one}))
    assert not statuses.publish_due(pipeline.ledger)

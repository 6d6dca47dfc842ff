"""The option `history`: what a table's rows were at each commit since it began, whatever becomes of the table and of the option."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import upkeep
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.maintenance import maintain_tables
from pgwal_pipeline.pipeline.status import publish_due, status
from pgwal_pipeline.published.past import PastState, state_as_of
from pgwal_pipeline.published.query import rows_of as query
from pgwal_pipeline.published.state import open_state
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline, killed
from pgwal_pipeline_tests.scenarios.random.past import Past, valid_at
from pgwal_pipeline_tests.support import Source

TABLE = TableName("public", "t")
LONG = "repeat('long ', 2000)"


def with_history(pipeline: Pipeline, option: bool | str | None = True, **tables: Any) -> Pipeline:
    """The same pipeline with the option for the table `t`, and others for other tables."""
    options = {"public.t": {"history": option}} | {f"public.{name}": given for name, given in tables.items()}
    values = {**pipeline.settings.model_dump(exclude_unset=True), "table_options": options}
    return Pipeline(pipeline.source, type(pipeline.settings).from_environment({}, **values), pipeline.spark)


def make_table(source: Source) -> None:
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int, body text); ALTER TABLE t ALTER body SET STORAGE EXTERNAL")
    source.sql(f"INSERT INTO t SELECT i, 0, {LONG} || i FROM generate_series(1, 6) i; CREATE TABLE beside (id int PRIMARY KEY)")


def history_of(pipeline: Pipeline, table: TableName = TABLE) -> pl.DataFrame:
    """The history as the newest publish names it."""
    publish = pipeline.ledger.publish()
    assert publish is not None
    return pl.read_delta(publish.histories[table].path, version=publish.histories[table].version)


def versions(pipeline: Pipeline, key: int) -> list[tuple[Any, ...]]:
    """The versions of a row in their order: v, what began and what ended it, and whether that was seen."""
    rows = history_of(pipeline).filter(pl.col("id") == key).sort("_pgwal_valid_from_lsn", "_pgwal_valid_to_lsn", nulls_last=True)
    return rows.select("v", "_pgwal_op", "_pgwal_end_op", "_pgwal_unseen").rows()


def test_it_begins_late_and_has_each_commit_since(source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    make_table(source)
    pipeline.sync()
    source.sql("INSERT INTO t VALUES (7, 0, 'before'); INSERT INTO beside VALUES (1)")
    plain = pipeline.sync()
    assert plain.histories == {}
    kept = with_history(pipeline)
    kept.drain()
    assert publish_due(kept.ledger)
    report = kept.publish()
    since = report.lsn
    assert since is not None
    assert not publish_due(kept.ledger)
    assert list(report.histories) == [TABLE]
    past = Past(source)
    for statement in (
        "UPDATE t SET v = 1 WHERE id <= 2",  # the large value is not sent
        "UPDATE t SET v = 2 WHERE id = 1; UPDATE t SET v = 3 WHERE id = 1; INSERT INTO t VALUES (8, 1, 'x'); DELETE FROM t WHERE id = 8",
        "DELETE FROM t WHERE id = 3; INSERT INTO t VALUES (3, 9, 'again')",
        "UPDATE t SET id = 40 WHERE id = 4",
        "UPDATE t SET v = 5 WHERE id = 40",
        "DELETE FROM t WHERE id = 5",
    ):
        source.sql(f"BEGIN; {statement}; COMMIT")
        past.remember("public.t")
    kept.sync()
    assert past.compare("public.t", kept.lake.history(TABLE), since) == 6
    assert versions(kept, 1) == [(0, "S", "U", False), (1, "U", "U", False), (3, "U", None, False)]
    assert versions(kept, 3) == [(0, "S", "U", False), (9, "U", None, False)]
    assert versions(kept, 4) == [(0, "S", "K", False)]
    assert versions(kept, 5) == [(0, "S", "D", False)]
    assert versions(kept, 8) == []
    moved = history_of(kept).filter(pl.col("id") == 40).sort("_pgwal_valid_from_lsn")
    assert [key and json.loads(key) for key in moved["_pgwal_old_key"]] == [{"id": 4}, None]
    source.sql("BEGIN; UPDATE t SET v = 6 WHERE id = 40; TRUNCATE t; INSERT INTO t VALUES (1, 7, 'y'); COMMIT")
    past.remember("public.t")
    source.sql("INSERT INTO t VALUES (2, 8, 'z')")
    past.remember("public.t")
    done = kept.sync()
    assert past.compare("public.t", kept.lake.history(TABLE), since) == 8
    assert versions(kept, 7)[-1] == (0, "S", "T", False)
    kept.assert_current("public.t", "public.beside")
    # The option changes nothing of what Delta readers see besides: lake, status and types.
    assert done.histories[TABLE].path == kept.lake.history(TABLE)
    shown = status(kept.settings)["tables"]
    assert shown["public.t"]["history_path"] == kept.lake.history(TABLE)
    assert shown["public.t"]["options"] == {"history": True}
    assert "history_path" not in shown["public.beside"]
    schema = dict(history_of(kept).schema)
    assert list(schema)[:3] == ["id", "v", "body"]
    times = {"_pgwal_valid_from", "_pgwal_valid_to"}
    assert {schema[name] for name in times} == {pl.Datetime("us", "UTC")}
    assert schema["_pgwal_valid_from_lsn"] == schema["_pgwal_valid_to_lsn"] == pl.Int64
    assert schema["_pgwal_unseen"] == pl.Boolean
    _reads_the_past(kept, past, since)
    monkeypatch.setattr(upkeep, "_SMALL_FILES", 2)
    before = history_of(kept)
    assert maintain_tables(kept.settings, kept.spark, ["public.t"], progress=Silent()).upkeep.rewritten == 1
    place = ["_pgwal_valid_from_lsn", "id", "_pgwal_valid_to_lsn"]
    assert history_of(kept).sort(place).equals(before.sort(place))
    publish = kept.ledger.publish()
    assert publish is not None
    assert len(DeltaTable(kept.lake.history(TABLE), version=publish.histories[TABLE].version).file_uris()) == 2  # open ones, and the others
    source.sql("UPDATE t SET v = 10 WHERE id = 1; DELETE FROM t WHERE id = 2")
    past.remember("public.t")
    kept.sync()
    assert past.compare("public.t", kept.lake.history(TABLE), since) == 9


def _reads_the_past(kept: Pipeline, past: Past, since: int) -> None:
    """`as_of` and `query` reach as far back as the history does, without any publish from then."""
    state, (at, held) = open_state(kept.settings), past.held[1]
    ids = sorted(row[0] for row in held["public.t"][1])
    one = state.as_of("public.t", format_lsn(at))
    assert sorted(one.arrow()["id"].to_pylist()) == sorted(one.polars().collect()["id"].to_list()) == ids
    assert sorted(row["id"] for row in one.spark(kept.spark()).collect()) == ids
    assert one.arrow().column_names == state.arrow("public.t").column_names
    assert one.lsn == format_lsn(at)
    moment = valid_at(history_of(kept), at)["_pgwal_valid_from"].max()
    assert isinstance(moment, dt.datetime)
    assert sorted(state.as_of("public.t", moment).arrow(["id"])["id"].to_pylist()) == ids
    with pytest.raises(LakeError, match="begins at"):
        state.as_of("public.t", format_lsn(since - 1))
    with pytest.raises(LakeError, match="goes up to"):
        state.as_of("public.t", format_lsn(state.publish.lsn + 1))
    kept.ledger.forget(dt.datetime.now(dt.UTC), dt.datetime.now(dt.UTC))  # all publishes but the newest
    before = state_as_of(kept.settings, format_lsn(at))
    assert isinstance(before, PastState)
    with query(before, "SELECT id FROM t ORDER BY id") as rows:
        assert rows.read_all()["id"].to_pylist() == ids
    with pytest.raises(LakeError, match="Nothing was published"):
        state_as_of(kept.settings, format_lsn(since - 1))


@pytest.mark.soak
def test_each_change_of_a_transaction(source: Source, pipeline: Pipeline) -> None:
    make_table(source)
    kept = with_history(pipeline, "every_change")
    kept.sync()
    changes = "UPDATE t SET v = 1 WHERE id = 1; UPDATE t SET v = 2 WHERE id = 1; INSERT INTO t VALUES (9, 9); DELETE FROM t WHERE id = 9"
    source.sql(f"BEGIN; {changes}; COMMIT")
    kept.sync()
    assert versions(kept, 1) == [(0, "S", "U", False), (1, "U", "U", False), (2, "U", None, False)]
    assert versions(kept, 9) == [(9, "I", "D", False)]
    empty = history_of(kept).filter(pl.col("_pgwal_valid_from_lsn") == pl.col("_pgwal_valid_to_lsn"))
    assert sorted(empty["v"].to_list()) == [1, 9]


def test_a_table_that_is_read_again(source: Source, pipeline: Pipeline) -> None:
    make_table(source)
    source.sql("CREATE TABLE bag (v int, w text); ALTER TABLE bag REPLICA IDENTITY FULL")
    source.sql("INSERT INTO bag VALUES (1, 'a'), (1, 'a'), (2, 'b')")
    kept = with_history(pipeline, bag={"history": True})
    since = kept.sync().lsn
    assert since is not None
    past, bag = Past(source), TableName("public", "bag")
    source.sql("UPDATE t SET v = 1 WHERE id = 1; DELETE FROM bag WHERE ctid = '(0,1)'; INSERT INTO bag VALUES (2, 'b'), (3, NULL)")
    past.remember("public.t", "public.bag")
    # Rows are rewritten without a message in the stream; then the type of a column changes, and a column comes with a default.
    source.sql("ALTER TABLE t ALTER v TYPE int USING CASE WHEN id = 2 THEN 20 ELSE v END")
    kept.sync()
    kept.sync()
    again = kept.ledger.publish()
    assert again is not None
    assert past.compare("public.t", kept.lake.history(TABLE), since) == 1
    assert past.compare("public.bag", kept.lake.history(bag), since) == 1
    assert versions(kept, 1) == [(0, "S", "U", False), (1, "U", None, False)]
    assert versions(kept, 2) == [(0, "S", "S", True), (20, "S", None, True)]
    found = history_of(kept).filter(pl.col("_pgwal_unseen"))
    read_at = found["_pgwal_valid_from_lsn"].max()
    assert found.filter(pl.col("_pgwal_open"))["_pgwal_valid_from_lsn"].to_list() == [read_at]
    assert found.filter(~pl.col("_pgwal_open"))["_pgwal_valid_to_lsn"].to_list() == [read_at]
    before = history_of(kept).filter(~pl.col("_pgwal_open"))
    source.sql("UPDATE t SET v = 3 WHERE id = 3")
    at = past.remember("public.t")
    source.sql("ALTER TABLE t ALTER v TYPE bigint; ALTER TABLE t ADD more text DEFAULT 'm'; UPDATE t SET v = 4 WHERE id = 4")
    kept.sync()
    kept.sync()
    assert versions(kept, 3)[:2] == [(0, "S", "U", False), (3, "U", "S", True)]
    now = history_of(kept)
    assert now.schema["v"] == pl.Int64
    assert valid_at(now, at).filter(pl.col("id") == 3)["v"].to_list() == [3]
    assert now.filter(pl.col("_pgwal_open"))["more"].unique().to_list() == ["m"]
    ended = now.filter(~pl.col("_pgwal_open")).select(before.columns)
    assert before.join(ended.cast({"v": pl.Int32}), on=["id", "v", "_pgwal_valid_from_lsn", "_pgwal_valid_to_lsn"]).height == before.height
    source.sql("ALTER TABLE t ALTER v TYPE text; ALTER TABLE t ALTER more DROP DEFAULT, ALTER more TYPE text[] USING ARRAY[more]")
    kept.sync()
    kept.sync()
    now = history_of(kept)
    assert now.schema["v"] == pl.String
    assert valid_at(now, at).filter(pl.col("id") == 3)["_pgwal_long_v"].to_list() == [3]
    kept.assert_current("public.t", "public.bag", "public.beside")


def test_the_option_is_taken_away_and_comes_back(source: Source, pipeline: Pipeline) -> None:
    make_table(source)
    kept = with_history(pipeline)
    since = kept.sync().lsn
    assert since is not None
    past = Past(source)
    source.sql("UPDATE t SET v = 1 WHERE id = 1")
    past.remember("public.t")
    kept.sync()
    first = history_of(kept)
    pipeline.drain()
    assert pipeline.publish().histories == {}
    stopped = pipeline.ledger.tables()[TABLE].history
    assert stopped is not None
    assert stopped.stopped is not None
    shown = status(pipeline.settings)["tables"]["public.t"]
    assert shown["history_stopped"] == format_lsn(stopped.stopped)
    assert shown["history_path"] == pipeline.lake.history(TABLE)
    at = past.held[0][0]
    assert open_state(pipeline.settings).as_of("public.t", format_lsn(at)).arrow().num_rows == 6
    source.sql("UPDATE t SET v = 2 WHERE id = 2")
    past.remember("public.t")
    source.sql("ALTER TABLE t RENAME TO renamed")
    pipeline.sync()
    assert pl.read_delta(pipeline.lake.history(TABLE)).equals(first)
    values = {**kept.settings.model_dump(exclude_unset=True), "table_options": {"public.renamed": {"history": True}}}
    again = Pipeline(source, type(kept.settings).from_environment({}, **values), kept.spark)
    source.sql("UPDATE renamed SET v = 3 WHERE id = 3")
    report = again.sync()
    renamed = TableName("public", "renamed")
    assert report.histories[renamed].path == pipeline.lake.history(TABLE)
    assert past.compare("public.t", again.lake.history(TABLE), since) == 2
    now = again.ledger.tables()[renamed].history
    assert now is not None
    assert now.since == since
    assert (now.stopped, now.gaps) == (None, ())  # raw had what happened meanwhile
    # A table that is dropped keeps its history as it was.
    source.sql("DROP TABLE renamed")
    before = pl.read_delta(again.lake.history(TABLE))
    again.sync()
    assert pl.read_delta(again.lake.history(TABLE)).equals(before)


def test_a_fault_of_a_history_is_its_own(source: Source, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    make_table(source)
    kept = with_history(pipeline, beside={"history": True})
    since = kept.sync().lsn
    assert since is not None
    past, beside = Past(source), TableName("public", "beside")
    source.sql("UPDATE t SET v = 1; INSERT INTO beside VALUES (1)")
    past.remember("public.t")
    kept.drain()
    monkeypatch.setattr(failpoints, "_points", {"table.history/public.t": ("raise:RuntimeError", 0)})
    report = kept.publish()
    assert list(report.histories) == [beside]
    assert any("history of public.t is behind" in warning for warning in report.warnings)
    assert report.errors == {}
    kept.assert_current("public.t", "public.beside")
    assert "its history is behind" in status(kept.settings)["tables"]["public.t"]["reason"]
    monkeypatch.setattr(failpoints, "_points", {})
    source.sql("UPDATE t SET v = 2 WHERE id = 1")
    past.remember("public.t")
    assert set(kept.sync().histories) == {TABLE, beside}
    assert status(kept.settings)["tables"]["public.t"]["reason"] is None
    assert past.compare("public.t", kept.lake.history(TABLE), since) == 2
    # An error at any moment of the work: what was done is not done again.
    for nth in (1, 2):
        source.sql("UPDATE t SET v = v + 1; DELETE FROM t WHERE id = (SELECT max(id) FROM t)")
        past.remember("public.t")
        kept.drain()
        monkeypatch.setattr(failpoints, "_passed", {})
        monkeypatch.setattr(failpoints, "_points", {"publish.in_history": ("raise:MemoryError", nth)})
        with pytest.raises(MemoryError):
            kept.publish()
        monkeypatch.setattr(failpoints, "_points", {})
        assert TABLE in kept.publish().histories
    assert past.compare("public.t", kept.lake.history(TABLE), since) == 4
    place = ["id", "_pgwal_valid_from_lsn"]
    assert history_of(kept).select(place).is_duplicated().sum() == 0


PUBLISH = """
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.spark.session import spark_session
publish(settings, lambda: spark_session(settings), progress=progress)
"""


@pytest.mark.soak
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "point", ["publish.before_history", "publish.in_history", "publish.between_tables", "publish.before_record", "publish.after_record"]
)
@pytest.mark.parametrize("again", [False, True])
def test_a_publish_that_is_killed(source: Source, pipeline: Pipeline, point: str, nth: int, again: bool) -> None:
    make_table(source)
    kept = with_history(pipeline)
    since = kept.sync().lsn
    assert since is not None
    past = Past(source)
    for statement in ("UPDATE t SET v = 1", "UPDATE t SET id = id + 100 WHERE id < 3", "INSERT INTO t VALUES (1, 1, 'x')"):
        source.sql(statement)
        past.remember("public.t")
    if again:
        source.sql("ALTER TABLE t ALTER v TYPE int USING v + 1")
        kept.drain()
        kept.snapshot()
    kept.drain()
    if nth == 1 or point == "publish.in_history":
        killed(kept, PUBLISH, f"{point}", PGWAL_TABLE_OPTIONS=kept.settings.table_options.to_json())
    kept.drain()
    kept.publish()
    kept.publish()
    assert past.compare("public.t", kept.lake.history(TABLE), since) == 3
    kept.assert_current("public.t")
    assert history_of(kept).filter(pl.col("_pgwal_open")).height == 7
    assert history_of(kept).select("id", "_pgwal_valid_from_lsn").is_duplicated().sum() == 0


@pytest.mark.soak
def test_a_protected_column_leaves_nothing_in_a_history(source: Source, pipeline: Pipeline) -> None:
    make_table(source)
    kept = with_history(pipeline)
    kept.sync()
    source.sql("UPDATE t SET body = 'planted-in-history' WHERE id = 1")
    kept.sync()
    guarded = with_history(pipeline, t={"history": True, "exclude": ["body"]})
    guarded.sync()
    guarded.sync()
    lake = Lake(guarded.settings.lake)
    assert "body" not in history_of(guarded).columns
    known = guarded.ledger.tables()[TABLE]
    assert known.unclean == ()
    assert known.history is not None
    for file in Path(lake.history(TABLE)).rglob("*"):
        assert not file.is_file() or b"planted-in-history" not in file.read_bytes()

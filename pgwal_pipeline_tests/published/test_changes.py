"""Changes between two publishes: net by key, in their order, or the whole table with the reason."""

from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.dataset as pads
import pytest

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.published.apply import apply_changes
from pgwal_pipeline.published.changes import Changes
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.published.state import PublishedState, open_state
from pgwal_pipeline_tests.pipelines import Pipeline


@pytest.fixture
def things(pipeline: Pipeline) -> Pipeline:
    """Six rows (id, v, big), published; `big` is a TOAST value."""
    pipeline.source.sql("CREATE TABLE t (id int PRIMARY KEY, v text, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    pipeline.source.sql("INSERT INTO t SELECT i, 'v' || i, repeat('b', 5000) FROM generate_series(1, 6) i")
    pipeline.sync()
    return pipeline


def _goes_on(pipeline: Pipeline, *statements: str) -> PublishedState:
    """The state before the statements; each is a transaction of its own."""
    before = open_state(pipeline.settings)
    for statement in statements:
        pipeline.source.sql(statement)
    pipeline.drain()
    pipeline.publish()
    return before


def _found(changes: Changes, spark: Any) -> list[tuple[Any, ...]]:
    """Key, change and value; the same by every reader."""
    columns = ["id", "_pgwal_change", "v", "_pgwal_first_lsn", "_pgwal_last_lsn"]
    by_arrow = sorted(changes.arrow().select(columns).to_pylist(), key=lambda row: row["id"])
    by_spark = sorted((row.asDict() for row in changes.spark(spark).select(columns).collect()), key=lambda row: row["id"])
    assert by_arrow == by_spark == changes.polars().select(columns).sort("id").collect().to_dicts()
    assert all(row["_pgwal_first_lsn"] <= row["_pgwal_last_lsn"] for row in by_arrow)
    return [(row["id"], row["_pgwal_change"], row["v"]) for row in by_arrow]


def test_one_row_a_key_with_its_newest_values(things: Pipeline, spark: Any) -> None:
    before = _goes_on(
        things,
        "UPDATE t SET v = 'new' WHERE id = 1",
        "UPDATE t SET v = 'newer' WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO t VALUES (7, 'v7', '')",
        "INSERT INTO t VALUES (8, 'v8', '')",
        "DELETE FROM t WHERE id = 8",
        "DELETE FROM t WHERE id = 3",
        "INSERT INTO t VALUES (3, 'again', '')",
        "UPDATE t SET id = 40 WHERE id = 4",
        "UPDATE t SET id = 50 WHERE id = 5",
        "UPDATE t SET id = 5 WHERE id = 50",
    )
    state = open_state(things.settings)
    changes = state.changes("public.t", since=before)
    assert (changes.since, changes.until, changes.complete, changes.reason, changes.key) == (before.lsn, state.lsn, False, None, ("id",))
    assert _found(changes, spark) == [
        (1, "update", "newer"),
        (2, "delete", None),
        (3, "update", "again"),
        (4, "delete", None),
        (5, "update", "v5"),
        (7, "insert", "v7"),
        (40, "insert", "v4"),
    ]
    assert changes.polars().filter(pl.col("id") == 40).select(pl.col("big").str.len_bytes()).collect().item() == 5000
    one = changes.arrow().filter(pads.field("id") == 1).to_pylist()[0]
    assert one["_pgwal_first_lsn"] < one["_pgwal_last_lsn"] == one["_pgwal_commit_lsn"]
    assert _found(state.changes("public.t", since=before.lsn), spark) == _found(changes, spark)
    assert _found(state.changes("public.t", since=state), spark) == []


def test_truncate_deletes_what_was_there(things: Pipeline, spark: Any) -> None:
    before = _goes_on(
        things, "DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (9, 'lost', '')", "TRUNCATE t", "INSERT INTO t VALUES (2, 'new', '')"
    )
    changes = open_state(things.settings).changes("public.t", since=before)
    assert _found(changes, spark) == [
        (1, "delete", None),
        (2, "update", "new"),
        *((number, "delete", None) for number in (3, 4, 5, 6)),
    ]


def test_the_history_has_each_change_in_its_order(things: Pipeline, spark: Any) -> None:
    before = _goes_on(things, "UPDATE t SET v = 'a' WHERE id = 1", "UPDATE t SET id = 11 WHERE id = 1", "DELETE FROM t WHERE id = 11")
    changes = open_state(things.settings).changes("public.t", since=before, history=True)
    wanted = [("U", 1), ("K", 1), ("U", 11), ("D", 11)]
    assert [(row["_pgwal_op"], row["id"]) for row in changes.arrow().to_pylist()] == wanted
    assert [(row["_pgwal_op"], row["id"]) for row in changes.spark(spark).collect()] == wanted
    assert changes.polars().select("_pgwal_unchanged").collect().to_series().to_list()[0] == ["big"]


def _whole(changes: Changes, reason: str, rows: int) -> None:
    assert changes.complete
    assert reason in (changes.reason or "")
    found = changes.arrow()
    assert found.num_rows == rows
    assert set(found["_pgwal_change"].to_pylist()) == {"insert"}
    assert found.schema.names == changes.polars().collect_schema().names()


def test_where_changes_cannot_be_told_it_is_the_whole_table(things: Pipeline) -> None:
    before = _goes_on(things, "UPDATE t SET v = 'new'", "CREATE TABLE bag (a int); ALTER TABLE bag REPLICA IDENTITY FULL")
    state = open_state(things.settings)
    _whole(state.changes("public.t"), "nothing of this table was read before", 6)
    _whole(state.changes("public.t", since="0/1"), "has no publish at or before 0/1 any more", 6)
    things.sync()
    things.source.sql("INSERT INTO bag VALUES (1), (1)")
    things.drain()
    things.publish()
    later = open_state(things.settings)
    _whole(later.changes("public.bag", since=before), f"was not published at {before.lsn}", 2)
    _whole(later.changes("public.bag", since=state), "was not published" if "public.bag" not in state.tables else "has no key", 2)
    things.resnapshot("public.t")
    _whole(open_state(things.settings).changes("public.t", since=later), f"has been read again since {later.lsn}", 6)
    with pytest.raises(PgwalError, match="which is older"):
        before.changes("public.t", since=later)
    with pytest.raises(PgwalError, match="neither an LSN"):
        later.changes("public.t", since="yesterday")


def test_what_was_pruned_from_raw_is_no_hole(things: Pipeline) -> None:
    before = _goes_on(things, "UPDATE t SET v = 'new' WHERE id = 1")
    between = _goes_on(things, "UPDATE t SET v = 'new' WHERE id = 2")
    windows = [window.key for window in things.ledger.windows() if window.start_lsn < window.end_lsn <= between.publish.lsn]
    things.ledger.prune_windows(windows)
    state = open_state(things.settings)
    _whole(state.changes("public.t", since=before), "pruned from raw", 6)
    assert state.changes("public.t", since=between).arrow().num_rows == 1


def _target(path: str) -> list[tuple[Any, ...]]:
    rows = TableDataset(path).to_table().to_pylist()
    return sorted((row["id"], row["v"], row.get("more")) for row in rows)


def test_a_table_of_ones_own_is_brought_along_once_for_each_change(things: Pipeline, spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "target")
    first = open_state(things.settings)
    with pytest.raises(PgwalError, match=r"has no rows of public\.t yet"):
        apply_changes(spark, path, _later(things, "UPDATE t SET v = 'a' WHERE id = 1").changes("public.t", since=first))
    assert apply_changes(spark, path, first.changes("public.t")) == 0
    second = open_state(things.settings)
    changes = second.changes("public.t", since=first)
    version = apply_changes(spark, path, changes)
    assert apply_changes(spark, path, changes) == version  # a run that died after the merge, and is repeated
    assert apply_changes(spark, path, first.changes("public.t")) == version  # and one that is older
    third = _later(
        things, "ALTER TABLE t ADD more timestamp", "INSERT INTO t VALUES (7, 'v7', '', '2026-01-31')", "DELETE FROM t WHERE id = 2"
    )
    fourth = _later(things, "TRUNCATE t", "INSERT INTO t VALUES (3, 'last', '', null)")
    with pytest.raises(PgwalError, match=rf"up to {second.lsn}, and these begin at {third.lsn}; take those since {second.lsn}"):
        apply_changes(spark, path, fourth.changes("public.t", since=third))
    apply_changes(spark, path, third.changes("public.t", since=first))  # more than it lacks does no harm
    moment = datetime(2026, 1, 31)
    assert _target(path) == [(1, "a", None), *((number, f"v{number}", None) for number in (3, 4, 5, 6)), (7, "v7", moment)]
    apply_changes(spark, path, fourth.changes("public.t", since=third), key=["id"])
    assert _target(path) == [(3, "last", None)]
    with pytest.raises(PgwalError, match=r"The history of public\.t cannot be applied"):
        apply_changes(spark, path, fourth.changes("public.t", since=third, history=True))


def _later(pipeline: Pipeline, *statements: str) -> PublishedState:
    """The state after the statements."""
    _goes_on(pipeline, *statements)
    return open_state(pipeline.settings)


def test_a_renamed_table_is_the_same_one(things: Pipeline, spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "target")
    before = open_state(things.settings)
    apply_changes(spark, path, before.changes("public.t"))
    things.source.sql("ALTER TABLE t RENAME TO u; UPDATE u SET v = 'new' WHERE id = 1")
    things.sync()
    changes = open_state(things.settings).changes("public.u", since=before)
    assert not changes.complete, changes.reason
    apply_changes(spark, path, changes)
    assert _target(path)[0] == (1, "new", None)


def test_keys_that_their_columns_cannot_hold_stay_apart(pipeline: Pipeline, spark: Any, tmp_path: Path) -> None:
    pipeline.source.sql("CREATE TABLE t (id date, n numeric(5,2), v text, PRIMARY KEY (id, n))")
    pipeline.source.sql(
        "INSERT INTO t VALUES ('infinity', 1, 'a'), ('-infinity', 1, 'b'), ('infinity', 'NaN', 'c'), ('2026-01-01', 1, 'd')"
    )
    pipeline.sync()
    before = open_state(pipeline.settings)
    state = _later(pipeline, "UPDATE t SET v = 'new' WHERE id = 'infinity' AND n = 1", "DELETE FROM t WHERE n = 'NaN'")
    changes = state.changes("public.t", since=before)
    found = [(dict(row["_pgwal_text"]), row["_pgwal_change"], row["v"]) for row in changes.arrow().to_pylist()]
    assert sorted(found, key=repr) == [
        ({"id": "infinity", "n": "NaN"}, "delete", None),
        ({"id": "infinity"}, "update", "new"),
    ]
    path = str(tmp_path / "target")
    apply_changes(spark, path, before.changes("public.t"))
    apply_changes(spark, path, changes)
    assert sorted(TableDataset(path).to_table()["v"].to_pylist()) == ["b", "d", "new"]


def test_nothing_has_happened_since_the_newest_publish(things: Pipeline, spark: Any) -> None:
    """The columns are those of changes, or of raw, as they are when something has."""
    before = _goes_on(things, "UPDATE t SET v = 'new' WHERE id = 1")
    state = open_state(things.settings)
    for history in (False, True):
        some, none = (state.changes("public.t", since=since, history=history) for since in (before, state))
        assert (some.complete, none.complete) == (False, False)
        assert some.arrow().num_rows > none.arrow().num_rows == none.spark(spark).count() == none.polars().collect().height == 0
        assert none.arrow().schema.names == some.arrow().schema.names
        assert none.spark(spark).columns == some.spark(spark).columns

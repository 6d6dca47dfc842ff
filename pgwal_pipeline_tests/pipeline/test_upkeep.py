"""Upkeep of `current` beside publishes: none is held up, none is lost, and it is done where it is needed."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import current, isolation, replacing, rewrite
from pgwal_pipeline.lake import upkeep as files_of
from pgwal_pipeline.lake.records import Publish, TablePointer, Window
from pgwal_pipeline.messages.errors import SlotBusy
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import upkeep
from pgwal_pipeline.pipeline.publish import alone
from pgwal_pipeline.pipeline.upkeep import Seen, Upkeep, keep_up, what_is_needed
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline

_HISTORY = timedelta(days=1)
_T = TableName("public", "t")
_DAY = 86_400.0


@pytest.fixture
def worn(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A pipeline with a table of several files that publishes have changed, and one beside it."""
    monkeypatch.setattr(rewrite, "_ROWS", -1)
    monkeypatch.setattr(isolation, "_FEW_ROWS", -1)
    monkeypatch.setattr(replacing, "FILE_BYTES", 4 << 10)
    monkeypatch.setattr(files_of, "_SMALL_FILES", 3)
    monkeypatch.setattr(files_of, "_TINY", 0)
    pipeline.source.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 1000) i;"
        "CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)"
    )
    pipeline.sync()
    for number in range(3):
        _change(pipeline, number)
    return pipeline


def _change(pipeline: Pipeline, number: int) -> None:
    pipeline.source.sql(f"UPDATE t SET v = 'round {number}' WHERE id % 20 = {number}; DELETE FROM t WHERE id = {number + 1}")
    pipeline.drain()
    pipeline.publish()


def _kept_up(pipeline: Pipeline, spark: Any, **more: Any) -> Upkeep:
    return keep_up(pipeline.settings, lambda: spark, pipeline.ledger, _HISTORY, Silent(), vacuum=False, **more)


def _path(pipeline: Pipeline) -> str:
    return pipeline.lake.current(_T)


def test_the_newest_publish_names_what_upkeep_made(worn: Pipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, path = worn.ledger.publish(), _path(worn)
    assert before is not None
    held: dict[str, bool] = {}

    def hit(point: str) -> None:
        if point.startswith("upkeep."):
            held[point] = not _is_free(worn)

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", hit)
        done = _kept_up(worn, spark)
    # While files are rewritten nobody holds the lock of publishes; while they are committed upkeep does.
    assert held == {"upkeep.rewritten": False, "upkeep.moved": True}
    assert (done.tables, done.rewritten, done.left, done.warnings) == (2, 1, 0, ())
    assert done.files >= 3
    after = worn.ledger.publish()
    assert after is not None
    assert after.lsn == before.lsn
    assert after.tables[_T] == TablePointer(path, current.version(path))
    assert after.tables[_T].version > before.tables[_T].version
    assert not pa.table(DeltaTable(path).deletion_vectors()).num_rows
    worn.assert_current("public.t", "public.other")
    assert _kept_up(worn, spark).rewritten == 0
    _change(worn, 5)
    worn.assert_current("public.t", "public.other")


def _at(name: str, work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do `work` when the failpoint `name` is passed for the first time."""
    passed: list[str] = []

    def hit(point: str) -> None:
        if point == name and not passed:
            passed.append(point)
            work()

    monkeypatch.setattr(failpoints, "hit", hit)


def _dies(point: str, worn: Pipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep that dies at `point` changes nothing."""

    def die() -> None:
        raise KeyboardInterrupt

    before = current.version(_path(worn))
    with monkeypatch.context() as patched:
        _at(point, die, patched)
        with pytest.raises(KeyboardInterrupt):
            _kept_up(worn, spark)
    assert current.version(_path(worn)) == before
    assert _is_free(worn)
    worn.assert_current("public.t", "public.other")


def test_after_one_that_died_a_publish_of_the_same_files_meanwhile_wins_and_upkeep_does_it_again(
    worn: Pipeline, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _dies("upkeep.moved", worn, spark, monkeypatch)
    _at("upkeep.rewritten", lambda: _change(worn, 7), monkeypatch)
    done = _kept_up(worn, spark)
    assert (done.rewritten, done.left) == (1, 0)
    worn.assert_current("public.t", "public.other")
    named = worn.ledger.publish()
    assert named is not None
    assert named.tables[_T].version == current.version(_path(worn))


def _is_free(pipeline: Pipeline) -> bool:
    try:
        with alone(pipeline.settings.model_copy(update={"busy_timeout": 0.0})):
            return True
    except SlotBusy:
        return False


@pytest.mark.soak
@pytest.mark.parametrize("point", ["upkeep.rewritten", "upkeep.moved"])
def test_upkeep_that_dies_is_done_by_the_next(point: str, worn: Pipeline, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _dies(point, worn, spark, monkeypatch)
    assert _kept_up(worn, spark).rewritten == 1
    worn.assert_current("public.t", "public.other")


@pytest.mark.soak
def test_when_time_is_up_it_says_what_is_left(worn: Pipeline, spark: Any) -> None:
    done = _kept_up(worn, spark, budget=-1.0)
    assert (done.rewritten, done.left) == (0, 1)
    worn.assert_current("public.t", "public.other")


@pytest.mark.soak
def test_a_publish_that_takes_long_is_not_disturbed(worn: Pipeline, spark: Any) -> None:
    at_work, done = threading.Event(), threading.Event()

    def publish() -> None:
        with alone(worn.settings):
            at_work.set()
            done.wait(60)

    thread = threading.Thread(target=publish)
    thread.start()
    at_work.wait(60)
    try:
        found = keep_up(
            worn.settings.model_copy(update={"busy_timeout": 0.2}), lambda: spark, worn.ledger, _HISTORY, Silent(), vacuum=False
        )
    finally:
        done.set()
        thread.join()
    assert found.rewritten == 0
    assert "publish" in found.warnings[0]


def test_no_spark_where_there_is_no_need(pipeline: Pipeline) -> None:
    pipeline.source.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    pipeline.sync()
    done = keep_up(pipeline.settings, lambda: pytest.fail("Spark was started"), pipeline.ledger, _HISTORY, Silent(), vacuum=False)
    assert done == Upkeep(tables=1)


# --- when it is needed ---


class _Ledger:
    """A ledger with one publish and some windows; what the rest of it says does not count here."""

    def __init__(self, versions: dict[str, int], windows: int = 0, completed: float = 0.0) -> None:
        tables = {TableName("public", name): TablePointer(name, version) for name, version in versions.items()}
        self._publish = Publish(lsn=1, published_at=datetime.now(UTC), tables=tables) if versions else None
        self._windows = windows
        self._at = datetime.fromtimestamp(completed, UTC)

    def publish(self) -> Publish | None:
        return self._publish

    def windows(self) -> list[Window]:
        return [Window(key=str(n), slot="s", start_lsn=n, end_lsn=n + 1, state="complete", at=self._at) for n in range(self._windows)]


def _need(ledger: Any, seen: Seen | None, now: float) -> upkeep.Need:
    return what_is_needed(Settings(lake="/lake"), ledger, seen, now)


def test_need_grows_with_commits_and_is_forgotten_when_it_was_asked_for() -> None:
    start = time.time()
    first = _need(_Ledger({"a": 5, "b": 7}), None, start)
    assert not first
    later = _need(_Ledger({"a": 24, "b": 7}), first.seen, start + 60)
    assert not later
    due = _need(_Ledger({"a": 25, "b": 7, "new": 3}), later.seen, start + 120)
    assert (due.whole, due.tables) == (False, ("public.a",))
    assert not _need(_Ledger({"a": 25, "b": 7, "new": 3}), due.seen, start + 180)
    again = _need(_Ledger({"a": 26, "b": 27, "new": 23}), due.seen, start + 240)
    assert again.tables == ("public.b", "public.new")
    made_anew = _need(_Ledger({"a": 0, "b": 27, "new": 23}), again.seen, start + 300)
    assert not made_anew
    assert _need(_Ledger({"a": 20, "b": 27, "new": 23}), made_anew.seen, start + 360).tables == ("public.a",)


def test_everything_is_due_once_a_day_and_when_raw_has_many_old_windows() -> None:
    start = time.time()
    seen = _need(_Ledger({"a": 5}), None, start).seen
    assert _need(_Ledger({"a": 5}), seen, start + _DAY).whole
    old = _Ledger({"a": 5}, upkeep._WINDOWS, start - 30 * _DAY)
    assert not _need(old, seen, start + 60), "raw is looked at once an hour"
    assert _need(old, seen, start + 3700).whole
    assert not _need(_Ledger({"a": 5}, upkeep._WINDOWS, start), seen, start + 3700)
    assert _need(_Ledger({"a": 5}), seen, start - _DAY).whole, "the clock was set back"
    assert not _need(_Ledger({}), seen, start + 2 * _DAY)


# --- for a long time ---


@pytest.mark.soak
def test_a_thousand_small_publishes_leave_a_table_that_is_read_like_a_new_one(pipeline: Pipeline, spark: Any) -> None:
    """Maintenance looks at it as often as the sensor asks for that; it is read whole in at most 1.3 times what a new one takes."""
    pipeline.source.sql(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int);"
        "INSERT INTO t SELECT i, md5(i::text) || md5((i * 7)::text), i FROM generate_series(1, 500000) i"
    )
    pipeline.sync()
    start, seen = time.time(), None
    publishes = int(os.environ.get("PGWAL_SOAK_PUBLISHES", "1000"))
    looks = 0
    for number in range(publishes):
        pipeline.source.sql(
            f"UPDATE t SET n = -{number} WHERE id % 50021 = {number * 37 % 50021};"
            f"UPDATE t SET n = {number} WHERE id BETWEEN {499_000 + number} AND {499_100 + number};"
            f"INSERT INTO t SELECT i, md5(i::text), 0 FROM generate_series({500_001 + number * 20}, {500_020 + number * 20}) i;"
            f"DELETE FROM t WHERE id = {number * 11 + 1}"
        )
        pipeline.drain()
        pipeline.publish()
        need = what_is_needed(pipeline.settings, pipeline.ledger, seen, start)
        seen = need.seen
        if need:
            looks += 1
            assert _kept_up(pipeline, spark, tables=need.tables).warnings == ()
    pipeline.assert_current("public.t")
    assert looks >= publishes // 25
    fresh = str(pipeline.lake.absolute("fresh"))
    rows = spark.read.format("delta").load(_path(pipeline))
    rows.repartitionByRange(2, "id").sortWithinPartitions("id").write.format("delta").save(fresh)

    def seconds(path: str) -> float:
        begin = time.perf_counter()
        spark.read.format("delta").load(path).selectExpr("sum(hash(*))").collect()
        return time.perf_counter() - begin

    worn, new = [], []
    for _ in range(9):
        worn.append(seconds(_path(pipeline)))
        new.append(seconds(fresh))
    files = len(DeltaTable(_path(pipeline)).file_uris())
    told = f"{publishes} publishes, {looks} looks, {files} files: {statistics.median(worn):.2f} s and {statistics.median(new):.2f} s"
    assert statistics.median(worn) <= 1.3 * statistics.median(new), told

"""The lake on an object store: the same calls as on a folder, on a server of the tests' own that speaks S3."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import polars as pl
import pytest

from pgwal_pipeline.lake.layout import Lake, storage_options
from pgwal_pipeline.lake.ledger import Ledger, Source, TableState, Window
from pgwal_pipeline.lake.maintenance import compact, prune_raw, vacuum
from pgwal_pipeline.lake.raw import WindowWriter, commit_window
from pgwal_pipeline.lake.snapshots import SnapshotWriter
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.lake.changes import inserts, read, relation
from pgwal_pipeline_tests.lake.contents import versions_of
from pgwal_pipeline_tests.scenarios.object_store.store import UNSET, VARIABLES, Fault, FaultyStore, faulty_store, object_store

_ORDERS = TableName("shop", "Orders")


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture
def lake(store: str, monkeypatch: pytest.MonkeyPatch) -> Lake:
    for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": store}.items():
        monkeypatch.setenv(name, value)
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    return Lake("s3://lakes/a/lake")


@pytest.fixture
def faulty(store: str, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """The same store, reached through one that can fail."""
    with faulty_store(store, tmp_path) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made


def test_everything_that_a_folder_takes_an_object_store_takes(lake: Lake) -> None:
    ledger = Ledger(lake)
    assert ledger.source() is None
    assert ledger.frontier() is None
    ledger.record_source(Source(1, 1, 1, "shop", "pgwal", "pgwal"))
    ledger.append_window(Window(window_key(100), "pgwal", 100, 100, "complete"))
    for start, known in ((100, True), (200, False)):
        key = window_key(start + 100)
        with WindowWriter(lake, 4096, key if known else None) as writer:
            for number in range(3):
                writer.add(inserts("Orders", {"id": [start + number], "name": ["n" * 2000]}, lsn=start))
            window = Window(key, "pgwal", start, start + 100, "prepared", tables=writer.finish(), at=datetime(2026, 1, 1, tzinfo=UTC))
        assert len(window.tables[0].files) > 1
        ledger.append_window(window)
        (prepared,) = Ledger(lake).prepared()
        assert prepared == window
        commit_window(lake, key, prepared.tables)
        commit_window(lake, key, prepared.tables)
        ledger.append_window(replace(window, state="complete"))
    ids = sorted((row["_pgwal_window"], row["id"]) for row in read(lake, lake.raw(_ORDERS)))
    assert ids == [(window_key(end), end - 100 + number) for end in (200, 300) for number in range(3)]
    frame = pl.scan_delta(lake.raw(_ORDERS), storage_options=storage_options(lake.uri)).select("_pgwal_window", "id").collect()
    assert sorted(frame.rows()) == ids

    SnapshotWriter(lake, relation("Orders", "id"), "g1").write("a1", [inserts("Orders", {"id": [1]}).rows.select(["id", "_pgwal_text"])])
    assert [row["_pgwal_chunk"] for row in read(lake, lake.snapshot(_ORDERS))] == ["a1"]

    assert compact(lake, [_ORDERS]) > 0
    ledger.record_tables([TableState(_ORDERS, 1, "ready", generation="g1", published="g1")])
    assert prune_raw(lake, ledger, datetime(2026, 2, 1, tzinfo=UTC), 200).keys == (window_key(200),)
    assert vacuum(lake, ledger, timedelta(0), timedelta(0)) > 0
    assert sorted(row["id"] for row in read(lake, lake.raw(_ORDERS))) == [200, 201, 202]
    assert Ledger(lake).frontier() == 300


def test_what_tells_the_content_of_a_table_is_read_in_a_store(lake: Lake) -> None:
    told = [version.rsplit("-", 1)[1] for version in versions_of(lake.current(TableName("shop", uuid.uuid4().hex)))]
    assert told[:6] == ["0", "1", "1", "1", "4", "5"]


def test_writers_of_one_log_exclude_each_other(lake: Lake) -> None:
    place = Lake(f"{lake.uri}-2")
    one, other = Ledger(place), Ledger(place)
    one.append_window(Window(window_key(200), "pgwal", 100, 200, "prepared"))
    with pytest.raises(LakeError, match="Only one pipeline"):
        other.append_window(Window(window_key(200), "other", 100, 200, "prepared"))


def test_two_that_append_at_once_both_land_and_each_sees_the_other(lake: Lake) -> None:
    place = Lake(f"{lake.uri}-3")

    def join(name: str) -> None:
        table = TableName("shop", name)
        Ledger(place).amend_tables(lambda known: [TableState(table, len(known), "pending")])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(join, "abcdefgh"))
    assert sorted(state.oid for state in Ledger(place).tables().values()) == list(range(8))


def test_a_missing_bucket_is_one_sentence(lake: Lake) -> None:
    with pytest.raises(LakeError, match=r"The lake cannot be used at s3://no-such-bucket/.*NoSuchBucket"):
        Ledger(Lake("s3://no-such-bucket/lake")).windows()


def test_a_place_that_holds_something_else_is_no_lake(lake: Lake) -> None:
    boto3.client("s3", region_name="us-east-1").put_object(Bucket="lakes", Key="other/thesis.odt", Body=b"x")
    with pytest.raises(LakeError, match="something else"):
        Ledger(Lake("s3://lakes/other")).source()


def _window(ledger: Ledger, start: int) -> Window:
    """Write a window of two tables as a drain does, up to its end."""
    key = window_key(start + 100)
    with WindowWriter(ledger.lake, 1 << 20, key) as writer:
        writer.add(inserts("Orders", {"id": [start, start + 1]}, lsn=start))
        writer.add(inserts("lines", {"id": [start]}, lsn=start))
        window = Window(key, "pgwal", start, start + 100, "prepared", tables=writer.finish(), at=datetime(2026, 1, 1, tzinfo=UTC))
    ledger.append_window(window)
    commit_window(ledger.lake, key, window.tables)
    ledger.append_window(replace(window, state="complete"))
    return window


def _assert_whole(place: Lake, starts: range) -> None:
    """Raw and ledger, read afresh, hold each window once."""
    assert sorted(row["id"] for row in read(place, place.raw(_ORDERS))) == [start + more for start in starts for more in (0, 1)]
    assert sorted(row["id"] for row in read(place, place.raw(TableName("shop", "lines")))) == list(starts)
    windows = [window for window in Ledger(place).windows() if window.start_lsn < window.end_lsn]
    assert [window.state for window in windows] == ["complete"] * len(starts)


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("PUT", r"_delta_log/.*json", "lose"),
        pytest.param("PUT", r"parquet", "500", marks=pytest.mark.soak),
        pytest.param("GET|HEAD", ".", "503", marks=pytest.mark.soak),
        (".*", ".", "reset"),
    ],
)
def test_a_store_that_fails_now_and_then(lake: Lake, faulty: FaultyStore, method: str, path: str, fault: Fault) -> None:
    """Requests that fail for a moment are tried again, and one that was done though its answer was lost is not taken for another's."""
    place = Lake(f"{lake.uri}-{uuid.uuid4().hex}")
    ledger = Ledger(place)
    ledger.append_window(Window(window_key(100), "pgwal", 100, 100, "complete"))
    faulty.fail(method, path, fault, chance=0.3, seed=1)
    for start in range(100, 400, 100):
        _window(ledger, start)
    assert len(faulty.failed()) > 2
    faulty.heal()
    _assert_whole(place, range(100, 400, 100))


def test_every_commit_whose_answer_is_lost(lake: Lake, faulty: FaultyStore) -> None:
    place = Lake(f"{lake.uri}-lost")
    ledger = Ledger(place)
    ledger.append_window(Window(window_key(100), "pgwal", 100, 100, "complete"))
    for start in range(100, 400, 100):
        faulty.fail("PUT", r"/_pgwal/\w+/_delta_log/", "lose", times=1)
        faulty.fail("PUT", r"/raw/.*/_delta_log/", "lose", times=1)
        _window(ledger, start)
        faulty.heal()
    assert len(faulty.failed()) == 6
    _assert_whole(place, range(100, 400, 100))


@pytest.mark.long
def test_a_store_that_fails_for_good_is_named_and_leaves_no_hole(lake: Lake, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Lake(f"{lake.uri}-broken")
    ledger = Ledger(place)
    ledger.append_window(Window(window_key(100), "pgwal", 100, 100, "complete"))
    _window(ledger, 100)
    for method, path in (("PUT", r"/raw/.*parquet"), ("PUT", r"/_pgwal/windows/.*json")):
        faulty.fail(method, path, "500")
        with pytest.raises(LakeError) as caught:
            _window(Ledger(place), 200)
        assert place.uri in str(caught.value)
        assert "\n" not in str(caught.value)
        faulty.heal()
    # Nothing of it counts, and the next attempt finds its way free.
    assert not Ledger(place).prepared()
    _assert_whole(place, range(100, 200, 100))
    _window(Ledger(place), 200)
    _assert_whole(place, range(100, 300, 100))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "path"), [("PUT", r"_delta_log/"), ("PUT|POST", "parquet"), ("GET|HEAD", "_delta_log"), ("GET", "parquet")]
)
def test_a_store_that_does_not_answer(lake: Lake, faulty: FaultyStore, method: str, path: str) -> None:
    """A request without an answer is given up (half a minute in delta-rs, a minute in Arrow) and made again."""
    place = Lake(f"{lake.uri}-{uuid.uuid4().hex}")
    ledger = Ledger(place)
    ledger.append_window(Window(window_key(100), "pgwal", 100, 100, "complete"))
    _window(ledger, 100)
    faulty.fail(method, path, "stall", times=1)
    _window(Ledger(place), 200)
    assert len(faulty.failed()) == 1
    _assert_whole(place, range(100, 300, 100))

"""The lake on an object store: the same calls as on a folder, on a server of the tests' own that speaks S3."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import boto3
import polars as pl
import pytest

from pgwal_pipeline.errors import LakeError
from pgwal_pipeline.lake.layout import Lake, storage_options
from pgwal_pipeline.lake.ledger import Ledger, Source, TableState, Window
from pgwal_pipeline.lake.maintenance import compact, prune_raw, vacuum
from pgwal_pipeline.lake.raw import WindowWriter, commit_window
from pgwal_pipeline.lake.snapshots import SnapshotWriter
from pgwal_pipeline.lsn import window_key
from pgwal_pipeline.relation import TableName
from pgwal_pipeline_tests.lake.changes import inserts, read, relation

_ORDERS = TableName("shop", "Orders")


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A process of its own: a store in this one could not answer calls that hold the interpreter's lock.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def lake(store: str, monkeypatch: pytest.MonkeyPatch) -> Lake:
    for name, value in {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": store}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ALLOW_HTTP", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="lakes")
    return Lake("s3://lakes/a/lake")


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

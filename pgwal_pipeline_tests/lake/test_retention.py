import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.log import CONFIGURATION
from pgwal_pipeline.lake.raw import CONFIGURATION as RAW
from pgwal_pipeline.lake.raw import WindowWriter, commit_window
from pgwal_pipeline.lake.retention import shorten_logs
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.lake.changes import inserts, read

_ORDERS = TableName("shop", "orders")
_LINES = TableName("shop", "lines")

_WINDOWS = """
import sys, time
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline_tests.lake.test_retention import drained
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    drained(Lake(sys.argv[1]), number)
    time.sleep(0.1)
"""


def drained(lake: Lake, number: int, table: str = "orders") -> None:
    """A window with one row of a table: the number."""
    key = window_key((number + 1) * 100)
    with WindowWriter(lake, 1 << 20, key) as writer:
        writer.add(inserts(table, {"id": [number]}, lsn=number * 100))
        writes = writer.finish()
    assert (failed := commit_window(lake, key, writes)) == {}, failed


def _log(lake: Lake, table: TableName = _ORDERS) -> Path:
    return Path(lake.raw(table), "_delta_log")


def _written_before(lake: Lake, seconds: float) -> list[int]:
    return [int(path.stem) for path in _log(lake).glob("*.json") if path.stat().st_mtime < seconds]


def _aged(lake: Lake, versions: Iterable[int]) -> None:
    """As if these versions had been written long ago."""
    for version in versions:
        for path in _log(lake).glob(f"{version:020}.*"):
            os.utime(path, (1e9, 1e9))


def _ids(lake: Lake, table: TableName = _ORDERS) -> list[int]:
    return sorted(row["id"] for row in read(lake, lake.raw(table)))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def test_old_commits_go_and_what_is_recent_stays_readable(lake: Lake) -> None:
    for number in range(12):
        drained(lake, number)
    newest = DeltaTable(lake.raw(_ORDERS)).version()
    shorten_logs(lake)  # the first checkpoint
    _aged(lake, range(newest + 1))
    for number in range(12, 15):
        drained(lake, number)
    pinned = DeltaTable(lake.raw(_ORDERS)).version()
    shorten_logs(lake)
    left = sorted(path.name for path in _log(lake).glob("*.json"))
    assert left[0] >= f"{newest:020}.json"
    assert len(left) < 8
    assert len(DeltaTable(lake.raw(_ORDERS), version=pinned).file_uris()) == 15
    assert _ids(lake) == list(range(15))
    drained(lake, 15)
    assert _ids(lake) == list(range(16))


def test_tables_of_an_earlier_version_get_the_properties_of_new_ones(lake: Lake) -> None:
    drained(lake, 0)
    raw = DeltaTable(lake.raw(_ORDERS))
    raw.alter.set_table_properties({"delta.logRetentionDuration": "interval 2 days"})
    shorten_logs(lake)
    assert RAW.items() <= DeltaTable(lake.raw(_ORDERS)).metadata().configuration.items()
    settled = DeltaTable(lake.raw(_ORDERS)).version()
    shorten_logs(lake)
    assert DeltaTable(lake.raw(_ORDERS)).version() == settled
    assert "hours" in CONFIGURATION["delta.logRetentionDuration"]


def test_a_table_whose_log_is_damaged_does_not_hold_up_its_neighbour(lake: Lake) -> None:
    for number in range(3):
        drained(lake, number)
        drained(lake, number, "lines")
    newest = max(_log(lake, _LINES).glob("*.json"))
    newest.write_text("not json")
    refused: list[TableError] = []
    shorten_logs(lake, refused.append)
    assert [lake.raw(_LINES) in str(error) for error in refused] == [True]
    assert list(_log(lake).glob("*.checkpoint.parquet"))


def test_killed_between_checkpoint_and_cleaning_it_goes_on_the_next_time(lake: Lake) -> None:
    for number in range(5):
        drained(lake, number)
    command = f"from pgwal_pipeline.lake.layout import Lake; from pgwal_pipeline.lake.retention import *; shorten_logs(Lake({lake.uri!r}))"
    killed = subprocess.run(
        [sys.executable, "-c", command], env=os.environ | {"PGWAL_FAILPOINTS": "maintenance.after_checkpoint=kill"}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert _ids(lake) == list(range(5))
    _aged(lake, range(5))
    drained(lake, 5)
    shorten_logs(lake)
    assert _ids(lake) == list(range(6))


def test_beside_a_drain_nothing_is_lost(lake: Lake) -> None:
    drained(lake, 0)
    drain = subprocess.Popen([sys.executable, "-c", _WINDOWS, lake.uri, "1", "60"])
    while drain.poll() is None:
        # What is three seconds old is old. A reader or a writer that sleeps for longer than its log is kept finds a hole in it.
        _aged(lake, _written_before(lake, time.time() - 3))
        shorten_logs(lake)
    assert drain.returncode == 0
    assert _ids(lake) == list(range(60))
    assert not (_log(lake) / f"{1:020}.json").exists()

"""Memory is bounded by settings and not by what comes: by large transactions, by a snapshot beside a drain, by a writer that is slow."""

import json
import sys
import threading
from typing import Any

import polars as pl
import pytest

from pgwal_pipeline.lake.raw import WindowWriter
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.postgres.stream import Messages, ReplicationStream
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.support import Source, wait_for

_MB = 1 << 20
_BUDGET = 8 * _MB
_ROWS = 240_000  # of one kB each
_WORKERS = 2
# What the README says of PGWAL_MEMORY_BUDGET, in bytes above what an idle process takes.
_A_DRAIN = 64 * _MB + 4 * _BUDGET
_A_WORKER = 48 * _MB

# What a process of its own takes at most for some work, in bytes above what it held before; all that it needs is loaded by then.
_PEAK = """
import gc, json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.host.memory import give_back
from pgwal_pipeline.pipeline.drain import drain
from pgwal_pipeline.pipeline.snapshot import snapshot

def told(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024

def read():
    snapshot(settings, progress=progress)

def follow():
    assert drain(settings, progress=progress).changes == {rows}

def both():
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        follow()
        reading.result()

drain(settings, progress=progress)
read()
with plain_session(settings.dsn) as conn:
    if "{work}" == "both":
        conn.execute("CREATE TABLE u (LIKE t INCLUDING ALL)")
        conn.execute("INSERT INTO u SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, {rows}) i; ANALYZE u")
        drain(settings, progress=progress)
    conn.execute("INSERT INTO t SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, {rows}) i")
gc.collect()
give_back()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = told("VmRSS")
{work}()
print(json.dumps(told("VmHWM") - before))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="what a process took at most is read from /proc")
@pytest.mark.parametrize(("work", "bound"), [("follow", _A_DRAIN), ("both", _A_DRAIN + _WORKERS * _A_WORKER)])
def test_a_process_takes_no_more_than_its_settings_say(work: str, bound: int, source: Source, make_pipeline: MakePipeline) -> None:
    """One transaction thirty times as large as the budget; and beside a drain of it a snapshot of as many rows."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL; INSERT INTO t VALUES (0, '')")
    pipeline = make_pipeline(snapshot_chunk_rows=_ROWS // 2)
    settings = {"PGWAL_MEMORY_BUDGET": f"{_BUDGET // _MB}MB", "PGWAL_SNAPSHOT_WORKERS": str(_WORKERS)}
    done = pipeline.child(_PEAK.format(rows=_ROWS, work=work), environment=settings, timeout=400)
    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{work}: {peak / _MB:.0f} of {bound / _MB:.0f} MB")  # noqa: T201
    assert peak <= bound


def test_a_slow_writer_does_not_make_the_reader_take_in_everything(
    source: Source, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader stands still with a quarter of the budget in its hands while the writer writes, and goes on after that."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pipeline = make_pipeline(memory_budget="1MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    source.sql("INSERT INTO t SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 20000) i")
    begun, let_go, came, stood = threading.Event(), threading.Event(), [0], [0]
    add, read, keep_alive = WindowWriter.add, ReplicationStream.read, ReplicationStream.keep_alive

    def slowly(self: WindowWriter, changes: Any) -> None:
        begun.set()
        let_go.wait(120)
        add(self, changes)

    def counted(self: ReplicationStream, *args: Any) -> Messages:
        messages = read(self, *args)
        came[0] += messages.size
        return messages

    def standing(self: ReplicationStream) -> None:
        stood[0] += 1
        keep_alive(self)

    monkeypatch.setattr(WindowWriter, "add", slowly)
    monkeypatch.setattr(ReplicationStream, "read", counted)
    monkeypatch.setattr(ReplicationStream, "keep_alive", standing)
    drained: list[int] = []
    draining = threading.Thread(target=lambda: drained.append(pipeline.drain().changes))
    draining.start()
    try:
        assert begun.wait(60)
        wait_for(lambda: stood[0] >= 4 or came[0] > 10 * _MB, what="the reader to stand still, or to take everything in")
        held = came[0]
    finally:
        let_go.set()
        draining.join()
    assert held <= _MB // 2, "a quarter of the budget, and what comes at once"
    assert drained == [20000]
    assert sorted(pl.read_delta(pipeline.lake.raw(TableName("public", "t")))["id"]) == list(range(1, 20001))

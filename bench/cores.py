"""How much sooner a publish of many tables is done on two cores than on one."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.report import Measure, Result
from bench.source import PUBLICATION, make_database, make_tables, server, values
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.snapshot import snapshot
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session

_ROWS = 200
_CHANGED = 20
_WARM_UP = 2  # rounds that are not counted: they include what a JVM does once


def one_and_two(tables: int, rounds: int) -> Result:
    """Measure publishes of `tables` tables with 20 changed rows each, in a warm session on one core and in one on two.

    Each has a process, a slot and a lake of its own; they work in turns on the same changes. A process on one core has no other: its JVM's
    compiler and collector share it too.
    """
    with server() as postgres, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        dsn = make_database(postgres, "bench")
        names = make_tables(dsn, tables)
        with plain_session(dsn) as conn:
            for name in names:
                conn.execute(f"INSERT INTO {name} SELECT {values('n')} FROM generate_series(1::bigint, {_ROWS}) n".encode())
        workers = {cores: stack.enter_context(_worker(dsn, Path(folder), cores)) for cores in (1, 2)}
        for worker in workers.values():
            _answer(worker)
        measured: dict[int, list[float]] = {1: [], 2: []}
        for number in range(_WARM_UP + rounds):
            with plain_session(dsn) as conn:
                for name in names:
                    conn.execute(f"UPDATE {name} SET quantity = -{number + 1} WHERE id <= {_CHANGED}".encode())
            for cores, worker in workers.items():
                measured[cores].append(_round(worker))
    one, two = (Measure(f"{cores} core{'s' if cores > 1 else ''}", "s", tuple(measured[cores][_WARM_UP:])) for cores in (1, 2))
    return Result(
        "cores",
        f"a publish of {tables} tables of ten columns with {_CHANGED} changed rows each, in a warm session",
        (one, two),
        one.median / two.median,
        "one core / two cores",
    )


def _worker(dsn: str, folder: Path, cores: int) -> "subprocess.Popen[str]":
    arguments = [dsn, str(folder / f"lake_{cores}"), f"bench_{cores}", str(cores)]
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", "bench.cores", *arguments], stdin=pipe, stdout=pipe, text=True)


def _round(worker: "subprocess.Popen[str]") -> float:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(_answer(worker))


def _answer(worker: "subprocess.Popen[str]") -> Any:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)["seconds"]
    raise RuntimeError("the process that publishes has ended; see above")


def main(dsn: str, lake: str, slot: str, cores: int) -> None:
    """Read all tables, then publish what has changed for each line on standard input; print the publish's seconds."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    settings = Settings.from_environment(
        {}, source_dsn=dsn, lake=lake, slot=slot, publication=PUBLICATION, spark_master=f"local[{cores}]", spark_idle=0
    )
    spark = spark_session(settings)
    bootstrap(settings, progress=Silent())
    snapshot(settings, progress=Silent())

    def work() -> None:
        drain(settings, progress=Silent())
        began = time.perf_counter()
        publish(settings, lambda: spark, progress=Silent())
        sys.stdout.write(json.dumps({"seconds": time.perf_counter() - began}) + "\n")
        sys.stdout.flush()

    work()
    for _ in sys.stdin:
        work()
    spark.stop()


if __name__ == "__main__":
    _dsn, _lake, _slot, _cores = sys.argv[1:]
    main(_dsn, _lake, _slot, int(_cores))

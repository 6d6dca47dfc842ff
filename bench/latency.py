"""How long a commit takes to `current`, under `dagster dev` with its sensors, while the source changes all the time."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from bench.report import Measure, Result
from bench.source import make_database, server
from pgwal_pipeline.host.spawn import free_port
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.postgres.connection import plain_session

_TABLES = 10
_ROWS = 1000  # in each table
_CHANGES = 40  # a transaction
_TRANSACTIONS = 10  # a second
_ROOT = Path(__file__).parents[1]
_WARMING_UP = 60.0  # seconds, after which the engine has compiled what it runs
_START_SECONDS = 300.0


def commit_to_visible(seconds: float, variants: Sequence[dict[str, str]]) -> Result:
    """Measure for `seconds` of 400 changes a second on ten tables how old each commit is when a publish shows it.

    `variants` are settings: each is measured by itself.
    """
    measures = tuple(measure for settings in variants for measure in _measured(seconds, settings))
    return Result("latency", f"400 changes a second on {_TABLES} tables, {seconds:.0f} s", measures)


def _measured(seconds: float, settings: dict[str, str]) -> tuple[Measure, ...]:
    with server() as postgres, tempfile.TemporaryDirectory(prefix="pgwal-bench-") as folder:
        dsn, home = make_database(postgres, "latency"), Path(folder) / "home"
        home.mkdir()
        (home / "dagster.yaml").write_bytes((_ROOT / "pgwal_pipeline" / "instance.yaml").read_bytes())
        made = {"PGWAL_SOURCE_DSN": dsn, "PGWAL_LAKE": f"{folder}/lake", "DAGSTER_HOME": str(home)}
        _fill(dsn)
        with _dagster_dev(os.environ | made | settings, home / "dev.log"):
            ages = _ages(dsn, Ledger(Lake(made["PGWAL_LAKE"])), seconds)
    shown = ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"
    ordered = sorted(ages)
    found = {"p50": ordered[len(ordered) // 2], "p95": ordered[len(ordered) * 95 // 100], "longest": ordered[-1]}
    return tuple(Measure(f"commit to visible, {name} ({shown})", "s", (age,)) for name, age in found.items())


def _fill(dsn: str) -> None:
    with plain_session(dsn) as conn:
        for table in range(_TABLES):
            columns = "id int PRIMARY KEY, a int, b text, c text, d numeric, e timestamptz, f int, g int, h text, i int"
            conn.execute(f"CREATE TABLE t{table} ({columns})".encode())
            rows = f"SELECT n, n, 'b' || n, 'c', n, now(), n, n, 'h', n FROM generate_series(1, {_ROWS}) n"
            conn.execute(f"INSERT INTO t{table} {rows}".encode())


@contextmanager
def _dagster_dev(environment: dict[str, str], log: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "dagster", "dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def _ages(dsn: str, ledger: Ledger, seconds: float) -> list[float]:
    """Change the source until `seconds` after the first publish and the warming up, and return the age of each commit when it showed."""
    commits: list[tuple[int, float]] = []
    over = threading.Event()
    writer = threading.Thread(target=_write, args=(dsn, commits, over))
    began = time.monotonic()
    while _published(ledger) is None:
        if time.monotonic() - began > _START_SECONDS:
            raise TimeoutError("Nothing was published.")
        time.sleep(1)
    writer.start()
    ages, seen, begin = [], 0, time.monotonic()
    try:
        while time.monotonic() - begin < _WARMING_UP + seconds:
            published, now = _published(ledger) or 0, time.monotonic()
            upto = bisect_left(commits, published, key=lambda commit: commit[0])
            if begin + _WARMING_UP <= now:
                ages += [now - at for _, at in commits[seen:upto]]
            seen = upto
            time.sleep(0.1)
    finally:
        over.set()
        writer.join()
    return ages


def _published(ledger: Ledger) -> int | None:
    publish = ledger.publish()
    return None if publish is None else publish.lsn


def _write(dsn: str, commits: list[tuple[int, float]], over: threading.Event) -> None:
    with plain_session(dsn) as conn:
        for number in count():
            if over.wait(1 / _TRANSACTIONS):
                return
            table, first = number % _TABLES, number * 7 % (_ROWS - _CHANGES) + 1
            conn.execute(f"UPDATE t{table} SET a = a + 1 WHERE id >= {first} AND id < {first + _CHANGES}".encode())
            ((lsn,),) = conn.execute(b"SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchall()
            commits.append((int(lsn), time.monotonic()))

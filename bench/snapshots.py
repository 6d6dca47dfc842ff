"""How fast a snapshot is, compared with COPY alone, and whether its memory grows with the table."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.memory import peak_pss
from bench.report import Measure, Result
from bench.source import PUBLICATION, make_database, make_tables, server, values
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings

_READ = """
import json, time
from pgwal_pipeline.pipeline.snapshot import snapshot
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.settings import Settings
began = time.perf_counter()
report = snapshot(Settings.from_environment(), progress=Silent())
print(json.dumps({"seconds": time.perf_counter() - began, "rows": sum(table.rows for table in report.tables)}))
"""


_SMALL_ROWS = 100


def against_copy(rows: int, rounds: int) -> Result:
    """Measure reading a table of `rows` rows and ten columns into the lake in chunks against one discarded `COPY … TO STDOUT`."""
    ours, theirs, memory = [], [], []
    with server() as postgres:
        dsn = _filled(postgres, "bench", rows)
        for number in range(rounds):
            theirs.append(_copy_seconds(dsn))
            seconds, peak = _snapshot(dsn, rows, f"round_{number}")
            ours.append(seconds)
            memory.append(peak)
        larger = _filled(postgres, "larger", rows * 10 // 3)
        smaller = _filled(postgres, "smaller", rows // 3)
        peaks = [_snapshot(smaller, rows // 3, "smaller")[1], _snapshot(larger, rows * 10 // 3, "larger")[1]]
    read, copied = Measure("snapshot", "s", tuple(ours)), Measure("COPY", "s", tuple(theirs))
    measures = (
        read,
        copied,
        Measure("memory (PSS)", "MB", tuple(memory)),
        Measure(f"memory at {rows // 3:,} rows", "MB", (peaks[0],)),
        Measure(f"memory at {rows * 10 // 3:,} rows", "MB", (peaks[1],)),
    )
    return Result("snapshot", f"{rows:,} rows of 10 columns", measures, copied.median / read.median, "rate of the snapshot / rate of COPY")


def many_small_tables(counts: tuple[int, int], rounds: int) -> Result:
    """Measure the first reading of many tables of 100 rows and ten columns, of a smaller and a larger number of them."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    with server() as postgres:
        for count in counts:
            dsn = make_database(postgres, f"small_{count}")
            with plain_session(dsn) as conn:
                for table in make_tables(dsn, count):
                    conn.execute(f"INSERT INTO {table} SELECT {values('n')} FROM generate_series(1::bigint, {_SMALL_ROWS}) n".encode())
                conn.execute(b"VACUUM ANALYZE")
            for number in range(rounds):
                seconds[count].append(_snapshot(dsn, count * _SMALL_ROWS, f"small_{count}_{number}")[0])
    few, many = (Measure(f"{count:,} tables", "s", tuple(seconds[count])) for count in counts)
    ratio = (many.median / counts[1]) / (few.median / counts[0])
    return Result("first_reading", f"tables of {_SMALL_ROWS} rows", (few, many), ratio, "time a table of many / of few")


def _filled(postgres: Postgres, name: str, rows: int) -> str:
    dsn = make_database(postgres, name)
    (table,) = make_tables(dsn, 1)
    with plain_session(dsn) as conn:
        conn.execute(f"INSERT INTO {table} SELECT {values('n')} FROM generate_series(1::bigint, {rows}) n".encode())
        conn.execute(f"VACUUM ANALYZE {table}".encode())
        conn.execute(b"CHECKPOINT")
    return dsn


def _copy_seconds(dsn: str) -> float:
    began = time.perf_counter()
    with plain_session(dsn) as conn, conn.cursor() as cursor, Path(os.devnull).open("wb") as nothing:
        cursor.copy_expert("COPY t00 TO STDOUT", nothing)
    return time.perf_counter() - began


def _snapshot(dsn: str, rows: int, name: str) -> tuple[float, float]:
    """Take a snapshot in a new process; return its seconds and its peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"source_dsn": dsn, "lake": str(Path(folder, "lake")), "publication": PUBLICATION, "slot": name}
        bootstrap(Settings.from_environment({}, **values), progress=Silent())
        environment = {**os.environ, **{f"PGWAL_{key.upper()}": value for key, value in values.items()}}
        process = subprocess.Popen([sys.executable, "-c", _READ], env=environment, stdout=subprocess.PIPE, text=True)
        peak = peak_pss(process) / 2**20
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    with plain_session(dsn) as conn:
        conn.execute("SELECT pg_drop_replication_slot(%s)", [name])
    assert found["rows"] == rows
    return found["seconds"], peak

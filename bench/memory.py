"""How much memory a drain takes, and that it does not depend on the size of a transaction."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.report import Measure, Result
from bench.source import PUBLICATION, make_database, server
from pgwal_pipeline.postgres.connection import plain_session

_BUDGET = "128MB"


def one_transaction(rows: tuple[int, int], rounds: int) -> Result:
    """Measure the peak memory (PSS) of a drain of one transaction of narrow rows, first with `rows[0]` rows, then with `rows[1]`."""
    measures = []
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        for count in (0, *rows):
            dsn = make_database(postgres, f"rows_{count}")
            with plain_session(dsn) as conn:
                conn.execute("CREATE TABLE narrow (id bigint PRIMARY KEY, value integer NOT NULL)")
                conn.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES".encode())
            environments = [
                {
                    "PGWAL_SOURCE_DSN": dsn,
                    "PGWAL_LAKE": str(Path(folder, f"{count}_{number}")),
                    "PGWAL_SLOT": f"rows_{count}_{number}",
                    "PGWAL_PUBLICATION": PUBLICATION,
                    "PGWAL_MEMORY_BUDGET": _BUDGET,
                }
                for number in range(rounds)
            ]
            for environment in environments:
                peak_of_drain(environment)  # makes the slot
            with plain_session(dsn) as conn:
                conn.execute("INSERT INTO narrow SELECT n, n FROM generate_series(1, %s) n", [max(count, 1)])
            peaks = tuple(peak_of_drain(environment) / 2**20 for environment in environments)
            what = f"one transaction of {count:,} rows" if count else "nothing to drain"
            measures.append(Measure(f"{what}, PGWAL_MEMORY_BUDGET={_BUDGET}", "MB", peaks))
    idle, small, large = measures
    return Result(
        "memory",
        "largest memory (PSS) of the processes of a drain",
        (idle, small, large),
        large.median / small.median,
        f"{rows[1]:,} rows / {rows[0]:,} rows",
        {"above a drain of nothing": f"{large.median - idle.median:,.0f} MB"},
    )


def peak_of_drain(environment: Mapping[str, str]) -> float:
    """Run a drain in a new process; return the peak PSS, in bytes, of it and its children together."""
    program = "from pgwal_pipeline.pipeline.drain import drain; from pgwal_pipeline.messages.progress import Silent; "
    program += "from pgwal_pipeline.settings import Settings; drain(Settings.from_environment(), progress=Silent())"
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **environment}) as process:
        return peak_pss(process)


def peak_pss(process: "subprocess.Popen[Any]") -> int:
    """Wait for a process to end; return the peak PSS, in bytes, of it and its children together, sampled every 0.1 s."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_pss, _family(process.pid))))
        time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"the process ended with code {process.returncode}")
    return peak


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _pss(process: psutil.Process) -> int:
    """Return the PSS of a process in bytes, in which shared pages count in proportion. A JVM counts as 0."""
    try:
        return 0 if process.name() == "java" else process.memory_full_info().pss
    except psutil.Error:
        return 0

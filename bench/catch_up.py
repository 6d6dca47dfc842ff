"""How much faster a catch-up is, and what it costs the server: a backlog read in one, two and three windows, against `pg_recvlogical`."""

import os
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from bench.drains import make_slot, pg_recvlogical
from bench.report import Measure, Result
from bench.source import PUBLICATION, flush_lsn, load, make_database, make_tables, server
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import catch_up
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import parse_lsn

_READERS = (1, 2, 3)
_CHANGES_AT_ONCE = 200_000


def in_windows(backlog: int, rounds: int) -> Result:
    """Measure draining `backlog` bytes of WAL in one, two and three windows, and reading them with one `pg_recvlogical`."""
    # The planner takes no more windows than there are cores. This benchmark shows why, so it must not be limited.
    catch_up.cores = lambda: max(_READERS)
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        dsn = make_database(postgres, "bench")
        tables = make_tables(dsn, 5)
        for number in range(rounds):
            for readers in _READERS:
                bootstrap(_settings(dsn, folder, readers, number), progress=Silent())
            make_slot(dsn, f"recv_{number}")
        first = parse_lsn(flush_lsn(dsn))
        made = times = 0
        while parse_lsn(end := flush_lsn(dsn)) - first < backlog:
            made += load(dsn, tables, _CHANGES_AT_ONCE, times)
            times += 1
        with plain_session(dsn) as conn:
            conn.execute("CHECKPOINT")
        spent: dict[str, list[tuple[float, float, float]]] = {}
        for number in range(rounds):
            received = _spent(postgres, lambda number=number: pg_recvlogical(postgres, dsn, f"recv_{number}", end))
            spent.setdefault("pg_recvlogical to /dev/null", []).append(received)
            for readers in _READERS:
                settings = _settings(dsn, folder, readers, number)

                def work(settings: Settings = settings, readers: int = readers) -> None:
                    report = drain(settings, progress=Silent())
                    assert (report.changes, len(report.windows)) == (made, readers)

                spent.setdefault(f"drain, {readers} window{'s' * (readers > 1)}", []).append(_spent(postgres, work))
        size = parse_lsn(end) - first
    kinds = ("", ": server's CPU", ": readers' CPU")
    measures = [
        Measure(what + kind, "s", tuple(round_[place] for round_ in values))
        for place, kind in enumerate(kinds)
        for what, values in spent.items()
    ]
    medians = {measure.what: measure.median for measure in measures}
    return Result(
        "catch_up",
        f"{size / 2**30:.2f} GB of WAL, {made:,} changes over 5 tables of 10 columns",
        tuple(measures),
        medians["drain, 2 windows"] / medians["drain, 1 window"],
        "two windows / one",
        {"three windows / one": f"{medians['drain, 3 windows'] / medians['drain, 1 window']:.2f}"},
    )


def _settings(dsn: str, folder: str, readers: int, number: int) -> Settings:
    return Settings.from_environment(
        {},
        source_dsn=dsn,
        lake=str(Path(folder, f"{readers}_{number}")),
        slot=f"in_{readers}_{number}",
        publication=PUBLICATION,
        catchup_threshold="1MB",
        catchup_slots=readers - 1,
        window_size="1TB",  # one reader reads the whole backlog as one window
        window_time="1d",
    )


def _spent(postgres: Postgres, work: Callable[[], object]) -> tuple[float, float, float]:
    """Return the wall seconds of `work`, the CPU seconds of the server's processes, and those of this process with its children."""
    os.sync()
    server_before, own_before, begin = _server_cpu(postgres), _own_cpu(), time.perf_counter()
    work()
    wall, own = time.perf_counter() - begin, _own_cpu() - own_before
    time.sleep(1)  # the CPU time of ended processes counts only once their parent has reaped them
    return wall, _server_cpu(postgres) - server_before, own


def _own_cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _server_cpu(postgres: Postgres) -> float:
    """Return the CPU seconds of the server's processes, including those that have ended."""
    pid = postgres.pid
    assert pid is not None
    server = psutil.Process(pid)
    spent = sum(server.cpu_times()[:4])  # its own, and its ended children's
    for child in server.children():
        with suppress(psutil.NoSuchProcess):
            spent += sum(child.cpu_times()[:2])
    return spent

"""How fast a drain is, compared with the server's own `pg_recvlogical`, and over many tables compared with one."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from bench.report import Measure, Result
from bench.source import PUBLICATION, flush_lsn, load, make_database, make_tables, server
from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings


def against_pg_recvlogical(changes: int, rounds: int) -> Result:
    """Measure a drain into durable raw tables against `pg_recvlogical`, which discards the same messages."""
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        dsn = make_database(postgres, "bench")
        tables = make_tables(dsn, 5)
        # A slot for each round, created before the load, so that each has the same backlog.
        for number in range(rounds):
            bootstrap(_settings(dsn, folder, number), progress=Silent())
            make_slot(dsn, f"recv_{number}")
        made = load(dsn, tables, changes)
        end = flush_lsn(dsn)
        ours, theirs, rows = [], [], 0
        for number in range(rounds):
            theirs.append(pg_recvlogical(postgres, dsn, f"recv_{number}", end))
            seconds, rows = _drain(_settings(dsn, folder, number))
            ours.append(seconds)
            assert rows == made, f"{made} changes were made, {rows} were drained"
        files = sum(path.stat().st_size for path in Path(folder, "0").rglob("*.parquet"))
    drained, received = Measure("drain to durable Delta", "s", tuple(ours)), Measure("pg_recvlogical to /dev/null", "s", tuple(theirs))
    return Result(
        "drain",
        f"{made:,} changes over 5 tables of 10 columns",
        (drained, received),
        drained.median / received.median,
        "drain / pg_recvlogical; 1 is the WAL's own speed",
        {"changes a second": f"{made / drained.median:,.0f}", "Parquet written": f"{files / 2**20:,.0f} MB"},
    )


def many_tables(changes: int, rounds: int) -> Result:
    """Measure draining the same changes over 50 tables and in one."""
    measures = []
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        for count in (1, 50):
            dsn = make_database(postgres, f"bench_{count}")
            tables = make_tables(dsn, count)
            place = str(Path(folder, str(count)))
            for number in range(rounds):
                bootstrap(_settings(dsn, place, number, prefix=f"t{count}"), progress=Silent())
            made = load(dsn, tables, changes)
            measures.append(
                Measure(
                    f"drain of {made:,} changes, {count} table{'s' * (count > 1)}",
                    "s",
                    tuple(_drain(_settings(dsn, place, number, prefix=f"t{count}"))[0] for number in range(rounds)),
                )
            )
    one, fifty = measures
    return Result("tables", "the same changes over 50 tables and in one", (one, fifty), fifty.median / one.median, "50 tables / 1 table")


def with_hashes(changes: int, rounds: int) -> Result:
    """Measure a drain with two of ten columns hashed, a number with many values and a text that is different in each row."""
    options = {"hashed": {"*.*": {"hash": ["customer", "note"]}}, "plain": {}}
    taken: dict[str, list[float]] = {name: [] for name in options}
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        dsn = make_database(postgres, "bench")
        tables = make_tables(dsn, 5)

        def settings(name: str, number: int) -> Settings:
            plain = _settings(dsn, str(Path(folder, name)), number, prefix=name)
            return Settings.from_environment(plain.to_environment() | {"PGWAL_HASH_KEY": "k" * 64}, table_options=options[name])

        for number in range(rounds):
            for name in options:
                bootstrap(settings(name, number), progress=Silent())
        made = load(dsn, tables, changes)
        for number in range(rounds):
            for name, seconds in taken.items():
                seconds.append(_drain(settings(name, number))[0])
    hashed, plain = (Measure(f"drain of {made:,} changes, {name}", "s", tuple(seconds)) for name, seconds in taken.items())
    return Result(
        "hash", "a drain with two of ten columns hashed, and without", (hashed, plain), hashed.median / plain.median, "hashed / plain"
    )


def _settings(dsn: str, folder: str, number: int, prefix: str = "pgwal") -> Settings:
    return Settings.from_environment(
        {}, source_dsn=dsn, lake=str(Path(folder, str(number))), slot=f"{prefix}_{number}", publication=PUBLICATION
    )


def _drain(settings: Settings) -> tuple[float, int]:
    """Return the wall seconds of a drain, including checks and confirmation, and its number of changes."""
    os.sync()
    begin = time.perf_counter()
    report = drain(settings, progress=Silent())
    return time.perf_counter() - begin, sum(window.changes for window in report.windows)


def make_slot(dsn: str, name: str) -> None:
    """Create a slot for `pg_recvlogical`."""
    with plain_session(dsn) as conn:
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])


def pg_recvlogical(postgres: Postgres, dsn: str, slot: str, end: str) -> float:
    """Read `slot` up to `end` with `pg_recvlogical`, which discards what it reads; return the wall seconds."""
    options = [f"--option=publication_names={PUBLICATION}", "--option=proto_version=4", f"--endpos={end}"]
    command = [
        str(postgres.installation.bin / "pg_recvlogical"),
        f"--dbname={dsn}",
        f"--slot={slot}",
        "--start",
        "--no-loop",
        "--file=/dev/null",
    ]
    os.sync()
    begin = time.perf_counter()
    subprocess.run([*command, *options], check=True)
    return time.perf_counter() - begin

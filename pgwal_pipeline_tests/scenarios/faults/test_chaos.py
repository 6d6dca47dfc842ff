"""Chaos: whatever is killed at whatever moment of a run under load, one plain run afterwards leaves every change once and `current` right.

`make soak` goes on for `PGWAL_CHAOS_ROUNDS` rounds (200) and writes its figures to artifacts/chaos.json; a failure prints the seed.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import psycopg2
import psycopg2.errors
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.postgres.connection import Connection, plain_session
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.connect_server import ConnectServer
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source, fresh_source, no_room, wait_for

TABLES = ("a", "b", "c")
# What a run does, in a process of its own that can be killed.
RUN = """
from pgwal_pipeline.cli import main
main(["{command}"])
"""
FAULTS = (
    "kill", "kill", "kill", "interrupt", "terminate", "child", "walsender", "backends", "server", "server_stop", "spark", "disk_full",
    "source_full",
)  # fmt: skip


class Chaos:
    """One database, one lake, and rounds of faults."""

    def __init__(self, server: Postgres, source: Source, pipeline: Pipeline, remote: ConnectServer | str, seed: int) -> None:
        self.server = server
        self.source = source
        self.pipeline = pipeline
        self.remote = remote
        self.address = remote if isinstance(remote, str) else remote.address
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.rows = self.changes = self.born = 0
        for table in TABLES:
            source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, n int, body text); ALTER TABLE {table} ALTER body SET STORAGE EXTERNAL")
            source.sql(f"INSERT INTO {table} SELECT i, 0, repeat('x', 3000) FROM generate_series(1, 100) i; ANALYZE {table}")

    def round(self, fault: str | None = None) -> None:
        """A run under load, a fault at some moment of it, a plain run, and a comparison."""
        fault = fault or self.rng.choice(FAULTS)
        if self.rng.random() < 0.2:
            self._new_table()
        with self._load():
            time.sleep(self.rng.random())
            process = self._start("sync" if self.rng.random() < 0.7 else "drain", fault)
            # Half of them soon after the pipeline's own work has begun, which takes the shorter part of a run.
            time.sleep(self.rng.uniform(0, 12) if self.rng.random() < 0.5 else self.rng.uniform(4, 8))
            if process.poll() is None or fault in ("server", "server_stop", "source_full"):
                self.faults[fault] += 1
                self._strike(fault, process)
            else:
                self.faults["none"] += 1
            _, err = process.communicate(timeout=300)
            self.codes[f"{fault}:{process.returncode}"] += 1
            assert "Traceback" not in err, err
        self._plain_run()
        self._compare()

    def _start(self, command: str, fault: str) -> "subprocess.Popen[str]":
        limit = self.rng.randint(2_000, 60_000)

        def little_room() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return subprocess.Popen(
            [sys.executable, "-c", RUN.format(command=command)],
            env=self.pipeline.environment(
                PGWAL_SPARK_REMOTE=self.address, PGWAL_CATCHUP_THRESHOLD="1MB", PGWAL_MEMORY_BUDGET="1MB", PGWAL_LAG_THRESHOLD="1MB"
            ),
            cwd=Path(self.pipeline.settings.lake).parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=little_room if fault == "disk_full" else None,
        )

    def _strike(self, fault: str, process: "subprocess.Popen[str]") -> None:
        match fault:
            case "kill":
                process.kill()
            case "interrupt" | "terminate":
                process.send_signal(signal.SIGINT if fault == "interrupt" else signal.SIGTERM)
                process.wait(timeout=32)
            case "child":
                with contextlib.suppress(psutil.NoSuchProcess):
                    children = psutil.Process(process.pid).children(recursive=True)
                    for child in children or [psutil.Process(process.pid)]:
                        child.kill()
            case "walsender" | "backends":
                only = "AND backend_type = 'walsender'" if fault == "walsender" else "AND application_name LIKE 'pgwal%'"
                for _ in range(self.rng.randint(1, 3)):
                    self.source.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() {only}")
                    time.sleep(self.rng.random())
            case "server" | "server_stop":
                self.server.kill() if fault == "server" else self.server.stop()
                time.sleep(self.rng.random())
                self.server.start()
                self.source.close()
            case "spark":
                assert isinstance(self.remote, ConnectServer)
                self.remote.kill()
                self.remote.start()
            case "source_full":
                # What transactions put beside the slot, the slot's own state, tables, and at less than a segment of WAL all of it.
                with no_room(self.server, self.rng.choice((100, 20_000, 200_000, 16 << 20))):
                    time.sleep(self.rng.uniform(1, 6))
                if not self.server.running:  # it gave up
                    self.server.kill()
                    self.server.start()
                self.source.close()

    @contextlib.contextmanager
    def _load(self) -> Iterator[None]:
        """Three writers at work, who come back when the server does."""
        stop = threading.Event()
        writers = [threading.Thread(target=self._write, args=(self.rng.random(), stop)) for _ in range(3)]
        for writer in writers:
            writer.start()
        try:
            yield
        finally:
            stop.set()
            for writer in writers:
                writer.join()

    def _write(self, seed: float, stop: threading.Event) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            with contextlib.suppress(psycopg2.Error), plain_session(self.source.dsn, connect_timeout=2) as conn:
                while not stop.is_set():
                    self._transaction(rng, conn)
                    time.sleep(rng.random() * 0.03)

    def _transaction(self, rng: random.Random, conn: Connection) -> None:
        conn.execute("SET lock_timeout = '200ms'")
        try:
            for _ in range(rng.randint(1, 8)):
                table, key, other = rng.choice(TABLES), rng.randint(1, 400), rng.randint(1, 400)
                conn.execute(
                    rng.choice(
                        [
                            f"INSERT INTO {table} VALUES ({key}, 1, repeat('y', 3000)) ON CONFLICT (id) DO UPDATE SET n = {table}.n + 1",
                            f"UPDATE {table} SET n = n + 1 WHERE id BETWEEN {key} AND {key} + 20",
                            f"UPDATE {table} SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT FROM {table} WHERE id = {other})",
                            f"DELETE FROM {table} WHERE id = {key}",
                        ]
                    ).encode()
                )
            if rng.random() < 0.01:
                conn.execute(f"TRUNCATE {rng.choice(TABLES)}".encode())
            conn.rollback() if rng.random() < 0.1 else conn.commit()
        except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DeadlockDetected, psycopg2.errors.UniqueViolation):
            conn.rollback()

    def _new_table(self) -> None:
        """Something to be read while the rest goes on."""
        self.born += 1
        self.source.sql(f"CREATE TABLE more_{self.born} (id int PRIMARY KEY, v text)")
        self.source.sql(f"INSERT INTO more_{self.born} SELECT i, 'v' FROM generate_series(1, 500) i; ANALYZE more_{self.born}")
        if self.born > 2:
            self.source.sql(f"DROP TABLE more_{self.born - 2}")

    def _plain_run(self) -> None:
        for _ in range(4):
            drains.bootstrap(self.pipeline.settings, progress=Silent())
            if snapshots.needed(self.pipeline.settings):
                self.pipeline.snapshot()
            self.pipeline.drain()
            self.pipeline.publish()
            if not snapshots.needed(self.pipeline.settings):
                return
        raise AssertionError(f"still to be read: {snapshots.needed(self.pipeline.settings)}")

    def _compare(self) -> None:
        here = [row[0] for row in self.source.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
        self.pipeline.assert_current(*(f"public.{table}" for table in here))
        for table in here:
            self.rows += self.source.value(f"SELECT count(*) FROM {table}")
            raw = pl.scan_delta(self.pipeline.lake.raw(TableName("public", table))).select(
                "_pgwal_commit_lsn", "_pgwal_ordinal", "_pgwal_op"
            )
            found = raw.collect()
            assert found.is_duplicated().sum() == 0, f"{table}: changes stand in raw twice"
            self.changes = max(self.changes, found.height)
        assert self._in_raw() == sum(window.changes for window in self.pipeline.ledger.windows()), "raw lacks changes that were counted"
        assert self.pipeline.ledger.plan() is None
        wait_for(lambda: self._left() == [], what="what the runs left on the source to go")

    def _in_raw(self) -> int:
        """Changes in raw, of tables that are gone too."""
        tables = [self.pipeline.lake.raw(table) for table in self.pipeline.ledger.tables()]
        there = [path for path in tables if DeltaTable.is_deltatable(path)]
        return sum(pl.scan_delta(path).filter(pl.col("_pgwal_op") != "K").select(pl.len()).collect().item() for path in there)

    def _left(self) -> list[Any]:
        """Slots and locks that should not be there when nothing runs."""
        slots = self.source.sql(
            "SELECT slot_name::text FROM pg_replication_slots WHERE slot_name <> %s OR active", self.pipeline.settings.slot
        )
        return slots + self.source.sql("SELECT pid FROM pg_locks WHERE locktype = 'advisory'")


def run(
    rounds: int,
    seed: int,
    make_server: Callable[..., Postgres],
    make_pipeline: Callable[..., Pipeline],
    remote: ConnectServer | str,
    spark: Any,
) -> None:
    server = make_server(max_replication_slots="20", max_wal_senders="20", logical_decoding_work_mem="64kB")
    with fresh_source(server) as source:
        pipeline = make_pipeline(source_dsn=source.dsn, snapshot_chunk_rows=40)
        pipeline.source, pipeline.spark = source, lambda: spark
        chaos = Chaos(server, source, pipeline, remote, seed)
        for number in range(rounds):
            fault = FAULTS[2:][number] if rounds <= len(FAULTS[2:]) else None
            try:
                chaos.round(fault)
            except BaseException as error:
                raise AssertionError(f"seed {seed}, round {number} after {dict(chaos.faults)}: {error}") from error
            figures = {"seed": seed, "rounds": number + 1, "faults": dict(chaos.faults), "exit_codes": dict(chaos.codes)}
            Path("artifacts").mkdir(exist_ok=True)
            Path("artifacts/chaos.json").write_text(json.dumps(figures | {"rows_compared": chaos.rows}, indent=1))


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[ConnectServer]:
    """A server to kill."""
    with ConnectServer(Settings(spark_conf={"spark.driver.memory": "1g"}), tmp_path / "connect.log") as server:
        yield server


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_few_faults(
    make_server: Callable[..., Postgres], make_pipeline: Callable[..., Pipeline], connect_address: str, spark: Any
) -> None:
    """Of the process that runs alone: it is killed, interrupted and terminated."""
    run(3, 1, make_server, make_pipeline, connect_address, spark)


@pytest.mark.soak
def test_many_faults(
    make_server: Callable[..., Postgres], make_pipeline: Callable[..., Pipeline], remote: ConnectServer, spark: Any
) -> None:
    rounds, seed = int(os.environ.get("PGWAL_CHAOS_ROUNDS", "200")), int(os.environ.get("PGWAL_TEST_SEED", "1"))
    run(rounds, seed, make_server, make_pipeline, remote, spark)

"""A pipeline of the test's own: a lake in a temporary folder, fed from the `source` fixture's database."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import publish as publishes
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.reports import DrainReport, PublishReport
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests import children
from pgwal_pipeline_tests.oracle import assert_equal
from pgwal_pipeline_tests.shared_spark import PARTS
from pgwal_pipeline_tests.support import Source

_PRELUDE = """
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.messages.progress import Silent
settings, progress = Settings.from_environment(), Silent()
"""


@dataclass
class Pipeline:
    """Runs the pipeline's stages in this process; `child` runs one in a process of its own, to be killed."""

    source: Source
    settings: Settings
    spark: Callable[[], Any]

    @property
    def lake(self) -> Lake:
        return Lake(self.settings.lake)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.lake)

    def drain(self, end_lsn: int | None = None) -> DrainReport:
        return drains.drain(self.settings, end_lsn=end_lsn, progress=Silent())

    def snapshot(self, *tables: str) -> None:
        """Read what needs it, or `tables` again; transactions from before a table joined are waited for."""
        names = [TableName.parse(table) for table in tables] or None
        snapshots.snapshot(self.settings, names, progress=Silent(), patience=self.settings.blocked_timeout)

    def publish(self, tables: list[TableName] | None = None) -> PublishReport:
        return publishes.publish(self.settings, self.spark, tables=tables, progress=Silent())

    def resnapshot(self, *tables: str) -> PublishReport:
        """Read tables again, drain past that, and publish."""
        self.snapshot(*tables)
        self.drain()
        return self.publish()

    def sync(self) -> PublishReport:
        """Everything once, in the order in which a first run does it."""
        drains.bootstrap(self.settings, progress=Silent())
        if snapshots.needed(self.settings):
            self.snapshot()
        self.drain()
        return self.publish()

    def assert_current(self, *tables: str) -> None:
        """The newest publish holds just what the source holds now (nobody may write meanwhile)."""
        publish, states = self.ledger.publish(), self.ledger.tables()
        assert publish is not None, "nothing was published"
        for table in tables:
            name = TableName.parse(table)
            pointer = publish.tables[name]
            assert_equal(self.source, table, pointer.path, pointer.version, states[name].dropped)

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PGWAL_")},
            "PGWAL_SOURCE_DSN": self.source.dsn,
            "PGWAL_LAKE": self.settings.lake,
            "PGWAL_SLOT": self.settings.slot,
            "PGWAL_PUBLICATION": self.settings.publication,
            "PGWAL_SPARK_IDLE": "0",
            "PGWAL_SPARK_CONF": json.dumps({"spark.driver.memory": "1g", **PARTS}),
            "PGWAL_SNAPSHOT_CHUNK_ROWS": str(self.settings.snapshot_chunk_rows),
            "DAGSTER_HOME": str(Path(self.settings.lake).parent / "dagster"),
            **extra,
        }

    def child(self, code: str, *, environment: Mapping[str, str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python `code` in a process of its own, with `settings` and `progress` at hand and PGWAL_* in its environment."""
        everything = self.environment(**(environment or {}))
        return children.completed(children.run_code, _PRELUDE + code, environment=everything, cwd=Path.cwd(), timeout=timeout)

    @contextmanager
    def started(self, code: str, *, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """As `child`, but the test goes on beside it; killed at the end, if it is still there."""
        with subprocess.Popen([sys.executable, "-c", _PRELUDE + code], env=self.environment(**environment)) as process:
            try:
                yield process
            finally:
                process.kill()


DRAIN = "from pgwal_pipeline.pipeline.drain import drain\ndrain(settings, progress=progress)"


def killed(pipeline: Pipeline, code: str, point: str, **environment: str) -> None:
    done = pipeline.child(code, environment={"PGWAL_FAILPOINTS": f"{point}=kill", **environment})
    assert done.returncode == -signal.SIGKILL, done.stderr


def read_once(source: Source, pipeline: Pipeline) -> None:
    """A table that has been read whole, and changes since that are not drained."""
    source.sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 10) i")
    drains.bootstrap(pipeline.settings, progress=Silent())
    pipeline.snapshot()
    pipeline.drain()
    assert snapshots.needed(pipeline.settings) == ()
    source.sql("INSERT INTO t VALUES (11, 0)")


def ids_in_raw(pipeline: Pipeline) -> list[int]:
    return sorted(pl.read_delta(pipeline.lake.raw(TableName("public", "t")))["id"].to_list())


MakePipeline = Callable[..., Pipeline]


def lead_to(make_pipeline: MakePipeline, pipeline: Pipeline, source: Source, spark: Any) -> Pipeline:
    """The same lake, slot and publication on another server."""
    names = {"slot": pipeline.settings.slot, "publication": pipeline.settings.publication, "lake": pipeline.settings.lake}
    led = make_pipeline(source_dsn=source.dsn, **names)
    led.source, led.spark = source, lambda: spark
    return led

"""How fast what is published is read: the changes between two publishes, and whole tables against readers that know nothing of us."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pyarrow.dataset as pads

from bench.report import Measure, Result
from bench.source import PUBLICATION, make_database, make_tables, server, values
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.snapshot import snapshot
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.published.changes import Changes
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.published.state import PublishedState, open_state
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.values.own_columns import COMMIT_LSN, WINDOW

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLE = "public.t00"
_FEW = "SELECT status, count(*) AS n, sum(amount) AS amount, max(day) AS day FROM {} WHERE quantity > 4 GROUP BY status ORDER BY status"
_ALL = "SELECT count(*) AS n, max(customer), max(amount), max(note), max(score), max(day), max(changed_at), max(_pgwal_commit_lsn) FROM {}"


def against_plain_readers(rows: int, changed: int, rounds: int) -> Result:
    """Measure the changes of `changed` keys of a table of `rows` rows, and scans of that table against plain ones of its files."""
    with tempfile.TemporaryDirectory() as folder:
        settings, spark, older = _two_publishes(Path(folder), rows, changed)
        newer = open_state(settings)
        changes = newer.changes(_TABLE, since=older)
        assert not changes.complete, changes.reason
        by_spark = _times(rounds, lambda: changes.spark(spark).drop("_pgwal_text").selectExpr("sum(hash(*))").collect())
        files = _files(changes, spark)
        spark.stop()
        found = newer.changes(_TABLE, since=older).polars().collect()
        assert found.height == changed, found.height
        measures = [
            Measure("changes, Spark", "s", by_spark),
            Measure("changes, Polars", "s", _times(rounds, lambda: newer.changes(_TABLE, since=older).polars().collect())),
        ]
        facts: dict[str, Any] = {"files": files}
        for what, query in (("few columns", _FEW), ("all columns", _ALL)):
            for reader, (ours, plain) in _scans(newer, query).items():
                assert ours() == plain() or (reader == "DuckDB" and not _has_delta_scan()), f"{reader}: {what}"
                pair = _alternating(rounds + 2, ours, plain)
                measures += [Measure(f"{reader}, {what}", "s", pair[0]), Measure(f"{reader}, {what}, plain", "s", pair[1])]
                facts[f"{reader}, {what}, ours / plain"] = round(measures[-2].median / measures[-1].median, 3)
    medians = {measure.what: measure.median for measure in measures}
    return Result(
        "published",
        f"{changed:,} changed keys of {rows:,} rows of 10 columns; scans of that table",
        tuple(measures),
        medians["DuckDB, few columns"] / medians["DuckDB, few columns, plain"],
        f"a scan by state.duckdb() / by {_plain_duckdb_name()}, few columns",
        facts,
    )


def _two_publishes(folder: Path, rows: int, changed: int) -> "tuple[Settings, SparkSession, PublishedState]":
    """Publish the table twice, with the changes between; return the settings, the session and the first publish."""
    with server() as postgres:
        dsn = make_database(postgres, "bench")
        make_tables(dsn, 1)
        settings = Settings.from_environment({}, source_dsn=dsn, lake=str(folder / "lake"), publication=PUBLICATION, spark_idle=0)
        _sql(dsn, f"INSERT INTO t00 SELECT {values('n')} FROM generate_series(1::bigint, {rows}) n")
        spark = spark_session(settings)
        bootstrap(settings, progress=Silent())
        snapshot(settings, progress=Silent())
        drain(settings, progress=Silent())
        publish(settings, lambda: spark, progress=Silent())
        older = open_state(settings)
        step, updated, new = max(rows // changed, 1), changed * 8 // 10, changed // 10
        _sql(dsn, f"UPDATE t00 SET quantity = 49, note = 'again ' || note WHERE id % {step} = 1 AND id <= {updated * step}")
        _sql(dsn, f"DELETE FROM t00 WHERE id % {step} = 1 AND id > {updated * step} AND id <= {(changed - new) * step}")
        _sql(dsn, f"INSERT INTO t00 SELECT {values('n')} FROM generate_series({rows + 1}::bigint, {rows + new}) n")
        drain(settings, progress=Silent())
        publish(settings, lambda: spark, progress=Silent())
    return settings, spark, older


def _files(changes: Changes, spark: "SparkSession") -> str:
    """Return how many files of `current` and of raw the changes are read from, and how many there are."""
    assert changes.span is not None
    assert changes.raw is not None
    newer, raw = TableDataset(*_place(changes.newer)), TableDataset(*_place(changes.raw))
    by_arrow = len(newer.files(pads.field(COMMIT_LSN) >= changes.span.since))
    windows = (pads.field(WINDOW) > changes.span.first_window) & (pads.field(WINDOW) <= changes.span.last_window)
    frame = spark.read.format("delta").option("versionAsOf", changes.newer.version).load(changes.newer.path)
    by_spark = len(frame.where(f"{COMMIT_LSN} >= {changes.span.since}").inputFiles())
    return (
        f"current: {by_spark} by Spark, {by_arrow} by Arrow, of {len(newer.files())}; raw: {len(raw.files(windows))} of {len(raw.files())}"
    )


def _place(at: Any) -> tuple[str, int]:
    return at.path, at.version


def _scans(state: PublishedState, query: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By reader: a scan of the published table, and the same one by a reader that is given the table's place."""
    path, version = state.tables[_TABLE]

    def polars(frame: pl.LazyFrame) -> list[Any]:
        return pl.SQLContext(t=frame).execute(query.format("t")).collect().rows()

    return {
        "Polars": (lambda: polars(state.polars(_TABLE)), lambda: polars(pl.scan_delta(path, version=version))),
        "DuckDB": (lambda: state.duckdb([_TABLE]).sql(query.format(_TABLE)).fetchall(), lambda: _plain_duckdb(path, version, query)),
    }


def _plain_duckdb(path: str, version: int, query: str) -> list[Any]:
    """Run the query by DuckDB's own reader of Delta tables where it is at hand, else by its reader of Parquet files.

    The latter does less: it also returns the rows that are deleted by vectors.
    """
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    if _has_delta_scan():
        connection.load_extension("delta")
        return connection.sql(query.format(f"delta_scan('{path}', version={version})")).fetchall()
    files = [f"{path}/{name}" for name in TableDataset(path, version).files()]
    return connection.sql(query.format(f"read_parquet({files})")).fetchall()


def _has_delta_scan() -> bool:
    try:
        duckdb.connect().load_extension("delta")
    except duckdb.Error:
        return False
    return True


def _plain_duckdb_name() -> str:
    return "DuckDB's delta_scan" if _has_delta_scan() else "DuckDB's read_parquet"


def _alternating(rounds: int, *works: Callable[[], Any]) -> list[tuple[float, ...]]:
    """Time each work once a round, in turns."""
    found = [[_seconds(work) for work in works] for _ in range(rounds)]
    return [tuple(column) for column in zip(*found, strict=True)]


def _times(rounds: int, work: Callable[[], Any]) -> tuple[float, ...]:
    """Time the work `rounds` times, after one that is not counted."""
    return tuple(_seconds(work) for _ in range(rounds + 1))[1:]


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _sql(dsn: str, statement: str) -> None:
    with plain_session(dsn) as conn:
        conn.execute(statement.encode())

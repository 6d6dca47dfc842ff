"""How fast a publish is, compared with a hand-written MERGE for one table."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Measure, Result
from bench.source import PUBLICATION, make_database, make_tables, server, values
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.snapshot import snapshot
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLE = "t00"


def against_merge(rows: int, changed: int, rounds: int) -> Result:
    """Measure a publish of `changed` keys into a table of `rows` rows against a MERGE of the same rows, both in one warm session."""
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        dsn = make_database(postgres, "bench")
        make_tables(dsn, 1)
        settings = Settings.from_environment({}, source_dsn=dsn, lake=str(Path(folder, "lake")), publication=PUBLICATION, spark_idle=0)
        _sql(dsn, f"INSERT INTO {_TABLE} SELECT {values('n')} FROM generate_series(1::bigint, {rows}) n")
        spark = spark_session(settings)
        bootstrap(settings, progress=Silent())
        snapshot(settings, progress=Silent())
        drain(settings, progress=Silent())
        current = next(iter(publish(settings, lambda: spark, progress=Silent()).tables.values())).path
        by_hand = str(Path(folder, "by_hand"))
        _copy(spark, current, by_hand)
        ours, theirs = [], []
        for number in range(rounds + 1):
            change(dsn, rows, changed, number)
            drain(settings, progress=Silent())
            source = _newest_rows(dsn, spark, Path(folder, f"changed_{number}"), number)
            theirs.append(_seconds(lambda source=source: _merge_by_hand(spark, by_hand, source)))
            ours.append(_seconds(lambda: publish(settings, lambda: spark, progress=Silent())))
        _assert_same(spark, current, by_hand)
        spark.stop()
    # The first round is left out: it includes what a JVM does once.
    published = Measure("publish", "s", tuple(ours[1:]))
    merged = Measure("MERGE by hand", "s", tuple(theirs[1:]))
    return Result(
        "publish",
        f"{changed:,} changed keys into {rows:,} rows of 10 columns, in a warm session",
        (published, merged),
        published.median / merged.median,
        "publish / a MERGE written by hand",
    )


def change(dsn: str, rows: int, changed: int, number: int) -> None:
    """Change rows in one transaction: nine tenths updates all over the table, one tenth new rows, each marked with the round's number."""
    updates, step = changed * 9 // 10, max(rows * 10 // (changed * 9), 1)
    first = rows + 1 + number * changed
    with plain_session(dsn) as conn, conn.transaction():
        conn.execute(
            f"UPDATE {_TABLE} SET quantity = -{number + 1}, note = 'again ' || note "
            f"WHERE id <= {min(rows, updates * step)} AND id % {step} = {number % step}".encode()
        )
        conn.execute(
            f"INSERT INTO {_TABLE} (id, customer, status, amount, note, score, active, day, changed_at, quantity) "
            f"SELECT id, customer, status, amount, note, score, active, day, changed_at, -{number + 1} FROM "
            f"(SELECT {values('n')} FROM generate_series({first}::bigint, {first + changed // 10 - 1}) n) "
            "made (id, customer, status, amount, quantity, note, score, active, day, changed_at)".encode()
        )


def _newest_rows(dsn: str, spark: "SparkSession", path: Path, number: int) -> str:
    """Write the rows that round `number` changed to a Delta table, from which the hand-written MERGE reads; return its path."""
    path.mkdir()
    # As text, since Spark's CSV reader does not know `t` and `f` as booleans.
    columns = "id, customer, status, amount, quantity, note, score, active::text, day, changed_at"
    statement = f"COPY (SELECT {columns} FROM {_TABLE} WHERE quantity = -{number + 1}) TO STDOUT (FORMAT csv)".encode()
    with plain_session(dsn) as conn, conn.cursor() as cursor, (path / "rows.csv").open("wb") as file:
        cursor.copy_expert(statement, file)
    schema = spark.read.format("delta").load(str(path.parent / "by_hand")).schema
    target = str(path / "delta")
    spark.read.schema(schema).csv(str(path / "rows.csv"), timestampFormat="yyyy-MM-dd HH:mm:ssX").write.format("delta").save(target)
    return target


def _copy(spark: "SparkSession", source: str, target: str) -> None:
    """Copy the table for the hand-written MERGE: only the source's columns, with deletion vectors on."""
    frame = spark.read.format("delta").load(source)
    frame.select([name for name in frame.columns if not name.startswith("_pgwal_")]).write.format("delta").option(
        "delta.enableDeletionVectors", "true"
    ).save(target)


def _merge_by_hand(spark: "SparkSession", target: str, source: str) -> None:
    spark.sql(
        f"MERGE INTO delta.`{target}` t USING delta.`{source}` s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    ).collect()


def _assert_same(spark: "SparkSession", current: str, by_hand: str) -> None:
    ours = spark.read.format("delta").load(current)
    theirs = spark.read.format("delta").load(by_hand)
    ours = ours.select(theirs.columns)
    different = ours.exceptAll(theirs).count() + theirs.exceptAll(ours).count()
    assert different == 0, f"the two ways differ in {different} rows"


def _sql(dsn: str, statement: str) -> None:
    with plain_session(dsn) as conn:
        conn.execute(statement.encode())


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin

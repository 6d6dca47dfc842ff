"""What a history costs a publish, and how that depends on its length."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.publishes import change
from bench.report import Measure, Result
from bench.source import PUBLICATION, make_database, make_tables, server, values
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.snapshot import snapshot
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.values.own_columns import OPEN, VALID_FROM_LSN, VALID_TO, VALID_TO_LSN
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import parse_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLE = "t00"
_VERSIONS = (1, 10, 50)


def by_length(rows: int, changed: int, rounds: int) -> Result:
    """Measure publishes of `changed` keys into a table of `rows` rows, without a history and with ones of 1, 10 and 50 versions a row."""
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        dsn = make_database(postgres, "bench")
        make_tables(dsn, 1)
        with plain_session(dsn) as conn:
            conn.execute(f"INSERT INTO {_TABLE} SELECT {values('n')} FROM generate_series(1::bigint, {rows}) n".encode())
        plain = _settings(dsn, folder, "plain", None)
        kept = _settings(dsn, folder, "kept", True)
        spark = spark_session(plain)
        for settings in (plain, kept):
            bootstrap(settings, progress=Silent())
            snapshot(settings, progress=Silent())
            drain(settings, progress=Silent())
            publish(settings, lambda: spark, progress=Silent())
        history = Lake(kept.lake).history(TableName("public", _TABLE))
        without: list[float] = []
        found: dict[int, list[float]] = {}
        number = 0
        for versions in _VERSIONS:
            if versions > 1:
                _lengthen(spark, history, versions - max(1, *(known for known in (*found, 1) if known < versions)))
            seconds = found.setdefault(versions, [])
            for _ in range(rounds + 1):
                change(dsn, rows, changed, number)
                number += 1
                for settings in (plain, kept):
                    drain(settings, progress=Silent())
                without.append(_publish(plain, spark))
                seconds.append(_publish(kept, spark))
        spark.stop()
    # The first round of each is left out: it includes what a JVM does once.
    measures = [Measure("without a history", "s", tuple(without[1:]))]
    measures += [Measure(f"with one of {versions} versions a row", "s", tuple(seconds[1:])) for versions, seconds in found.items()]
    longest, shortest = measures[-1].median, measures[1].median
    return Result(
        "history",
        f"a publish of {changed:,} changed keys into {rows:,} rows of 10 columns, in a warm session",
        tuple(measures),
        longest / shortest,
        f"with {_VERSIONS[-1]} versions a row / with {_VERSIONS[0]}",
        {"with / without": round(shortest / measures[0].median, 2)},
    )


def _settings(dsn: str, folder: str, name: str, history: bool | None) -> Settings:
    options = parse_options({"*.*": {"history": history}} if history else None)
    return Settings.from_environment(
        {}, source_dsn=dsn, lake=str(Path(folder, name)), slot=name, publication=PUBLICATION, spark_idle=0, table_options=options
    )


def _lengthen(spark: "SparkSession", path: str, versions: int) -> None:
    """Add so many ended versions of each open row to a history, in files such as maintenance leaves."""
    rows = spark.read.format("delta").load(path)
    opened = rows.where(OPEN)
    ended = {VALID_TO_LSN: f"{VALID_FROM_LSN} + number", VALID_FROM_LSN: f"{VALID_FROM_LSN} + number - 1", VALID_TO: "_pgwal_valid_from"}
    ended |= {OPEN: "false", "_pgwal_end_op": "'U'"}
    copies = opened.selectExpr("*", f"explode(sequence(1, {versions})) AS number")
    copies = copies.selectExpr(*(f"{ended.get(name, f'`{name}`')} AS `{name}`" for name in rows.columns))
    ordered = copies.repartitionByRange(max(1, versions // 2), VALID_TO_LSN).sortWithinPartitions(VALID_TO_LSN)
    ordered.write.format("delta").mode("append").save(path)


def _publish(settings: Settings, spark: "SparkSession") -> float:
    begin = time.perf_counter()
    publish(settings, lambda: spark, progress=Silent())
    return time.perf_counter() - begin

"""`python -m pgwal_pipeline.spark.warm_up FOLDER`: merge a tiny Delta table some times on the Connect server in `SPARK_REMOTE`.

Java compiles what has run often, so a JVM that has merged before merges many times faster. `rehearse` is also what records Spark's classes.
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROUNDS = 12
_NEWEST = "SELECT id, v, gone FROM (SELECT *, row_number() OVER (PARTITION BY id ORDER BY place DESC) AS nth FROM changes) WHERE nth = 1"


def rehearse(spark: "SparkSession", folder: str, rounds: int = 1) -> None:
    """Do in `folder` what a publish does, on a few rows: write, read and merge Delta tables."""
    path = f"{folder}/current"
    rows = spark.range(100).selectExpr("id", "cast(id AS string) AS v", "id % 7 = 3 AS gone", "id AS place", "timestamp_micros(id) AS at")
    rows.selectExpr("id", "v", "gone").write.format("delta").save(path)
    rows.selectExpr("id + 50 AS id", "v", "gone", "place", "at").where("id >= 50").write.format("delta").save(f"{folder}/raw")
    for _ in range(rounds):
        spark.read.format("delta").load(f"{folder}/raw").createOrReplaceTempView("changes")
        spark.sql(_NEWEST).createOrReplaceTempView("newest")
        spark.sql(
            f"MERGE INTO delta.`{path}` t USING newest s ON t.id <=> s.id WHEN MATCHED AND s.gone THEN DELETE "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED AND NOT s.gone THEN INSERT *"
        ).collect()
    rows.write.parquet(f"{folder}/chunk")
    spark.read.parquet(f"{folder}/chunk").join(spark.read.format("delta").load(path), "id").count()


def main() -> None:
    """Warm up the server."""
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession(connection=os.environ["SPARK_REMOTE"])
    try:
        rehearse(spark, sys.argv[1], _ROUNDS)  # pyright: ignore[reportArgumentType] (the same interface, by design of Spark)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()

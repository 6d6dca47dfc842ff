"""`python -m pgwal_pipeline.spark.record_classes`: record Spark's classes, so that Spark starts faster in this installation.

A Spark session does a little of what a publish does, and Java records the classes that it loads.
"""

import os
import sys
import tempfile

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark import class_archive
from pgwal_pipeline.spark.internals import jvm_of_this_process
from pgwal_pipeline.spark.java import find_java
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.spark.warm_up import rehearse


def _publish_a_little(folder: str) -> None:
    """Write, read and merge Delta tables; return when the JVM has ended."""
    settings = Settings(lake=folder, spark_master="local[2]", spark_conf={"spark.driver.memory": "1g"}, spark_idle=0)
    spark = spark_session(settings, app_name="pgwal-record-classes")
    end_jvm = jvm_of_this_process()
    rehearse(spark, folder)
    spark.stop()
    end_jvm()


def main() -> None:
    """Record the classes. If that fails, print why; Spark then starts slower."""
    java = find_java()
    if class_archive.options(java):
        return
    print("Recording the classes that Spark loads, so that it starts faster; this happens once.", file=sys.stderr, flush=True)  # noqa: T201
    try:
        with class_archive.recorded(java) as options, tempfile.TemporaryDirectory() as folder:
            os.environ["SPARK_SUBMIT_OPTS"] = " ".join([os.environ.get("SPARK_SUBMIT_OPTS", ""), *options]).strip()
            _publish_a_little(folder)
    except PgwalError as error:
        print(f"{error} Spark works without, but starts slower.", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()

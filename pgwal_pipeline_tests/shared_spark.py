"""One Spark for all processes of a run (`pytest -n`): the first that needs it starts it, and it ends with the run.

Each process has a session of its own there, as one that starts Spark by itself has. `python -m pgwal_pipeline_tests.shared_spark`, which is
given a place for what it says and the run's process, is where it lives.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pgwal_pipeline.host.spawn import free_port
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline_tests.support import wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTS: Mapping[str, str] = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.files.minPartitionNum": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
}
# It works for many minutes: Java's second compiler pays for itself after two of them (a quarter less of the machine then, measured). Here
# it goes without what pays in long loops alone, for its work is plans and few rows: two fifths less of what it takes.
_COMPILED = (
    "-XX:TieredStopAtLevel=4 -XX:ReservedCodeCacheSize=400m -XX:FreqInlineSize=150 -XX:InlineSmallCode=1200 -XX:MaxInlineLevel=9 "
    "-XX:-DoEscapeAnalysis -XX:-UseSuperWord -XX:LoopMaxUnroll=0 -XX:-UseLoopPredicate -XX:-PartialPeelLoop"
)
# All of its memory from the start, half of it for what is new, spares it most collections.
_LASTING_JAVA = f"{_COMPILED} -Xms6g -Xmn3g"


def spark_settings(lake: str, memory: str = "2g", port: int | None = None) -> Settings:
    """Settings under which the tests' Spark is started: two cores of this machine, little memory; it serves Connect as well.

    Rows are in one part, and plans have short texts: most of the work on a few rows is done once for each part, on each text (a sixth of
    all is saved so, measured). The fixture `several_parts` is for tests of how rows come together. A page is what every sort and every
    aggregation takes first, 64 MB by Spark's own choice; and what ran is kept for a UI that nobody looks at.
    """
    conf = {
        "spark.driver.memory": memory,
        **PARTS,
        "spark.sql.ui.explainMode": "simple",
        "spark.sql.debug.maxToStringFields": "25",
        "spark.buffer.pageSize": "1m",
        "spark.ui.retainedJobs": "50",
        "spark.ui.retainedStages": "50",
        "spark.sql.ui.retainedExecutions": "50",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port or free_port()),
    }
    return Settings(lake=lake, spark_master="local[2]", spark_conf=conf, spark_idle=0)


def started(folder: Path, run: int) -> Mapping[str, Any]:
    """What the Spark says that all processes of the process `run` share, started if need be; it says it in their common `folder`."""
    said = folder / "spark.json"
    with (folder / "spark.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            with (folder / "spark.log").open("wb") as log:
                command = [sys.executable, "-m", __name__, str(folder), str(run)]
                environment = {**os.environ, "SPARK_SUBMIT_OPTS": f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} {_LASTING_JAVA}"}
                host = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            wait_for(lambda: said.exists() or host.poll() is not None, seconds=300, what="Spark to start")
            assert said.exists(), (folder / "spark.log").read_text()
    return json.loads(said.read_text())


def attached(place: Mapping[str, Any]) -> "SparkSession":
    """A session of this process in the Spark that said `place`."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    gateway = {"PYSPARK_GATEWAY_PORT": str(place["port"]), "PYSPARK_GATEWAY_SECRET": place["secret"]}
    os.environ.update(gateway)
    SparkContext._ensure_initialized()
    for name in gateway:
        del os.environ[name]
    jvm: Any = SparkContext._jvm
    interrupted = signal.getsignal(signal.SIGINT)
    context = jvm.JavaSparkContext.fromSparkContext(jvm.org.apache.spark.SparkContext.getOrCreate())
    session = jvm.org.apache.spark.sql.classic.SparkSession.getDefaultSession().get().newSession()
    session = SparkSession(SparkContext(conf=SparkConf(_jconf=context.sc().conf()), jsc=context), session)
    # Spark's own handler would cancel what the other processes have running there.
    signal.signal(signal.SIGINT, interrupted)
    return session


def _main(folder: Path, run: int) -> None:
    from pyspark import SparkContext

    settings = spark_settings(str(folder / "lake"), memory="6g")
    session = spark_session(settings, app_name="pgwal-tests")
    gateway: Any = SparkContext._gateway
    parameters = gateway.gateway_parameters
    draft = folder / "spark.json.new"
    draft.touch(0o600)
    connect = settings.spark_conf["spark.connect.grpc.binding.port"]
    draft.write_text(json.dumps({"port": parameters.port, "secret": parameters.auth_token, "connect": connect}))
    draft.replace(folder / "spark.json")
    while _runs(run):
        time.sleep(1)
    session.stop()


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))

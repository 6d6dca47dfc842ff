"""Make the Spark session that reads and merges the lake: in the warm engine of this machine, on a Spark Connect server, or a classic one.

A process has one session, which all tables of a run share.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgwal_pipeline.host.cache import user_cache
from pgwal_pipeline.host.limits import machine_memory
from pgwal_pipeline.messages.errors import LakeError, PgwalError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark import class_archive, engine
from pgwal_pipeline.spark.engine_folder import EngineFolder
from pgwal_pipeline.spark.internals import retry_briefly
from pgwal_pipeline.spark.jars import cached, delta_packages, ensure, s3_packages
from pgwal_pipeline.spark.java import ensure_java, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_REMOTE_SECONDS = 15.0

DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

# Settings of a session, not of the cluster: a Connect server takes these from its client.
_SESSION_CONF: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    # Spark's default is INT96, which other readers get wrong outside 1677 to 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Do not shift dates and times before 1900: the calendar is the proleptic Gregorian one, as in Postgres and delta-rs.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    # A window's key is text, even if it has the form of a number.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.adaptive.enabled": "true",
    "spark.databricks.delta.properties.defaults.enableDeletionVectors": "true",
}
ENGINE_CONF: Mapping[str, str] = {
    "spark.app.name": "pgwal",
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "100",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.connect.session.planCache.maxSize": "0",
}
"""What an engine keeps of past queries, which nobody reads."""

_CHECKSUMS = "parquet.page.verify-checksum.enabled"  # makes a damaged page an error, instead of wrong values


def spark_session(settings: Settings, *, app_name: str = "pgwal", say: Callable[[str], None] = lambda _: None) -> "SparkSession":
    """Return the session for `settings`: the one that the process has, or a new one.

    `say` gets a line before something slow (the one-time download of the jars). Raises LakeError if Spark does not start or the Connect
    server cannot be reached, PgwalError if there is no Java or the jars cannot be downloaded.
    """
    if settings.spark_remote is not None:
        # Checked first, because the client retries for many minutes before it fails.
        return _remote_session(
            settings, settings.spark_remote, "Spark Connect server {}:{} of PGWAL_SPARK_REMOTE".format(*reach(settings.spark_remote))
        )
    if uses_engine(settings):
        return _engine_session(settings, say)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    os.environ.update(launch_environment(settings))
    builder = SparkSession.builder.master(settings.spark_master).appName(app_name)
    for name, value in spark_conf(settings, jars=ensure_jars(settings, say)).items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise LakeError(
            f"Spark did not start on {settings.spark_master} ({str(error).splitlines()[0]}); check its output above, "
            f"PGWAL_SPARK_MASTER and PGWAL_SPARK_CONF. It uses the Java in {os.environ['JAVA_HOME']}."
        ) from error


def uses_engine(settings: Settings) -> bool:
    """Return whether the sessions for `settings` are in the warm engine."""
    return settings.spark_remote is None and settings.spark_idle > 0 and engine.is_for(settings.spark_master)


def engine_settings(settings: Settings, say: Callable[[str], None] = lambda _: None) -> engine.EngineSettings:
    """Return what the warm engine for `settings` is started with. The jars are downloaded at the first use."""
    conf = {**spark_conf(settings, jars=ensure_jars(settings, say)), **ENGINE_CONF, **settings.spark_conf}
    return engine.EngineSettings(settings.lake, settings.spark_master, conf, launch_environment(settings), settings.spark_idle)


def find_engine(settings: Settings) -> EngineFolder | None:
    """Return the folder of the warm engine for `settings`; None if their sessions are not in one, or the jars were never downloaded."""
    if not uses_engine(settings) or not jars_downloaded(settings):
        return None
    return engine_settings(settings).folder


def engine_status(settings: Settings) -> dict[str, Any]:
    """Return what `pgwal engine status --json` prints; see `engine.status`. Without a Java nothing runs."""
    try:
        return engine.status(find_engine(settings))
    except PgwalError:
        return engine.status(None)


def start_engine(settings: Settings, say: Callable[[str], None] = lambda _: None) -> None:
    """Start the warm engine for `settings` without waiting for it, if it is used and not alive. It gets ready beside other work."""
    if uses_engine(settings):
        engine.start(engine_settings(settings, say))


def spark_conf(
    settings: Settings,
    *,
    jars: Sequence[Path] = (),
    environment: Mapping[str, str] = os.environ,
    cores: int | None = None,
    memory: int | None = None,
) -> dict[str, str]:
    """Return the Spark settings of a classic session; `PGWAL_SPARK_CONF` overrides all others.

    `jars` are Delta's and S3's. `environment` is read for `AWS_*`. `cores` and `memory` (bytes) default to this machine's, and count only
    if Spark runs on this machine.
    """
    conf = dict(_SESSION_CONF)
    conf["spark.sql.extensions"] = DELTA_EXTENSION
    conf["spark.sql.catalog.spark_catalog"] = DELTA_CATALOG
    # Tables that are merged side by side share the cores evenly, instead of waiting for each other.
    conf["spark.scheduler.mode"] = "FAIR"
    conf["spark.ui.showConsoleProgress"] = "false"
    conf["spark.sql.debug.maxToStringFields"] = "1000"
    conf[f"spark.hadoop.{_CHECKSUMS}"] = "true"
    if jars:
        conf["spark.jars"] = ",".join(jar.as_uri() for jar in jars)
    if on_this_machine(settings.spark_master):
        conf |= _local_conf(settings.spark_master, cores or os.cpu_count() or 1, memory or machine_memory())
    if settings.lake.startswith("s3://"):
        conf |= s3_conf(environment)
    return conf | settings.spark_conf


def s3_conf(environment: Mapping[str, str]) -> dict[str, str]:
    """Return S3A's settings from the `AWS_*` variables that delta-rs reads too. Access keys are not in them: Spark reads the variables."""
    conf = {"spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if region:
        conf["spark.hadoop.fs.s3a.endpoint.region"] = region
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or environment.get("AWS_ENDPOINT")
    if endpoint:
        conf["spark.hadoop.fs.s3a.endpoint"] = endpoint
        conf["spark.hadoop.fs.s3a.path.style.access"] = "true"
        conf["spark.hadoop.fs.s3a.connection.ssl.enabled"] = "false" if endpoint.startswith("http://") else "true"
        conf.setdefault("spark.hadoop.fs.s3a.endpoint.region", "us-east-1")
    return conf


def launch_environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables with which Spark's JVM starts for `settings`."""
    variables = ensure_java()
    options = variables.get("SPARK_SUBMIT_OPTS", os.environ.get("SPARK_SUBMIT_OPTS", ""))
    if "log4j2.configurationFile" not in options:
        options += f" -Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}"
    if "SharedArchiveFile" not in options:
        options = " ".join([options, *class_archive.options(find_java())])
    variables["SPARK_SUBMIT_OPTS"] = options.strip()
    if on_this_machine(settings.spark_master):
        variables["SPARK_LOCAL_IP"] = "127.0.0.1"
    else:
        del variables["PYSPARK_PYTHON"]  # this interpreter's path is not valid on another machine
    return variables


def ensure_jars(settings: Settings, say: Callable[[str], None]) -> tuple[Path, ...]:
    """Return the jars that a session for `settings` needs; they are downloaded at the first use."""
    return tuple(jar for packages in _packages(settings) for jar in ensure(packages, say, settings.spark_conf))


def jars_downloaded(settings: Settings) -> bool:
    """Return whether a session for `settings` needs no download."""
    return all(cached(packages) is not None for packages in _packages(settings))


def _packages(settings: Settings) -> list[tuple[str, ...]]:
    """The Maven coordinates of the jars for `settings`, as they are downloaded together."""
    return [delta_packages(), s3_packages()] if settings.lake.startswith("s3://") else [delta_packages()]


def on_this_machine(master: str) -> bool:
    """Return whether `master` runs all of Spark on this machine: `local…` or `local-cluster[…]`."""
    return re.match(r"local(\[|-cluster\[|$)", master) is not None


def reach(address: str) -> tuple[str, int]:
    """Return host and port of the Connect server `address` (`sc://…`). Raises LakeError if it cannot be reached."""
    match = re.match(r"sc://(\[[^\]]+\]|[^:/;]+)(?::(\d+))?", address)
    host, port = (match[1].strip("[]"), int(match[2] or 15002)) if match else (address, 15002)
    try:
        socket.create_connection((host, port), timeout=_REMOTE_SECONDS).close()
    except OSError as error:
        raise LakeError(
            f"The Spark Connect server {host}:{port} of PGWAL_SPARK_REMOTE cannot be reached ({error}); start it, or correct the address."
        ) from None
    return host, port


def _local_conf(master: str, cores: int, memory: int) -> dict[str, str]:
    asked = re.search(r"\[(\d+)(?:,(\d+))?", master)
    if asked is not None:
        cores = int(asked[1]) * int(asked[2] or 1)
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{_heap_megabytes(memory)}m",
        "spark.ui.enabled": "false",
        # By default Spark creates this folder, empty, in the working directory.
        "spark.sql.warehouse.dir": (user_cache() / "spark-warehouse").as_uri(),
        # Spark's default (200) and Delta's (50) are for clusters: here each empty task costs milliseconds.
        "spark.sql.shuffle.partitions": str(min(max(2 * cores, 4), 64)),
        "spark.databricks.delta.snapshotPartitions": "2",
    }


def _heap_megabytes(memory: int) -> int:
    """Spark's heap on a machine with so many bytes: a quarter, from 1 to 8 GB, as Postgres, Dagster and Arrow need some too.

    Of less than 2 GB it is a half: of 1 GB with 1 GB of heap, the system would end Spark. Spark needs 512 MB.
    """
    return min(max(memory >> 22, min(1024, max(memory >> 21, 512))), 8192)


def _engine_session(settings: Settings, say: Callable[[str], None]) -> "SparkSession":
    wanted = engine_settings(settings, say)
    with _one_at_a_time:
        address = _addresses.get(wanted.folder)
        if address is None:
            address = _addresses[wanted.folder] = engine.attach(wanted, say)
    session = _remote_session(settings, address, "warm Spark engine (`pgwal engine status`)")
    retry_briefly(session)
    return session


_one_at_a_time = threading.Lock()
_sessions: "dict[str, ConnectSession]" = {}  # of this process, by address; pyspark would give the one it made last for any address
_making_sessions = threading.Lock()
_addresses: dict[EngineFolder, str] = {}  # of this process's sessions, with the token


def _remote_session(settings: Settings, address: str, name: str) -> "SparkSession":
    """A session on the Connect server `address`, with those of our settings that a client may set. Errors call the server `name`."""
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # pyspark.sql.functions read this to know for which kind of session they make columns.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    try:
        with _making_sessions:
            session = _sessions.get(address)
            if session is None or session.is_stopped:
                session = _sessions[address] = ConnectSession.builder.remote(address).create()
        if DELTA_EXTENSION not in (session.conf.get("spark.sql.extensions", "") or ""):
            raise LakeError(
                f"The {name} has no Delta Lake; start it with spark.sql.extensions={DELTA_EXTENSION} and "
                f"spark.sql.catalog.spark_catalog={DELTA_CATALOG}."
            )
        for option, value in {**_SESSION_CONF, **settings.spark_conf}.items():
            if session.conf.isModifiable(option) or option.startswith("spark.databricks."):
                session.conf.set(option, value)
        session.conf.set(_CHECKSUMS, "true")
    except PySparkException as error:
        raise LakeError(f"The {name} refused a session ({str(error).splitlines()[0]}).") from error
    return session  # pyright: ignore[reportReturnType] (the same interface, by design of Spark)

"""The private parts of PySpark that the pipeline uses. Seen in 4.2.0; `test_internals` fails if one is gone."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# A Connect client warns of an option that is set to its default, and of queries that it forgets while their session ends.
warnings.filterwarnings("ignore", "The SQL config 'spark.sql.parser.escapedStringLiterals'", UserWarning)
logging.getLogger("pyspark.sql.connect.logging").setLevel(logging.ERROR)


@contextmanager
def cloned(spark: "SparkSession") -> "Iterator[SparkSession]":
    """Open a session in the same Spark for the block, with the settings that `spark` has now and with views of its own.

    A new session would lack the settings made in `spark` since Spark started.
    """
    clone = getattr(spark, "cloneSession", None)
    if clone is None:
        java: Any = spark._jsparkSession  # noqa: SLF001
        yield type(spark)(spark.sparkContext, java.cloneSession())
        return
    session = clone()  # Spark Connect
    session.client.set_retry_policies(spark.client.get_retry_policies())
    try:
        with active(session):
            yield session
    finally:
        with suppress(PySparkException):
            session.client.release_session()
        session.client.close()


@contextmanager
def active(session: "SparkSession") -> "Iterator[SparkSession]":
    """Make `session` the thread's active one for the block: a Connect client binds what it keeps on the server, as checkpoints, to it."""
    if not hasattr(session, "cloneSession"):  # a classic session
        yield session
        return
    connect: Any = type(session)
    thread = connect._active_session  # noqa: SLF001 (no public API sets it)
    before = getattr(thread, "session", None)
    thread.session = session
    try:
        yield session
    finally:
        thread.session = before


def set_conf(session: "SparkSession", conf: Mapping[str, str]) -> None:
    """Set options of a session; on a Connect server in one request instead of one for each."""
    at_once = getattr(session.conf, "_set_all", None)
    if at_once is not None:
        at_once(dict(conf), silent=False)
        return
    for name, value in conf.items():
        session.conf.set(name, value)


def to_arrow(rows: "DataFrame") -> "pa.Table":
    """Return the rows as a Connect server sends them; `toArrow` there asks for the schema first, which analyzes the plan once more."""
    received = getattr(rows, "_to_table", None)
    return rows.toArrow() if received is None else received()[0]


def retry_briefly(session: "SparkSession") -> None:
    """Let a Connect session on this machine, whose JVM may have died, fail after two seconds. By default it tries for ten minutes."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    session.client.set_retry_policies([DefaultPolicy(max_retries=5, max_backoff=800)])  # pyright: ignore[reportAttributeAccessIssue]


def jvm_of_this_process() -> Callable[[], None]:
    """Return a function that ends the JVM that PySpark has started, and waits until it has ended; call it after the session is stopped."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001

    def end() -> None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()

    return end


def java_trace(error: Exception) -> str:
    """Return Java's stack trace of `error` with its causes, for errors whose text does not include it; empty if there is none."""
    of_server = getattr(error, "getStackTrace", None)  # Spark Connect
    return str((of_server() if callable(of_server) else getattr(error, "_stackTrace", None)) or "")

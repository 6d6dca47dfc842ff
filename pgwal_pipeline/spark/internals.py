"""What the pipeline needs of Spark that PySpark keeps to itself. Seen in 4.2.0; `test_spark_internals` fails where one is gone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def cloned(spark: "SparkSession") -> "Iterator[SparkSession]":
    """Open a session with the settings that `spark` has now and views of its own, in the same Spark, for the block.

    A new session would lack what was set in `spark` since Spark started.
    """
    clone = getattr(spark, "cloneSession", None)
    if clone is None:
        java: Any = spark._jsparkSession  # noqa: SLF001
        yield type(spark)(spark.sparkContext, java.cloneSession())
        return
    session = clone()  # of Spark Connect
    # The client binds what the server keeps, such as checkpoints, to the thread's active session; nothing public sets it.
    thread = type(session)._active_session  # noqa: SLF001
    before = getattr(thread, "session", None)
    thread.session = session
    try:
        yield session
    finally:
        thread.session = before
        with suppress(PySparkException):
            session.client.release_session()
        session.client.close()


def jvm_of_this_process() -> Callable[[], None]:
    """Hold on to the JVM that PySpark has started; what is given ends it and waits until it is gone, after the session was stopped."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001

    def end() -> None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()

    return end


def java_trace(error: Exception) -> str:
    """Java's stack trace with its causes, where it is no part of the error's text; empty where there is none."""
    of_server = getattr(error, "getStackTrace", None)  # Spark Connect
    return str((of_server() if callable(of_server) else getattr(error, "_stackTrace", None)) or "")

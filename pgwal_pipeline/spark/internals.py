"""The private parts of PySpark that the pipeline uses. Seen in 4.2.0; `test_internals` fails if one is gone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    # The client binds server-side objects, such as checkpoints, to the thread's active session; no public API sets it.
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

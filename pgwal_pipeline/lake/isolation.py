"""Open Spark sessions that are isolated from others in the same process, and turn their failures into the pipeline's errors."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from pgwal_pipeline.lake import bag, fold
from pgwal_pipeline.lake.columns import source_text
from pgwal_pipeline.lake.delta import passing
from pgwal_pipeline.lake.fold import Shape, Unresolved
from pgwal_pipeline.messages.errors import LakeError, TableError
from pgwal_pipeline.spark.internals import cloned, java_trace, set_conf

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_UNREADABLE = re.compile(
    r"FAILED_READ_FILE|PATH_NOT_FOUND|DELTA_TRUNCATED_TRANSACTION_LOG|DELTA_VERSIONS_NOT_CONTIGUOUS|DELTA_FILE_NOT_FOUND"
)
_CLASS_NAMES = re.compile(r"^(?::?\s*\(?[a-z]\w*(?:\.[\w$]+)+\)?:?\s+)+")
_FEW_ROWS = 200_000
"""Up to about this many rows, compiling a query takes longer than running it."""
_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.databricks.delta.merge.deletionVectors.persistent": "false",
}
_LITERALLY = {
    # Our names and literals (`columns.literal`) must mean the same whatever the given session's settings are.
    "spark.sql.variable.substitute": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
}
_SHOWN = 20
"""How many of the rows that lack a value the error names."""
_KEYS = 1000
"""How many keys of such rows are collected, so that they can be read again one by one."""


def few(rows: int) -> bool:
    """Return whether work on about this many rows is so small that more than half of it is Spark's overhead (measured on small tables)."""
    return rows <= _FEW_ROWS


def conf_for(rows: int) -> dict[str, str]:
    """Return the settings of a session (`isolated`) that works on about this many rows."""
    return _INTERPRETED if few(rows) else {}


@contextmanager
def isolated(spark: "SparkSession", conf: Mapping[str, str]) -> "Iterator[SparkSession]":
    """Open a session with the settings of `spark` and `conf`, and views of its own. What is set in it does not affect other threads."""
    with cloned(spark) as session:
        set_conf(session, {**_LITERALLY, **conf})
        yield session


def set_write_options(session: "SparkSession", options: Mapping[str, str]) -> None:
    """Give Delta's write options to the MERGEs of `session`, which take them from nowhere else."""
    set_conf(session, {f"spark.databricks.delta.write.{name}": value for name, value in options.items()})


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Turn errors of Spark and Delta into LakeError; `what` is the table or path that is worked on."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        if "Concurrent" in type(error).__name__ or "DELTA_CONCURRENT" in str(error):
            lost = LakeError(f"{what}: another writer changed its current table at the same time; nothing was changed here, try again.")
            lost.transient = True
            raise lost from error
        said = _said(error)
        if _UNREADABLE.search(said):
            unread = LakeError(
                f"{what}: Spark cannot read a file of the lake ({said}). If it is damaged or gone, restore it from a copy of the lake, or "
                f"read the table again with `pgwal resnapshot`; if the store failed for now, run it again."
            )
            unread.transient = passing(_messages(error))
            raise unread from error
        failed = LakeError(f"{what}: Spark failed ({said}); its output above says more.")
        failed.transient = passing(_messages(error))
        raise failed from error


@contextmanager
def table_failures(shape: Shape, lacking: "Callable[[], DataFrame | None]") -> Iterator[None]:
    """Do as `failures` for work on one table, but turn the table's own faults into TableError.

    `lacking` returns the changes that lack a value, for the error to name.
    """
    with failures(str(shape.table)):
        try:
            yield
        except (PySparkException, Py4JError) as error:
            said = str(error)
            if fold.unsent_marker(shape.table) in said:
                raise Unresolved(shape.table, *_named(lacking(), shape.key)) from error
            if bag.missing_marker(shape.table) in said:
                raise TableError(
                    str(shape.table),
                    f"{shape.table}: the source deleted more copies of a row than its current table has; "
                    f"run `pgwal resnapshot '{shape.table}'` to read it again.",
                ) from error
            raise


def _named(
    lacking: "DataFrame | None", key: Sequence[str]
) -> tuple[list[tuple[dict[str, object], tuple[str, ...]]], list[tuple[str, ...]] | None]:
    """Some of the rows that lack values, each as its key and the columns' names; and the keys of all as texts for Postgres."""
    if lacking is None:
        return [], None
    texts = [text for name in key if (text := source_text(lacking.schema, name)) is not None]
    as_text = f"array({', '.join(texts)})" if len(texts) == len(key) else fold.NO_NAMES
    found, keys = [], []
    for row in lacking.selectExpr("*", f"{as_text} AS _pgwal_key").limit(_KEYS + 1).collect():
        values = row.asDict()
        text = values[fold.TEXT] or {}
        names = values[fold.LOST] or values[fold.KEPT]
        found.append(({name: text.get(name, values[name]) for name in key}, tuple(names)))
        keys.append(values["_pgwal_key"])
    known = len(keys) <= _KEYS and all(keys)
    return found[:_SHOWN], [tuple(one) for one in keys] if known else None


def _said(error: Exception) -> str:
    """The first line with a message, without the class names that Java puts before it; a line about an unreadable file goes first.

    A write that cannot read its input fails as a write, with the read's failure among its causes.
    """
    lines = [_CLASS_NAMES.sub("", line.removeprefix("Caused by: ")).strip() for line in f"{error}\n{java_trace(error)}".splitlines()]
    telling = [line for line in lines if line and not line.startswith("An error occurred while calling ")]
    said = next(filter(_UNREADABLE.search, telling), telling[0] if telling else type(error).__name__)
    return said[:300].rstrip(".")


def _messages(error: Exception) -> str:
    """The messages of an error and its causes, without the lines of a stack trace."""
    lines = f"{error}\n{java_trace(error)}".splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("at "))

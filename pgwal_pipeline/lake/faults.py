"""Decide whose fault an error is: the table's that the work was for, or the run's, if it would hit every table.

A table's fault costs that table alone: it goes to state `error`, and the others go on. An error that would hit any table ends the run and
changes no table's state. The error's type decides where it can. Otherwise a probe decides: can the lake be written, does Spark answer?
"""

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.fs as pafs

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.layout import Lake, filesystem, remove_file, require_writable
from pgwal_pipeline.messages.errors import LakeError, PgwalError, TableError
from pgwal_pipeline.messages.printable import printable

STAGES = {
    "describe": "its definition could not be read",
    "decode": "its changes could not be decoded",
    "write": "its changes could not be written",
    "commit": "its changes could not be committed to raw",
    "access": "it may not be read",
    "read": "it could not be read from the source",
    "look": "its current table could not be examined",
    "merge": "its changes could not be merged",
    "replace": "its current table could not be made from the rows read",
    "history": "its history could not be kept",
    "compare": "it could not be compared with the source",
    "maintain": "its files could not be compacted, vacuumed or pruned",
}
"""The stages of work for a single table, each with the message for its failure."""

_RUN = re.compile(
    r"No space left on device|[Qq]uota exceeded|File too large|OutOfMemoryError|Java heap space|GC overhead limit|Too many open files"
    r"|Cannot allocate memory"
)


def is_tables_own(error: BaseException, lake: Lake, answers: Callable[[], object] | None = None) -> bool:
    """Return whether an error in work for one table is that table's own fault.

    If its type does not tell, the lake is probed and `answers` is called, which raises if Spark is gone.

    Not the table's fault are: memory, a full disk, a `transient` error, the pipeline's errors about source, slot or settings, and any error
    while the lake cannot be reached or written.
    """
    if isinstance(error, TableError):
        return True
    if not isinstance(error, Exception) or isinstance(error, MemoryError | pa.ArrowMemoryError):
        return False
    if isinstance(error, PgwalError) and (error.transient or not isinstance(error, LakeError)):
        return False
    if any(_RUN.search(str(cause)) for cause in _causes(error)):
        return False
    try:
        _probe(lake)
        if answers is not None:
            answers()
    except Exception:  # noqa: BLE001 - it does not matter what the probe raises: the run meets the same error itself
        return False
    return True


def table_error(error: BaseException, table: object, stage: str, oid: int = 0) -> TableError:
    """Return a TableError that says in one sentence what happened to a table at `stage`.

    An error that is a TableError already is returned itself, with `stage` and `oid` filled in where it has none.
    """
    if isinstance(error, TableError):
        error.stage, error.oid = error.stage or stage, error.oid or oid
        return error
    said = str(error) if isinstance(error, PgwalError) else f"Table {table}: {STAGES[stage]} ({_said(error)})."
    return TableError(str(table), said, oid, stage)


@contextmanager
def table_work(lake: Lake, table: object, stage: str, *, oid: int = 0, answers: Callable[[], object] | None = None) -> Iterator[None]:
    """Run the block as work for one table: its error becomes TableError if it is the table's own fault, and passes through otherwise.

    Hits the failpoint `table.STAGE/TABLE` first.
    """
    try:
        failpoints.at(stage, table)
        yield
    except Exception as error:
        if not is_tables_own(error, lake, answers):
            raise
        found = table_error(error, table, stage, oid)
        raise found from (None if found is error else error)


def _said(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
    name = type(error).__name__
    return printable(f"{name}: {first}" if first else name)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _probe(lake: Lake) -> None:
    """Raise if the lake as a whole cannot be read or written: write and remove a small file beside the tables of each layer."""
    require_writable(lake)
    store = filesystem(lake.uri)
    for folder in ("_pgwal", "raw", "snapshot", "current", "history"):
        if store.get_file_info(folder).type != pafs.FileType.NotFound:
            path = f"{folder}/_probe_{uuid.uuid4().hex}"
            with store.open_output_stream(path) as file:
                file.write(b"\0")
            remove_file(lake.uri, path)

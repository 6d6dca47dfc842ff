"""Whose fault an error is: the one table's that the work was for, or the run's, which would meet every table.

A table's fault costs that table alone: it goes to state `error`, and the others go on. What would hit any table ends the run and changes no
table's state. The error's type decides where it can; otherwise a look does: is the lake still there, does Spark still answer?
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
    "look": "its current table could not be looked at",
    "merge": "its changes could not be merged",
    "replace": "its current table could not be made from the rows read",
    "compare": "it could not be compared with the source",
    "maintain": "its files could not be tidied up",
}
"""The work that is done for one table alone, each with what is said where it fails."""

_RUN = re.compile(
    r"No space left on device|[Qq]uota exceeded|File too large|OutOfMemoryError|Java heap space|GC overhead limit|Too many open files"
    r"|Cannot allocate memory"
)


def is_tables_own(error: BaseException, lake: Lake, answers: Callable[[], object] | None = None) -> bool:
    """Whether what work for one table raised is that table's own fault.

    Where the type does not tell, it looks at the lake and calls `answers`, which raises if Spark is gone.

    Not a table's: memory, a full disk, an error that passes (`transient`), one of the pipeline's that is about source, slot or settings,
    and anything while the lake cannot be reached or written.
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
    except Exception:  # noqa: BLE001 - what the look raises does not matter: the run's own work will meet it
        return False
    return True


def table_error(error: BaseException, table: object, stage: str, oid: int = 0) -> TableError:
    """The TableError that says what happened to a table at `stage`, in one sentence; one that is a TableError already, as it is."""
    if isinstance(error, TableError):
        error.stage, error.oid = error.stage or stage, error.oid or oid
        return error
    said = str(error) if isinstance(error, PgwalError) else f"Table {table}: {STAGES[stage]} ({_said(error)})."
    return TableError(str(table), said, oid, stage)


@contextmanager
def table_work(lake: Lake, table: object, stage: str, *, oid: int = 0, answers: Callable[[], object] | None = None) -> Iterator[None]:
    """Do work for one table alone: what it raises becomes TableError where it is the table's own fault, and passes through where it is not.

    Passes the failpoint `table.STAGE`.
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
    """Raise where the lake as a whole cannot be read or written: a small file is written beside the tables of each layer."""
    require_writable(lake)
    store = filesystem(lake.uri)
    for folder in ("_pgwal", "raw", "snapshot", "current"):
        if store.get_file_info(folder).type != pafs.FileType.NotFound:
            path = f"{folder}/_probe_{uuid.uuid4().hex}"
            with store.open_output_stream(path) as file:
                file.write(b"\0")
            remove_file(lake.uri, path)

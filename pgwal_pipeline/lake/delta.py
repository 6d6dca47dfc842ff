"""Open, create, widen and commit to Delta tables without Spark, and turn the errors of Delta and the storage into LakeError."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Field, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from pgwal_pipeline.lake.layout import Lake, filesystem, storage_options
from pgwal_pipeline.lake.parquet import flush, make_folder
from pgwal_pipeline.messages.errors import LakeError

Item = TypeVar("Item")
Result = TypeVar("Result")

_STORE_SAYS = re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>")
# The messages of Arrow, delta-rs and the store when they gave up retrying something that may succeed later.
_PASSING = re.compile(
    r"error sending request|operation timed out|Connection (refused|reset)|connection closed|InternalError|SlowDown|ServiceUnavailable"
    r"|AWS Error (INTERNAL_FAILURE|SLOW_DOWN|SERVICE_UNAVAILABLE|NETWORK_CONNECTION|REQUEST_TIMEOUT|THROTTLING)|status code 50[0234]"
    r"|50[0234] (Internal|Bad Gateway|Service|Gateway)|Status Code: 50[0234]|SocketTimeout|Unable to execute HTTP request"
)
_UNANSWERED = re.compile(r"error sending request|operation timed out")
_FULL = re.compile(r"No space left on device|[Qq]uota exceeded|File too large")
_DAMAGED = re.compile(
    r"Json error|Parquet (magic|input|file)|[Cc]orrupt|No such file|Path does not exist|Object at location|thrift", re.IGNORECASE
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_COMMIT_TRIES = 3  # for a commit that the store does not answer; delta-rs waits half a minute for an answer and does not retry

_TIDIED_EVERY = 20
_AFTER_COMMIT = PostCommitHookProperties(cleanup_expired_logs=False)
"""What follows most commits. Looking for expired ones lists the whole log, so every twentieth commit does."""

ATTEMPTS = 60
"""How often a change is tried when other writers are faster."""


class Clash(Exception):
    """A column of a Delta table whose type differs from that of the rows to be written; types have Delta's names."""

    def __init__(self, column: str, has: str, wanted: str) -> None:
        super().__init__(f"column {column} is {has}, not {wanted}")
        self.column = column
        self.has = has
        self.wanted = wanted


def open_table(lake: Lake, uri: str) -> DeltaTable | None:
    """Return the Delta table at `uri`, None if there is none. Creates nothing. Raises LakeError if it cannot be read."""
    with lake_errors(uri):
        if lake.is_local and not _has_log(uri):
            return None
        try:
            return DeltaTable(uri, storage_options=storage_options(lake.uri))
        except TableNotFoundError:
            return None


def _has_log(path: str) -> bool:
    try:
        Path(path, "_delta_log").stat()
    except FileNotFoundError:
        return False
    return True


def missing_fields(has: Schema, wanted: Schema) -> list[Field]:
    """Return the columns of `wanted` that `has` lacks. Raises Clash if both have a column and its types differ."""
    types = {field.name: field.type.to_json() for field in has.fields}
    for field in wanted.fields:
        if types.get(field.name, field.type.to_json()) != field.type.to_json():
            raise Clash(field.name, types[field.name].strip('"'), field.type.to_json().strip('"'))
    return [field for field in wanted.fields if field.name not in types]


def ensure_table(
    lake: Lake,
    uri: str,
    schema: Schema | pa.Schema,
    *,
    partition_by: Sequence[str] = (),
    configuration: Mapping[str, str | None] | None = None,
) -> DeltaTable:
    """Return the Delta table at `uri`, created if it is missing, with any columns of `schema` added that it lacks. Removes no column.

    Raises Clash if it has a column with another type, LakeError if the lake cannot be written.
    """
    wanted = schema if isinstance(schema, Schema) else Schema.from_arrow(schema)
    with lake_errors(uri):
        for _ in range(ATTEMPTS):
            table = open_table(lake, uri)
            try:
                if table is None:
                    make_folder(lake, lake.relative(uri) + "/_delta_log")
                    table = DeltaTable.create(
                        uri,
                        wanted,
                        partition_by=list(partition_by),
                        configuration=configuration,
                        storage_options=storage_options(lake.uri),
                        # A second creator must fail: if delta-rs retried its commit, it would replace the first one's schema.
                        commit_properties=CommitProperties(max_commit_retries=0),
                    )
                    flush_commits(lake, uri, -1, table.version())
                if added := missing_fields(table.schema(), wanted):
                    before = table.version()
                    table.alter.add_columns(added)
                    table.update_incremental()
                    flush_commits(lake, uri, before, table.version())
            except CommitFailedError:
                continue
            except DeltaError:
                if table is None and open_table(lake, uri) is not None:
                    continue
                raise
            return table
    raise crowded(uri)


def create_table(
    lake: Lake,
    uri: str,
    schema: Schema,
    actions: Sequence[AddAction],
    *,
    partition_by: Sequence[str] = (),
    configuration: Mapping[str, str | None] | None = None,
) -> None:
    """Create a Delta table that has the files of `actions` from its first version on. Raises CommitFailedError if there is one by now."""
    make_folder(lake, lake.relative(uri) + "/_delta_log")
    try:
        create_table_with_add_actions(
            uri,
            schema,
            list(actions),
            partition_by=list(partition_by),
            configuration=configuration,
            storage_options=storage_options(lake.uri),
            commit_properties=CommitProperties(max_commit_retries=0),
        )
    except DeltaError as error:
        standing = open_table(lake, uri)
        # The store may have done the commit without an answer.
        if standing is None or not _holds(standing, actions):
            if standing is not None and not isinstance(error, CommitFailedError):
                raise CommitFailedError(f"another writer was faster at {uri}") from error
            raise
    flush_commits(lake, uri, -1, 0)


def crowded(uri: str) -> LakeError:
    """Return the error for a change that lost against other writers every time."""
    return LakeError(
        f"The Delta table {uri} is being changed by others all the time; make sure that only one pipeline feeds the lake, then try again."
    )


def commit(
    lake: Lake,
    uri: str,
    table: DeltaTable,
    actions: Sequence[AddAction | RemoveAction],
    *,
    partition_by: Sequence[str] = (),
    marker: Transaction | None = None,
    replace: bool = False,
) -> None:
    """Commit `actions` to `table` at `uri` and make sure that the commit is on disk.

    `table` stays at an earlier version: bringing it up to date (`update_incremental`) takes as long as opening it. With `replace` all other
    files are removed, and any commit since `table` was opened gives CommitFailedError.

    Files that are only added do not conflict with the commits of others. With a marker, if two writers with the same `app_id` commit on top
    of one version, the slower one gets CommitFailedError and must check again; `table.transaction_version(app_id)` is then the marker's
    version.
    """
    before = table.version()
    for attempt in range(1, _COMMIT_TRIES + 1):
        try:
            table.create_write_transaction(
                list(actions),
                "overwrite" if replace else "append",
                table.schema(),
                partition_by=list(partition_by),
                commit_properties=CommitProperties(
                    app_transactions=None if marker is None else [marker], max_commit_retries=0 if replace else None
                ),
                post_commithook_properties=_AFTER_COMMIT if (before + 1) % _TIDIED_EVERY else None,
            )
        except (DeltaError, OSError) as error:
            lost = isinstance(error, CommitFailedError)
            if not lost and (attempt == _COMMIT_TRIES or not _UNANSWERED.search(str(error))):
                raise
            # The store may have done the commit without an answer; a retry then finds a commit there, perhaps this one.
            table.update_incremental()
            if _holds(table, actions):
                break
            if lost:
                raise
            if table.version() != before:
                raise CommitFailedError(f"another writer was faster at {uri}") from error
        else:
            break
    _flush_commits_after(lake, uri, before)


def _holds(table: DeltaTable, actions: Sequence[AddAction | RemoveAction]) -> bool:
    """Whether `actions` add at least one file and all files that they add are part of `table`."""
    added = {action.path for action in actions if isinstance(action, AddAction)}
    return bool(added) and added <= set(pa.table(table.get_add_actions(flatten=True))["path"].to_pylist())


def flush_commits(lake: Lake, uri: str, before: int, last: int) -> None:
    """Write the commits of the table at `uri` after version `before` up to `last` to disk (fsync)."""
    if lake.is_local:
        paths = [_commit_path(lake, uri, version) for version in range(before + 1, last + 1)]
        flush(lake, [path for path in paths if (Path(lake.uri) / path).exists()])


def _flush_commits_after(lake: Lake, uri: str, before: int) -> None:
    """Write all commits after version `before` to disk. They follow one another without a gap, since they are too new to be removed."""
    if lake.is_local:
        paths = (_commit_path(lake, uri, version) for version in count(before + 1))
        flush(lake, list(takewhile(lambda path: (Path(lake.uri) / path).exists(), paths)))


def has_checkpoint(lake: Lake, uri: str, version: int) -> bool:
    """Return whether a version of the table at `uri` has a checkpoint, of whatever form.

    One that is written again may differ in size, and then fails who is reading it.
    """
    log = filesystem(lake.uri).get_file_info(pafs.FileSelector(f"{lake.relative(uri)}/_delta_log", allow_not_found=True))
    return any(entry.base_name.startswith(f"{version:020}.checkpoint.") for entry in log)


def _commit_path(lake: Lake, uri: str, version: int) -> str:
    return f"{lake.relative(uri)}/_delta_log/{version:020}.json"


@contextmanager
def lake_errors(uri: str) -> Iterator[None]:
    """Turn errors of Delta, Arrow and the storage about `uri` into LakeError. CommitFailedError (another was faster) passes through."""
    try:
        yield
    except CommitFailedError:
        raise
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise _lake_error(uri, error) from error
    except Exception as error:
        if type(error) is Exception:  # delta-rs raises some errors with no other class
            raise _lake_error(uri, error) from error
        raise


def _lake_error(uri: str, error: Exception) -> LakeError:
    text = str(error)
    refused = _STORE_SAYS.search(text)
    if isinstance(error, OSError) and error.strerror:
        said = error.strerror
    elif refused is not None:
        said = f"{refused[1]}, {refused[2]}"
    else:
        # delta-rs lists causes one under the other, the innermost last, and details on further lines
        said = ([part for part in (cause.strip() for cause in text.split("\u21b3")) if part] or [type(error).__name__])[-1]
    shown = _COLOUR.sub("", said).strip().splitlines()[0].rstrip(".")[:300]
    transient = passing(text)
    if _FULL.search(text):
        advice = "Make room there and run it again."
    elif transient:
        advice = "The store failed for now: run it again."
    elif _DAMAGED.search(text):
        advice = "A file of it is damaged or gone: restore it from a copy of the lake, or begin anew in another PGWAL_LAKE."
    else:
        advice = "PGWAL_LAKE takes a folder or s3:// prefix of its own that can be read and written."
    found = LakeError(f"The lake cannot be used at {uri}: {shown}. {advice}")
    found.transient = transient
    return found


def passing(text: str) -> bool:
    """Return whether the message of a store or a library is of an error that may pass by itself."""
    return _PASSING.search(text) is not None


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item], workers: int = 8) -> list[Result]:
    """Call `function` for each item on a few threads and return the results in the items' order; most of the time is waiting for storage.

    If calls fail, the error of the first such item is raised, after all calls have ended.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), "pgwal-lake") as pool:
        futures = [pool.submit(function, item) for item in items]
    return [future.result() for future in futures]

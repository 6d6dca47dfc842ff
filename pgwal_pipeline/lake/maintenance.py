"""Prune raw, join small files and remove unused ones, to keep a lake small and quick.

This covers what delta-rs writes: raw, the snapshots and the ledger. Spark maintains `current`.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import DeltaTable, WriterProperties
from deltalake.exceptions import CommitFailedError

from pgwal_pipeline.lake.delta import ATTEMPTS, crowded, lake_errors, open_table
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake, filesystem, stored
from pgwal_pipeline.lake.ledger import LOGS, Ledger
from pgwal_pipeline.lake.records import TableState, Window
from pgwal_pipeline.lake.snapshots import generations, remove_generations, remove_unfinished
from pgwal_pipeline.messages.errors import TableError
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.own_columns import GENERATION, WINDOW
from pgwal_pipeline.values.relation import TableName

_FILE_BYTES = 128 << 20  # files that reach this are not joined with others
_READERS = timedelta(days=1)  # how long a reader may use a version that is not the newest
_WRITERS = timedelta(days=7)  # longer than any window takes from its first file to its record in the ledger


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was pruned: the windows' keys in the order of their LSNs, and how many files raw no longer names."""

    keys: tuple[str, ...]
    files: int


def raised(error: TableError) -> None:
    """Raise the error of a table that cannot be compacted, vacuumed or pruned (the default for `refused`)."""
    raise error


Refused = Callable[[TableError], None]
"""Takes the error of a table that cannot be compacted, vacuumed or pruned by its own fault; the others go on."""


def prune_raw(lake: Lake, ledger: Ledger, older_than: datetime, published_lsn: int, refused: Refused = raised) -> Pruned:
    """Remove from raw the windows that were completed before `older_than`, end by `published_lsn` and are needed by no table.

    `published_lsn` is where all `current` tables stand. A table needs its changes until it is published from the snapshot in force, and
    while a snapshot is read; so does one that is held back, until its schema is accepted. A table in error holds up no other: its windows
    go too, and it has a gap then. The ledger is written first: if the process dies after that, the next call does the rest. Raises
    LakeError.
    """
    waiting = {lake.raw(state.location) for state in ledger.tables().values() if _needs_raw(state)}
    keys = [
        window.key
        for window in ledger.windows()
        if _is_over(window, older_than, published_lsn) and waiting.isdisjoint(write.path for write in window.tables if write.rows)
    ]
    if keys:
        _give_up_those_in_error(ledger, set(keys))
        ledger.prune_windows(keys)
    spans = [window for window in ledger.windows() if window.state == "pruned"]
    files = _for_each(lake, locations(lake), lambda location: _drop_windows(lake, lake.raw(location), spans), refused) if spans else 0
    return Pruned(tuple(keys), files)


def _give_up_those_in_error(ledger: Ledger, keys: Collection[str]) -> None:
    """Record a gap for tables in error whose changes go with these windows: they have to be read again."""
    lost = {write.path for window in ledger.windows() if window.key in keys for write in window.tables if write.rows}
    ledger.amend_tables(
        lambda known: [
            state.with_gap(state.stage or "merge", f"{state.reason} Raw has been pruned since, so the table has to be read again.", 0)
            for state in known.values()
            if state.state == "error" and not state.left_out and ledger.lake.raw(state.location) in lost
        ]
    )


def _for_each(lake: Lake, locations: Iterable[TableName], work: Callable[[TableName], int], refused: Refused) -> int:
    """Do `work` for each location and return the sum of its results; the error of a table that fails by its own fault goes to `refused`."""
    total = 0
    for location in locations:
        try:
            with table_work(lake, location, "maintain"):
                total += work(location)
        except TableError as error:
            refused(error)
    return total


def _is_over(window: Window, older_than: datetime, published_lsn: int) -> bool:
    return (
        window.state == "complete"
        and window.start_lsn < window.end_lsn <= published_lsn
        and window.at is not None
        and window.at < older_than
    )


def _needs_raw(state: TableState) -> bool:
    if not state.followed or state.state == "error":
        return False
    return state.held is not None or state.state != "ready" or state.reading is not None or state.generation != state.published


def _drop_windows(lake: Lake, uri: str, spans: Iterable[Window]) -> int:
    """Remove the partitions of pruned windows from one raw table; return how many files it no longer names."""
    dropped = 0
    with lake_errors(uri):
        for span in spans:
            for _ in range(ATTEMPTS):
                table = open_table(lake, uri)
                if table is None:
                    return dropped
                first, last = window_key(span.start_lsn), window_key(span.end_lsn)
                files = table.file_uris(file_pruning_predicate=[(WINDOW, ">", first), (WINDOW, "<=", last)])
                if not files:
                    break
                try:
                    table.delete(f"{WINDOW} > '{first}' AND {WINDOW} <= '{last}'")
                except CommitFailedError:
                    continue
                dropped += len(files)
                break
            else:
                raise crowded(uri)
    return dropped


def forget(lake: Lake, ledger: Ledger, older_than: datetime, refused: Refused = raised) -> int:
    """Drop snapshot generations that no table uses any more, and old ledger records; return how many generations were dropped.

    The records are those of these generations and of publishes before `older_than`. The newest publish always stays. So does what was
    written in the last day, because no table names a snapshot yet that is just beginning. Raises LakeError.
    """
    before = min(older_than, datetime.now(UTC) - _READERS)
    ledger.forget(older_than, before)

    def one(location: TableName) -> int:
        # Snapshots first, then the ledger: a generation is in the ledger before its first row is in the snapshot.
        found = generations(lake, location)
        named = {name for state in ledger.tables().values() for name in (state.generation, state.reading, state.published)}
        gone = found - ledger.generations(location) - named
        remove_generations(lake, location, gone)
        return len(gone)

    return _for_each(lake, locations(lake), one, refused)


def compact(lake: Lake, locations: Iterable[TableName], refused: Refused = raised) -> int:
    """Join the small files of each partition of the raw and snapshot tables at `locations`; return by how many files there are fewer.

    A table with a conflicting commit by another process is left for the next call. Raises LakeError.
    """
    return _for_each(
        lake,
        locations,
        lambda location: _compact(lake, lake.raw(location), WINDOW) + _compact(lake, lake.snapshot(location), GENERATION),
        refused,
    )


def _compact(lake: Lake, uri: str, partition: str) -> int:
    with lake_errors(uri):
        table = open_table(lake, uri)
        crowded_ones = [] if table is None else _with_small_files(table, partition)
        if table is None or not crowded_ones:
            return 0
        try:
            done = table.optimize.compact(
                partition_filters=[(partition, "in", crowded_ones)],
                target_size=_FILE_BYTES,
                max_concurrent_tasks=1,
                writer_properties=WriterProperties(compression="ZSTD", compression_level=1),
            )
        except CommitFailedError:
            return 0
        return done["numFilesRemoved"] - done["numFilesAdded"]


def locations(lake: Lake) -> list[TableName]:
    """Return the locations of all tables in the lake, also of tables that another one of the same name has replaced. Raises LakeError."""
    with lake_errors(lake.uri):
        return sorted({*stored(lake, "raw"), *stored(lake, "snapshot")})


def _with_small_files(table: DeltaTable, partition: str) -> list[str]:
    """The partitions that have at least two small files."""
    files = pa.table(table.get_add_actions(flatten=True)).select([f"partition.{partition}", "size_bytes"])
    small = files.filter(pc.field("size_bytes") < _FILE_BYTES // 2)
    counts = small.group_by(f"partition.{partition}").aggregate([("size_bytes", "count")]).to_pylist()
    return sorted(row[f"partition.{partition}"] for row in counts if row["size_bytes_count"] > 1)


def vacuum(lake: Lake, ledger: Ledger, readers: timedelta = _READERS, writers: timedelta = _WRITERS, refused: Refused = raised) -> int:
    """Remove the files of raw, snapshots and ledger that no version needs; return how many.

    A file that was removed from a table is deleted after more than `readers`. A file that was never in one, left behind by a process that
    died, is deleted when it is older than `writers`, but not while a window is prepared or a plan is being read, since these may name it.
    So are files of a snapshot whose Delta table was never made. Raises LakeError.
    """
    oldest = datetime.now(UTC) - writers

    def one(uri: str) -> int:
        with lake_errors(uri):
            table = open_table(lake, uri)
            if table is None:
                return 0
            removed = len(_vacuum(table, readers, full=False))
            if not ledger.prepared() and ledger.plan() is None:
                removed += len(_vacuum(table, writers, full=True))
            return removed

    def both(location: TableName) -> int:
        return one(lake.raw(location)) + one(lake.snapshot(location)) + remove_unfinished(lake, location, oldest)

    data = _for_each(lake, locations(lake), both, refused)
    return data + sum(one(lake.ledger(name)) for name in LOGS)


def bytes_of_older_versions(lake: Lake, uri: str) -> int:
    """Return the bytes of the data files at `uri` that the newest version does not name. Raises LakeError."""
    with lake_errors(uri):
        table = open_table(lake, uri)
        if table is None:
            return 0
        named = {unquote(path).rsplit("/", 1)[-1] for path in pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()}
        found = filesystem(uri).get_file_info(pafs.FileSelector("", recursive=True))
        files = [entry for entry in found if entry.type == pafs.FileType.File and not entry.path.startswith("_delta_log/")]
        return sum(entry.size for entry in files if entry.base_name.endswith(".parquet") and entry.base_name not in named)


def _vacuum(table: DeltaTable, age: timedelta, *, full: bool) -> list[str]:
    hours = int(age.total_seconds() // 3600)
    return table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=full)

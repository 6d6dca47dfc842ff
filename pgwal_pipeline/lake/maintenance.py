"""Keeping a lake small and quick: pruning raw, joining small files, and removing those that nothing names any more.

Only of what delta-rs writes: raw, the snapshots and the ledger. `current` is Spark's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, WriterProperties
from deltalake.exceptions import CommitFailedError

from pgwal_pipeline.lake.delta import ATTEMPTS, crowded, lake_errors, open_table
from pgwal_pipeline.lake.layout import Lake, stored
from pgwal_pipeline.lake.ledger import LOGS, Ledger
from pgwal_pipeline.lake.raw import PARTITION
from pgwal_pipeline.lake.records import TableState, Window
from pgwal_pipeline.lake.snapshots import GENERATION, generations, remove_generations
from pgwal_pipeline.lsn import window_key
from pgwal_pipeline.relation import TableName

_FILE_BYTES = 128 << 20  # files that reach this are not joined with others
_READERS = timedelta(days=1)  # how long somebody may go on reading a version that is not the newest
_WRITERS = timedelta(days=7)  # longer than any window takes from its first file to its record in the ledger


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was pruned: the windows' keys in the order of their LSNs, and the files that raw no longer names."""

    keys: tuple[str, ...]
    files: int


def prune_raw(lake: Lake, ledger: Ledger, older_than: datetime, published_lsn: int) -> Pruned:
    """Take the windows out of raw that were completed before `older_than`, end by `published_lsn` and that no table needs.

    `published_lsn` is where all of `current` stands. A table needs its changes until it is published from the snapshot in force, while
    one is read, and while it is in error. The ledger's record comes first: what dies in between is done by the next call. Raises LakeError.
    """
    waiting = {lake.raw(state.place) for state in ledger.tables().values() if _needs_raw(state)}
    keys = [
        window.key
        for window in ledger.windows()
        if _is_over(window, older_than, published_lsn) and waiting.isdisjoint(write.path for write in window.tables if write.rows)
    ]
    if keys:
        ledger.prune_windows(keys)
    spans = [window for window in ledger.windows() if window.state == "pruned"]
    files = sum(_drop_windows(lake, lake.raw(place), spans) for place in places(lake)) if spans else 0
    return Pruned(tuple(keys), files)


def _is_over(window: Window, older_than: datetime, published_lsn: int) -> bool:
    return (
        window.state == "complete"
        and window.start_lsn < window.end_lsn <= published_lsn
        and window.at is not None
        and window.at < older_than
    )


def _needs_raw(state: TableState) -> bool:
    if not state.followed:
        return False
    return state.state != "ready" or state.reading is not None or state.generation != state.published


def _drop_windows(lake: Lake, uri: str, spans: Iterable[Window]) -> int:
    """Take the partitions of pruned windows out of one raw table; returns how many files it named fewer."""
    dropped = 0
    with lake_errors(uri):
        for span in spans:
            for _ in range(ATTEMPTS):
                table = open_table(lake, uri)
                if table is None:
                    return dropped
                first, last = window_key(span.start_lsn), window_key(span.end_lsn)
                files = table.file_uris(file_pruning_predicate=[(PARTITION, ">", first), (PARTITION, "<=", last)])
                if not files:
                    break
                try:
                    table.delete(f"{PARTITION} > '{first}' AND {PARTITION} <= '{last}'")
                except CommitFailedError:
                    continue
                dropped += len(files)
                break
            else:
                raise crowded(uri)
    return dropped


def forget(lake: Lake, ledger: Ledger, older_than: datetime) -> int:
    """Drop snapshot generations that no table goes by any more, and what the ledger has of them and of publishes from before `older_than`.

    The newest publish always stays, and so does what was written in the last day: no table names a snapshot yet that is just beginning.
    Returns how many generations went. Raises LakeError.
    """
    before = min(older_than, datetime.now(UTC) - _READERS)
    ledger.forget(older_than, before)
    dropped = 0
    # In this order: a reading is in the ledger before its first row is in the snapshot.
    present = {place: generations(lake, place) for place in places(lake)}
    states = ledger.tables().values()
    named = {name for state in states for name in (state.generation, state.reading, state.published)}
    for place, found in present.items():
        gone = found - ledger.generations(place) - named
        remove_generations(lake, place, gone)
        dropped += len(gone)
    return dropped


def compact(lake: Lake, places: Iterable[TableName]) -> int:
    """Join the small files of each partition of the raw and snapshot tables at `places`; returns how many files there are fewer.

    A partition that is being written to meanwhile is left for the next time. Raises LakeError.
    """
    fewer = 0
    for uri, partition in _partitioned(lake, places):
        with lake_errors(uri):
            table = open_table(lake, uri)
            crowded_ones = [] if table is None else _with_small_files(table, partition)
            if table is None or not crowded_ones:
                continue
            try:
                done = table.optimize.compact(
                    partition_filters=[(partition, "in", crowded_ones)],
                    target_size=_FILE_BYTES,
                    max_concurrent_tasks=1,
                    writer_properties=WriterProperties(compression="ZSTD", compression_level=1),
                )
            except CommitFailedError:
                continue
            fewer += done["numFilesRemoved"] - done["numFilesAdded"]
    return fewer


def _partitioned(lake: Lake, places: Iterable[TableName]) -> Iterator[tuple[str, str]]:
    for place in places:
        yield lake.raw(place), PARTITION
        yield lake.snapshot(place), GENERATION


def places(lake: Lake) -> list[TableName]:
    """Where tables stand, those included that another one of their name has followed. Raises LakeError."""
    with lake_errors(lake.uri):
        return sorted({*stored(lake, "raw"), *stored(lake, "snapshot")})


def _with_small_files(table: DeltaTable, partition: str) -> list[str]:
    """The partitions that have two files or more which could be one."""
    files = pa.table(table.get_add_actions(flatten=True)).select([f"partition.{partition}", "size_bytes"])
    small = files.filter(pc.field("size_bytes") < _FILE_BYTES // 2)
    counts = small.group_by(f"partition.{partition}").aggregate([("size_bytes", "count")]).to_pylist()
    return sorted(row[f"partition.{partition}"] for row in counts if row["size_bytes_count"] > 1)


def vacuum(lake: Lake, ledger: Ledger, readers: timedelta = _READERS, writers: timedelta = _WRITERS) -> int:
    """Remove the files of raw, snapshots and ledger that no version needs; returns how many.

    Those taken out of a table go once they have been out for longer than `readers`. Those that never were in one, left behind by a process
    that died, go when they are older than `writers`; while a window is prepared or read ahead none does, since it may name them.
    Raises LakeError.
    """
    logs = [lake.ledger(name) for name in LOGS]
    data = [uri for uri, _ in _partitioned(lake, places(lake))]
    removed = 0
    for uri in [*data, *logs]:
        with lake_errors(uri):
            table = open_table(lake, uri)
            if table is None:
                continue
            removed += len(_vacuum(table, readers, full=False))
            if not ledger.prepared() and ledger.plan() is None:
                removed += len(_vacuum(table, writers, full=True))
    return removed


def _vacuum(table: DeltaTable, age: timedelta, *, full: bool) -> list[str]:
    hours = int(age.total_seconds() // 3600)
    return table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=full)

"""Whether raw and a snapshot still have the rows that the ledger counts there: what is gone must not be taken for what never was.

A file that is gone fails whoever reads it. A commit of the Delta log that is gone with it, or the whole table, fails nobody.
"""

from collections.abc import Callable

import pyarrow as pa

from pgwal_pipeline.errors import LakeError
from pgwal_pipeline.lake.columns import WINDOW
from pgwal_pipeline.lake.snapshots import GENERATION
from pgwal_pipeline.lake.standing import open_current
from pgwal_pipeline.lsn import window_key
from pgwal_pipeline.relation import TableName


def require_changes(table: TableName, raw_path: str, from_lsn: int, to_lsn: int, counted: int) -> None:
    """Raises LakeError where raw has less than `counted` rows of the windows after `from_lsn` up to `to_lsn`."""
    if counted:
        _require(table, counted, {raw_path: _changes(raw_path, from_lsn, to_lsn)})


def require_snapshot(
    table: TableName, snapshot_path: str, generation: str, raw_path: str, from_lsn: int, to_lsn: int, counted: int
) -> None:
    """The same for a snapshot's generation and the changes beside it, which have `counted` rows together, or more: attempts that died."""
    if counted:
        _require(
            table,
            counted,
            {
                snapshot_path: _rows(snapshot_path, GENERATION, lambda name: name == generation),
                raw_path: _changes(raw_path, from_lsn, to_lsn),
            },
        )


def _require(table: TableName, counted: int, found: dict[str, int | None]) -> None:
    there = sum(rows or 0 for rows in found.values())
    if None not in found.values() and there < counted:
        raise LakeError(
            f"{table}: {' and '.join(found)} {'has' if len(found) == 1 else 'have'} {there} of the {counted} rows that the ledger counts "
            f"there, so that files of it are gone: restore them from a copy of the lake, or run `pgwal resnapshot '{table}'`."
        )


def _changes(path: str, from_lsn: int, to_lsn: int) -> int | None:
    first, last = window_key(from_lsn), window_key(to_lsn)
    return _rows(path, WINDOW, lambda key: first < key <= last)


def _rows(path: str, partition: str, wanted: Callable[[str], bool]) -> int | None:
    """The rows that the log of the table at `path` names in the wanted partitions, none where it is gone; None where it does not say."""
    table = open_current(path)
    if table is None:
        return 0
    files = pa.table(table.get_add_actions(flatten=True))
    if not files.num_rows:
        return 0
    keys, rows = files[f"partition.{partition}"].to_pylist(), files["num_records"].to_pylist()
    found = [count for key, count in zip(keys, rows, strict=True) if wanted(str(key))]
    return None if None in found else sum(found)

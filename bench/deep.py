"""How the cost of a merge grows with its table: changes among the newest rows, and changes all over it."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Measure, Result
from pgwal_pipeline.lake import files
from pgwal_pipeline.lake.current import ChunkSnapshot, MergeRequest, ReplaceRequest, Traits, merge, ranges_of, replace
from pgwal_pipeline.lake.standing import open_current
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TABLE = TableName("public", "t")
_PLAIN = Traits(truncated=False, key_changes=False, unchanged=False)
_VALUES = {
    "id": "id",
    "customer": "CAST(id % 100003 AS int)",
    "status": "element_at(array('new', 'paid', 'sent', 'done'), CAST(id % 4 AS int) + 1)",
    "amount": "CAST(id % 1000000 AS decimal(12,2))",
    "quantity": "CAST(id % 1000 AS int)",
    "note": "concat('note ', md5(CAST(id AS string)))",
    "score": "CAST(id * 0.37 AS double)",
    "active": "id % 3 = 0",
    "day": "date_add(DATE'2020-01-01', CAST(id % 2000 AS int))",
    "changed_at": "timestamp_seconds(1600000000 + id)",
}
_NO_TEXT = "CAST(NULL AS map<string,string>) AS _pgwal_text"
_WINDOW = 1000  # bytes of WAL, as far as a merge is concerned
_CHUNK_ROWS = 500_000
_NEWEST = 3  # changed keys are one in so many of the newest rows


def in_larger_tables(small: int, large: int, largest: int, changed: int, rounds: int) -> Result:
    """Measure merges of `changed` keys into tables of `small`, `large` and `largest` rows, in one warm session.

    The keys are among the newest `_NEWEST` times `changed` rows, in all of the tables, or all over the table, in `small` and `large`.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.from_environment({}, source_dsn="host=nowhere", lake=folder, spark_idle=0)
        spark = spark_session(settings)
        measures: dict[str, Measure] = {}
        facts: dict[str, Any] = {}
        tables = {rows: _Table(spark, Path(folder, str(rows)), rows) for rows in dict.fromkeys((small, large, largest))}
        for rows, table in tables.items():
            first = table.merged(table.newest(changed), changed)
            facts[f"files of {rows:,} rows, and read"] = f"{first.files} and {first.read} ({first.read / first.files:.1%})"
            measures[f"newest, {rows:,}"] = Measure(
                f"newest keys, {rows:,} rows", "s", tuple(table.merged(table.newest(changed), changed).seconds for _ in range(rounds))
            )
        for rows in (small, large):
            table = tables[rows]
            measures[f"spread, {rows:,}"] = Measure(
                f"spread keys, {rows:,} rows", "s", tuple(table.merged(table.spread(changed), changed).seconds for _ in range(rounds))
            )
        spark.stop()
    newest = measures[f"newest, {largest:,}"].median / measures[f"newest, {small:,}"].median
    spread = measures[f"spread, {large:,}"].median / measures[f"spread, {small:,}"].median
    facts[f"spread keys, {large:,} rows / {small:,}"] = f"{spread:.2f}"
    return Result(
        "deep",
        f"{changed:,} changed keys merged into tables of {small:,} to {largest:,} rows of 10 columns, in a warm session",
        tuple(measures.values()),
        newest,
        f"newest keys, {largest:,} rows / {small:,}",
        facts,
    )


class _Merged:
    """One merge: its seconds, how many files its table had, and how many of them it had to read."""

    def __init__(self, seconds: float, files: int, read: int) -> None:
        self.seconds, self.files, self.read = seconds, files, read


class _Table:
    """A table that the pipeline made from a snapshot. The snapshot and the changes are made by Spark, since only merges are measured."""

    def __init__(self, spark: "SparkSession", folder: Path, rows: int) -> None:
        self._spark, self._folder, self._rows, self._lsn = spark, folder, rows, _WINDOW
        made = spark.range(1, rows + 1, 1, max(1, rows // _CHUNK_ROWS)).selectExpr(
            *_values(), _NO_TEXT, "'c1' AS _pgwal_chunk", "'g1' AS _pgwal_generation"
        )
        _save(made, str(folder / "snapshot"), "_pgwal_generation")
        chunks = (ChunkSnapshot("c1", "100:100:"),)
        paths = (str(folder / "raw"), str(folder / "current"), str(folder / "snapshot"))
        replace(spark, ReplaceRequest(_TABLE, *paths, "g1", chunks, 1, ("id",), tuple(_VALUES), 0, _WINDOW, _PLAIN, rows=rows))

    def newest(self, count: int) -> "DataFrame":
        """Keys among the newest rows."""
        return self._spark.range(max(1, self._rows - _NEWEST * count + 1), self._rows + 1, min(_NEWEST, max(1, self._rows // count)))

    def spread(self, count: int) -> "DataFrame":
        """Keys all over the table, others in each window."""
        step = max(1, self._rows // count)
        return self._spark.range(1 + self._lsn // _WINDOW % step, self._rows + 1, step)

    def merged(self, keys: "DataFrame", count: int) -> _Merged:
        """Merge an update of each of `keys`."""
        low, high = self._lsn, self._lsn + _WINDOW
        own = [
            "'U' AS _pgwal_op",
            f"{low + 1}L AS _pgwal_commit_lsn",
            "monotonically_increasing_id() AS _pgwal_ordinal",
            "200L AS _pgwal_xid",
            "CAST(NULL AS array<string>) AS _pgwal_unchanged",
            f"'{window_key(high)}' AS _pgwal_window",
        ]
        _save(keys.limit(count).coalesce(1).selectExpr(*_values(low), *own, _NO_TEXT), str(self._folder / "raw"), "_pgwal_window")
        paths = (str(self._folder / "raw"), str(self._folder / "current"))
        request = MergeRequest(_TABLE, *paths, ("id",), tuple(_VALUES), low, high, _PLAIN, rows=count)
        every, read = _files(request)
        begin = time.perf_counter()
        merge(self._spark, request)
        seconds = time.perf_counter() - begin
        self._lsn = high
        return _Merged(seconds, every, read)


def _files(request: MergeRequest) -> tuple[int, int]:
    """How many files the table has, and how many of them may have one of the changed keys."""
    table = open_current(request.current_path)
    changes = files.changes(request.raw_path, request.from_lsn, request.to_lsn)
    assert table is not None
    assert changes is not None
    found = ranges_of(request, table, changes)
    every = len(table.file_uris())
    return every, every if found is None else found.files


def _values(changed: int = 0) -> Sequence[str]:
    """The columns of a row by its `id`; `changed` makes another row of it."""
    return [f"{text} + {changed} AS {name}" if name == "quantity" else f"{text} AS {name}" for name, text in _VALUES.items()]


def _save(rows: "DataFrame", path: str, partition: str) -> None:
    options = {"compression": "zstd", "delta.enableDeletionVectors": "false"}
    rows.write.format("delta").mode("append").partitionBy(partition).options(**options).save(path)

"""Small tables written anew: the same rows as the MERGE, which tables are taken, and another writer's commit between."""

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake import current, files, rewrite
from pgwal_pipeline.lake.current import ChunkSnapshot, Traits, merge, replace, version, watermark
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline_tests.lake.publishing import merge_request, replace_request, rows_of, write_events, write_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(900)

COLUMNS = {"id": pa.int32(), "body": pa.string(), "score": pa.float64(), "raw": pa.binary(), "at": pa.timestamp("us", "UTC")}
SENT = Traits(truncated=False, key_changes=False, unchanged=False)
_OLDEST, _NEWEST = -62135596800 * 10**6, 253402300799 * 10**6  # the years 1 and 9999


def _row(rng: random.Random, key: int) -> tuple[Any, ...]:
    score = rng.choice([None, 0.0, -0.0, float("nan"), 1.5])
    return (
        key,
        rng.choice([None, "", "text", {"text": "\\xff"}]),
        score,
        rng.choice([None, b"", b"\0\xff"]),
        rng.choice([_OLDEST, _NEWEST]),
    )


@pytest.fixture(scope="module")
def _table(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("small"), random.Random(7)
    write_rows(folder / "snapshot", COLUMNS, [_row(rng, key) for key in range(30)])
    alive, events = set(range(30)), []
    for number in range(40):
        key = rng.randrange(50)
        op = "I" if key not in alive else rng.choice("UUD")
        (alive.discard if op == "D" else alive.add)(key)
        row = (key, None, None, None, None) if op == "D" else _row(rng, key)
        unsent = ["body", "raw"] if op == "U" and number % 3 == 0 else []
        sent = tuple(None if name in unsent else value for name, value in zip(COLUMNS, row, strict=True))
        events.append((op, 1500 + number, 0, sent, unsent))
    write_events(folder / "raw", COLUMNS, events)
    request = replace_request(folder, 1000, SENT, [ChunkSnapshot("c1", "100:100:")], key=["id"], columns=list(COLUMNS))
    replace(spark, request)
    return folder


@pytest.fixture
def table(_table: Path, tmp_path: Path) -> Path:
    return shutil.copytree(_table, tmp_path / "small")


def _small(folder: Path) -> rewrite.Small | None:
    found = files.changes(str(folder / "raw"), 1000, 2000)
    assert found is not None
    return rewrite.small(str(folder / "current"), DeltaTable(folder / "current"), found)


def _sorted(path: Path) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows_of(path))


def test_the_same_rows_as_the_merge(spark: "SparkSession", table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(table / "current", table / "merged")
    traits = Traits(truncated=False, key_changes=False)
    anew = merge(spark, merge_request(table, 1000, 2000, traits, key=["id"], columns=list(COLUMNS)))
    assert DeltaTable(table / "current").history(1)[0]["operation"] == "WRITE"
    monkeypatch.setattr(rewrite, "small", lambda *_: None)
    merged = merge(spark, merge_request(table, 1000, 2000, traits, key=["id"], columns=list(COLUMNS), current="merged"))
    assert DeltaTable(table / "merged").history(1)[0]["operation"] == "MERGE"
    assert anew == merged
    assert _sorted(table / "current") == _sorted(table / "merged")
    assert watermark(str(table / "current")) == 2000
    by_spark = spark.read.format("delta").load(str(table / "current"))
    assert by_spark.schema == spark.read.format("delta").load(str(table / "merged")).schema
    assert by_spark.count() == len(rows_of(table / "current"))


def test_another_writer_in_between_is_found(spark: "SparkSession", table: Path) -> None:
    """What was computed on an older version is not committed, and the next publish may try again."""
    found, path = _small(table), str(table / "current")
    assert found is not None
    there = {file.name for file in (table / "current").glob("*.parquet")}
    DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 999 hours"})
    rows = found.read(spark).selectExpr("*", "'written' AS _pgwal_fate")
    with pytest.raises(LakeError, match="another writer") as caught:
        rewrite.write(found, rows, 2000)
    assert caught.value.transient
    assert (version(path), watermark(path)) == (1, 1000)
    assert {file.name for file in (table / "current").glob("*.parquet")} == there


def test_rows_that_came_and_went_leave_the_files(spark: "SparkSession", table: Path) -> None:
    path = str(table / "current")
    before = DeltaTable(path).file_uris()
    small = _opened(path)
    assert rewrite.write(small, small.read(spark).selectExpr("*", "'kept' AS _pgwal_fate"), 2000) == 0
    assert DeltaTable(path).file_uris() == before
    assert (version(path), watermark(path)) == (1, 2000)


def test_only_small_tables_without_what_spark_alone_handles(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _small(table) is not None
    for limit in ("_ROWS", "_BYTES", "_FILES", "_PLAIN_BYTES"):
        with monkeypatch.context() as limited:
            limited.setattr(rewrite, limit, 0)
            assert _small(table) is None
    DeltaTable(table / "current").alter.set_table_properties({"delta.appendOnly": "false"})
    assert _small(table) is None


def test_deletion_vectors_in_use_are_left_to_spark(spark: "SparkSession", table: Path) -> None:
    spark.sql(f"DELETE FROM delta.`{table / 'current'}` WHERE id = 3").collect()
    assert current.row_count(str(table / "current")) == 29
    assert _small(table) is None


def test_spark_reads_the_log_by_its_checkpoint_afterwards(spark: "SparkSession", table: Path) -> None:
    path = str(table / "current")
    for number in range(10):
        small = _opened(path)
        rewrite.write(small, small.read(spark).selectExpr("*", "'written' AS _pgwal_fate"), 2000 + number)
    assert (table / "current" / "_delta_log" / f"{10:020}.checkpoint.parquet").exists()
    aged = shutil.copytree(path, table / "aged")  # at another place, for Spark remembers logs
    for number in range(10):
        (aged / "_delta_log" / f"{number:020}.json").unlink()
    assert spark.read.format("delta").load(str(aged)).count() == 30
    spark.sql(f"DELETE FROM delta.`{aged}` WHERE id = 3").collect()
    assert (current.row_count(str(aged)), watermark(str(aged))) == (29, 2009)


def _opened(path: str) -> rewrite.Small:
    found = files.changes(str(Path(path).parent / "raw"), 1000, 2000)
    assert found is not None
    small = rewrite.small(path, DeltaTable(path), found)
    assert small is not None
    return small

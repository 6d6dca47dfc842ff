"""Upkeep of `current`: rewritten files have the same rows, publishes in between win, and only what nothing needs is removed."""

import os
import random
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake import isolation, replacing, rewrite, upkeep
from pgwal_pipeline.lake.current import ChunkSnapshot, Traits, merge, replace, row_count, version, watermark
from pgwal_pipeline.lake.key_ranges import physical_names
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.standing import content_version
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline_tests.lake.publishing import merge_request, replace_request, rows_of, write_events, write_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(900)

_PLAIN = Traits(truncated=False, key_changes=False, unchanged=False)
_BEFORE = ChunkSnapshot("c1", "100:100:")
_COLUMNS = {"id": pa.int64(), "body text": pa.string()}
"""The second one's name needs column mapping."""
_ROWS = 400
_KEY = ("id",)


@pytest.fixture(scope="module")
def _worn(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with a table that several merges have changed: it has small files and deletion vectors."""
    folder = tmp_path_factory.mktemp("worn")
    write_rows(folder / "snapshot", _COLUMNS, [(number, f"row {number}") for number in range(_ROWS)])
    with pytest.MonkeyPatch.context() as patched:
        _as_for_many_rows(patched)
        replace(spark, replace_request(folder, 1000, _PLAIN, [_BEFORE], key=_KEY, columns=list(_COLUMNS)))
        for number in range(1, 4):
            _change(spark, folder, number)
    return folder


def _as_for_many_rows(patched: pytest.MonkeyPatch) -> None:
    """The table has several files, and merges make deletion vectors."""
    patched.setattr(rewrite, "_ROWS", -1)
    patched.setattr(isolation, "_FEW_ROWS", -1)
    patched.setattr(replacing, "FILE_BYTES", 4 << 10)


def _change(spark: "SparkSession", folder: Path, number: int) -> None:
    """Update some rows all over the table, delete one and insert one, in the window `number`."""
    lsn, rng = number * 1000 + 500, random.Random(number)
    events: list[tuple[Any, ...]] = [("U", lsn, at, (key, f"round {number}")) for at, key in enumerate(rng.sample(range(10, _ROWS), 40))]
    events += [("D", lsn, 900, (number, None)), ("I", lsn, 901, (_ROWS + number, "new"))]
    write_events(folder / "raw", _COLUMNS, events)
    merge(spark, merge_request(folder, number * 1000, (number + 1) * 1000, _PLAIN, key=_KEY, columns=list(_COLUMNS)))


@pytest.fixture
def worn(_worn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    _as_for_many_rows(monkeypatch)
    monkeypatch.setattr(upkeep, "_TINY", 0)
    monkeypatch.setattr(upkeep, "_SMALL_FILES", 2)
    return Lake(str(shutil.copytree(_worn, tmp_path / "worn with a space")))


def _rows(path: str, at: int | None = None) -> list[str]:
    return sorted(repr(sorted(row.items())) for row in rows_of(Path(path), at))


def _kept_up(spark: "SparkSession", lake: Lake, path: str) -> None:
    units = upkeep.due(path, _KEY)
    assert units
    for unit in units:
        done = upkeep.rewrite(spark, lake, unit)
        assert upkeep.commit(lake, done)
        upkeep.clear(lake, done.folder)


def test_a_worn_table_is_as_a_new_one_afterwards(spark: "SparkSession", worn: Lake) -> None:
    path = f"{worn.uri}/current"
    before, at, mark, content = _rows(path), version(path), watermark(path), content_version(path, version(path))
    assert pa.table(DeltaTable(path).deletion_vectors()).num_rows
    old = {file["path"] for file in pa.table(DeltaTable(path).get_add_actions()).to_pylist()}
    _kept_up(spark, worn, path)
    assert version(path) > at
    assert (_rows(path), watermark(path)) == (before, mark)
    assert content_version(path, version(path)) == content, "the data is the same"
    assert _rows(path, at) == before, "the version before is still there"
    assert upkeep.due(path, _KEY) == []
    assert not pa.table(DeltaTable(path).deletion_vectors()).num_rows
    files = pa.table(DeltaTable(path).get_add_actions(flatten=True)).to_pylist()
    stored = physical_names(DeltaTable(path))["id"]
    limits = sorted((file[f"min.{stored}"], file[f"max.{stored}"]) for file in files if file["path"] not in old)
    assert len(limits) > 1
    assert all(one[1] < other[0] for one, other in pairwise(limits)), f"each new file has a range of the key: {limits}"
    assert spark.read.format("delta").load(path).count() == len(before)
    assert not list(Path(worn.uri, upkeep.REWRITING).iterdir())
    _change(spark, Path(worn.uri), 4)
    assert watermark(path) == 5000
    assert row_count(path) == _ROWS


def test_a_publish_in_between_wins(spark: "SparkSession", worn: Lake) -> None:
    path = f"{worn.uri}/current"
    (unit, *_) = upkeep.due(path, _KEY)
    done = upkeep.rewrite(spark, worn, unit)
    _change(spark, Path(worn.uri), 4)
    before, at, there = _rows(path), version(path), {file.name for file in Path(path).rglob("*.parquet")}
    assert not upkeep.commit(worn, done)
    assert (_rows(path), version(path)) == (before, at)
    assert {file.name for file in Path(path).rglob("*.parquet")} == there
    _kept_up(spark, worn, path)
    assert _rows(path) == before


@pytest.mark.soak
def test_a_publish_of_other_files_in_between_is_kept(spark: "SparkSession", worn: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{worn.uri}/current"
    _kept_up(spark, worn, path)
    (unit, *_) = _units_of_two(path, monkeypatch)
    done = upkeep.rewrite(spark, worn, unit)
    write_events(Path(worn.uri, "raw"), _COLUMNS, [("I", 4500, 0, (10_000, "far away"))])
    merge(spark, merge_request(Path(worn.uri), 4000, 5000, _PLAIN, key=_KEY, columns=list(_COLUMNS)))
    before = _rows(path)
    assert upkeep.commit(worn, done)
    assert _rows(path) == before
    assert watermark(path) == 5000


def _units_of_two(path: str, monkeypatch: pytest.MonkeyPatch) -> list[upkeep.Unit]:
    """Units of two files each, of a table that has no need."""
    with monkeypatch.context() as patched:
        patched.setattr(replacing, "FILE_BYTES", 1 << 20)
        patched.setattr(upkeep, "_UNIT_BYTES", 4 << 10)
        return upkeep.due(path, _KEY)


def test_another_commit_at_the_same_moment_is_not_overwritten(spark: "SparkSession", worn: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{worn.uri}/current"
    (unit, *_) = upkeep.due(path, _KEY)
    done = upkeep.rewrite(spark, worn, unit)
    before, real = _rows(path), upkeep.table_log.commit_rewrite

    def beaten(*given: Any) -> bool:
        DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 999 hours"})
        return real(*given)

    monkeypatch.setattr(upkeep.table_log, "commit_rewrite", beaten)
    assert not upkeep.commit(worn, done)
    assert _rows(path) == before
    assert DeltaTable(path).metadata().configuration["delta.logRetentionDuration"] == "interval 999 hours"


def test_what_was_written_must_be_what_was_there(spark: "SparkSession", worn: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{worn.uri}/current"
    (unit, *_) = upkeep.due(path, _KEY)
    monkeypatch.setattr(upkeep, "by_key", lambda rows, *_: rows.limit(3))
    with pytest.raises(LakeError, match="nothing was changed"):
        upkeep.rewrite(spark, worn, unit)
    assert not list(Path(worn.uri, upkeep.REWRITING).iterdir())


def test_a_table_without_need_is_left_alone(worn: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{worn.uri}/current"
    monkeypatch.setattr(upkeep, "_SMALL_FILES", 1000)
    monkeypatch.setattr(upkeep, "_DELETED", 0.9)
    assert upkeep.due(path, _KEY) == []
    monkeypatch.setattr(upkeep, "_DELETED", 0.1)
    assert upkeep.due(path, _KEY) != []


def test_what_processes_that_died_left_is_cleared_after_a_day(worn: Lake) -> None:
    for age in (2 * 86400, 60):
        Path(worn.uri, upkeep.REWRITING, f"{int(time.time()) - age}-x", "_delta_log").mkdir(parents=True)
    upkeep.clear(worn)
    (left,) = Path(worn.uri, upkeep.REWRITING).iterdir()
    assert int(left.name.split("-")[0]) > time.time() - 3600


# --- vacuum ---


@pytest.mark.soak
def test_vacuum_removes_what_no_version_needs(spark: "SparkSession", worn: Lake) -> None:
    path = f"{worn.uri}/current"
    before, rows = {file for file in Path(path).rglob("*.parquet") if "_delta_log" not in file.parts}, _rows(path)
    _kept_up(spark, worn, path)
    replaced = {file.relative_to(path) for file in before} - {Path(uri.removeprefix("file://")).relative_to(path) for uri in _uris(path)}
    assert replaced
    upkeep.vacuum(spark, path, 0)
    assert not any(Path(path, file).exists() for file in replaced)
    assert _rows(path) == rows


def _uris(path: str) -> list[str]:
    return [uri.replace("%20", " ") for uri in DeltaTable(path).file_uris()]


def test_what_is_older_goes_when_it_was_asked_to_and_not_by_the_tables_own_measure(spark: "SparkSession", worn: Lake) -> None:
    path = f"{worn.uri}/current"
    before = {Path(uri).name for uri in _uris(path)}
    _kept_up(spark, worn, path)
    aged = Path(worn.uri, "aged")  # at another place, for Spark remembers logs
    shutil.copytree(path, aged, ignore=shutil.ignore_patterns("*.crc"))
    long_ago = int((time.time() - 20 * 86400) * 1000)
    for log in aged.glob("_delta_log/*.json"):
        log.write_text(re.sub(r'("deletionTimestamp":)\d+', rf"\g<1>{long_ago}", log.read_text()))
    for file in aged.rglob("*.parquet"):
        os.utime(file, (long_ago / 1000, long_ago / 1000))
    gone = before - {Path(uri).name for uri in _uris(path)}
    assert gone
    upkeep.vacuum(spark, str(aged), 30 * 24)
    assert gone <= {file.name for file in aged.rglob("*.parquet")}
    upkeep.vacuum(spark, str(aged), 10 * 24)
    assert not gone & {file.name for file in aged.rglob("*.parquet")}


def test_versions_stay_readable_for_as_long_as_one_that_is_named(spark: "SparkSession", worn: Lake) -> None:
    path = f"{worn.uri}/current"
    wanted = upkeep.properties_for(path, 60 * 24, version(path))
    assert upkeep.needs_properties(path, wanted)
    upkeep.set_properties(spark, path, wanted)
    assert not upkeep.needs_properties(path, wanted)
    found = DeltaTable(path).metadata().configuration
    assert found["delta.deletedFileRetentionDuration"] == found["delta.logRetentionDuration"] == "interval 1440 hours"

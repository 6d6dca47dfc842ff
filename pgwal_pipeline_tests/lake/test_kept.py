"""A `current` that keeps deleted rows, against a model of the source: living rows as ever, and each row that a key has lost, as it was."""

import os
import random
import shutil
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pgwal_pipeline.lake.current import Traits, merge, replace, row_count
from pgwal_pipeline_tests.lake.model import (
    COLUMNS,
    KEY,
    KEYS,
    WINDOW_BYTES,
    WINDOW_TIME,
    Case,
    expected,
    expected_deleted,
    write_raw,
    write_snapshot,
)
from pgwal_pipeline_tests.lake.publishing import GENERATION, merge_request, replace_request, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("several_parts")]

_FIRST_XID = 5000
_SNAPSHOT_LSN = WINDOW_BYTES
_MARKS = ("_pgwal_deleted_lsn", "_pgwal_deleted_at")
_KINDS = [
    Traits(False, True, True),
    Traits(False, True, False),
    Traits(False, False, True),
    Traits(True, True, True),
    Traits(True, False, False),
]


def _simulated(number: int, traits: Traits, windows: int) -> tuple[Case, list[dict[Any, Any]]]:
    """A table that is read whole, then changed window by window; and after each window the rows that are to be there."""
    case = Case(number, random.Random(number), traits.key_changes, traits.unchanged)
    case.begin({key: case.fresh_row() for key in case.rng.sample(KEYS, case.rng.randint(0, len(KEYS)))})
    case.read(KEYS, f"chunk-{number}", _FIRST_XID, [])
    xid, truths = _FIRST_XID, []
    for window in range(1, windows + 1):
        for at in sorted(case.rng.sample(range(window * WINDOW_TIME, (window + 1) * WINDOW_TIME), case.rng.randint(0, 4))):
            xid += 1
            if traits.truncated and case.rng.random() < 0.3:
                case.truncate(at, xid)
            else:
                case.transaction(at, xid)
        truths.append(_wanted(case))
    return case, truths


def _wanted(case: Case) -> dict[Any, Any]:
    living = {key: {**row, **dict.fromkeys(_MARKS)} for key, row in expected([case], _SNAPSHOT_LSN).items()}
    deleted = expected_deleted([case])
    assert living.keys().isdisjoint(deleted)
    return living | deleted


def _found(path: Path, version: int | None = None) -> dict[Any, Any]:
    rows = {}
    for row in rows_of(path, version):
        key = dict(row["_pgwal_text"] or ()).get("id") or row["id"].day - 1
        assert (row["case"], key) not in rows
        rows[row["case"], key] = row
    return rows


def _differences(found: dict[Any, Any], wanted: dict[Any, Any]) -> list[Any]:
    return [(key, found.get(key), wanted.get(key)) for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)]


def _read(spark: "SparkSession", folder: Path, cases: list[Case]) -> None:
    chunks = write_snapshot(str(folder / "snapshot"), cases, GENERATION)
    write_raw(str(folder / "raw"), cases)
    nothing = Traits(False, False, False)
    replace(spark, replace_request(folder, WINDOW_BYTES, nothing, chunks, key=KEY, columns=COLUMNS, snapshot_lsn=_SNAPSHOT_LSN))


def _cases(traits: Traits, count: int, windows: int, seed: int) -> list[tuple[Case, list[dict[Any, Any]]]]:
    """Some tables as one; but a TRUNCATE would empty them all, so then one that has several."""
    found = (_simulated(seed + number, traits, windows) for number in range(1000))
    if not traits.truncated:
        return list(islice(found, count))
    return [next(one for one in found if sum(event["op"] == "T" for event in one[0].events) > 1 and len(one[1][-1]) > len(KEYS) // 2)]


def _compared(spark: "SparkSession", folder: Path, traits: Traits, cases: int, windows: int, seed: int) -> None:
    """Merge window by window, and all windows at once: it makes no difference how often is published."""
    simulated = _cases(traits, cases, windows, seed)
    _read(spark, folder, [case for case, _ in simulated])
    shutil.copytree(folder / "current", folder / "at_once")
    wanted, start = {}, WINDOW_BYTES
    for number in range(windows):
        end = start + WINDOW_BYTES
        version = merge(spark, merge_request(folder, start, end, traits, key=KEY, columns=COLUMNS, keeps=True)).version
        wanted = {key: row for _, truths in simulated for key, row in truths[number].items()}
        assert _differences(_found(folder / "current", version), wanted) == [], f"{traits}, seed {seed}, window {number}"
        start = end
    merge(spark, merge_request(folder, WINDOW_BYTES, start, traits, key=KEY, columns=COLUMNS, current="at_once", keeps=True))
    assert _differences(_found(folder / "at_once"), wanted) == [], f"{traits}, seed {seed}, at once"
    living = [row for row in wanted.values() if row["_pgwal_deleted_lsn"] is None]
    assert row_count(str(folder / "current")) == len(living) < len(wanted)


@pytest.mark.parametrize(("either_size", "traits"), [("large", _KINDS[0]), ("large", _KINDS[3])], indirect=["either_size"])
@pytest.mark.usefixtures("either_size")
def test_deleted_rows_stay_as_they_were(spark: "SparkSession", tmp_path: Path, traits: Traits) -> None:
    _compared(spark, tmp_path, traits, 40, 2, 0)


@pytest.mark.soak
@pytest.mark.usefixtures("either_size")
@pytest.mark.parametrize("traits", _KINDS)
def test_deleted_rows_stay_as_they_were_for_long(spark: "SparkSession", tmp_path: Path, traits: Traits) -> None:
    """Seed after seed, for a tenth of PGWAL_SOAK_MINUTES: there are ten of these."""
    end, seed = time.monotonic() + 6 * float(os.environ.get("PGWAL_SOAK_MINUTES", "60")), 1000
    while time.monotonic() < end:
        _compared(spark, tmp_path / str(seed), traits, 200, 3, seed)
        shutil.rmtree(tmp_path / str(seed))
        seed += 1000

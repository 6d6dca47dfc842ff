"""`current` against a model of the source: hundreds of small tables with random histories, each the rows of one `case` in one table."""

import random
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake.current import Traits, Unresolved, merge, replace
from pgwal_pipeline_tests.lake.model import COLUMNS, KEY, KEYS, WINDOW_BYTES, WINDOW_TIME, Case, expected, write_raw, write_snapshot
from pgwal_pipeline_tests.lake.publishing import GENERATION, merge_request, replace_request, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FIRST_XID = 3 * 2**32 - 40  # the 32 bits that raw has begin anew on the way
_SNAPSHOT_LSN = WINDOW_BYTES
_WINDOWS = 4


def _simulated(number: int, traits: Traits) -> tuple[Case, list[dict[Any, Any]]]:
    """A table that is read whole, then changed window by window; and its expected rows after each window."""
    case = Case(number, random.Random(number), traits.key_changes, traits.unchanged)
    for key in case.rng.sample(KEYS, case.rng.randint(0, len(KEYS))):
        case.state[key] = case.fresh_row()
    case.read(KEYS, f"chunk-{number}", _FIRST_XID, [])
    xid, truths = _FIRST_XID, []
    for window in range(1, _WINDOWS):
        for time in sorted(case.rng.sample(range(window * WINDOW_TIME, (window + 1) * WINDOW_TIME), case.rng.randint(0, 4))):
            xid += 1
            if traits.truncated and case.rng.random() < 0.2:
                case.truncate(time, xid)
            else:
                case.transaction(time, xid)
        truths.append(expected([case], _SNAPSHOT_LSN))
    return case, truths


def _found(path: Path, version: int | None = None) -> dict[Any, Any]:
    """The rows of `current` by case and key, as the model names them."""
    rows = {}
    for row in rows_of(path, version):
        key = _key_of(dict(row["_pgwal_text"] or ()).get("id", row["id"]))
        assert (row["case"], key) not in rows
        rows[row["case"], key] = row
    return rows


def _key_of(value: Any) -> Any:
    return value if isinstance(value, str) else value.day - 1


def _differences(found: dict[Any, Any], wanted: dict[Any, Any]) -> list[Any]:
    return [(key, found.get(key), wanted.get(key)) for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)]


def _first_window(spark: "SparkSession", folder: Path, cases: Sequence[Case], traits: Traits) -> None:
    write_raw(str(folder / "raw"), cases)
    chunks = write_snapshot(str(folder / "snapshot"), cases, GENERATION)
    request = replace_request(folder, WINDOW_BYTES, traits, chunks, key=KEY, columns=COLUMNS, snapshot_lsn=_SNAPSHOT_LSN)
    replace(spark, request)


def _publish(spark: "SparkSession", folder: Path, traits: Traits, ends: Iterable[int], current: str = "current") -> list[dict[Any, Any]]:
    """Merge up to each of `ends`; what stands there afterwards."""
    start, states = WINDOW_BYTES, []
    for end in ends:
        result = merge(spark, merge_request(folder, start, end, traits, key=KEY, columns=COLUMNS, current=current))
        states.append(_found(folder / current, result.version))
        start = end
    return states


def _merged(spark: "SparkSession", folder: Path, numbers: Iterable[int], traits: Traits) -> None:
    simulated = [_simulated(number, traits) for number in numbers]
    _first_window(spark, folder, [case for case, _ in simulated], traits)
    shutil.copytree(folder / "current", folder / "at_once")
    ends = [(window + 1) * WINDOW_BYTES for window in range(1, _WINDOWS)]
    states = _publish(spark, folder, traits, ends)
    for window, state in enumerate(states):
        wanted = {key: row for _, truths in simulated for key, row in truths[window].items()}
        assert _differences(state, wanted) == [], f"window {window + 1}"
    assert _differences(_publish(spark, folder, traits, ends[-1:], "at_once")[0], states[-1]) == []


@pytest.mark.timeout(300)
def test_merged_by_windows_and_at_once_as_the_source_has_it(spark: "SparkSession", tmp_path: Path) -> None:
    """The tables are merged side by side: none shows in another."""
    kinds = [Traits(False, moves, unsent) for moves in (True, False) for unsent in (True, False)]
    with ThreadPoolExecutor(4) as pool:
        work = [
            pool.submit(_merged, spark, tmp_path / str(number), range(number * 1000, number * 1000 + 150), traits)
            for number, traits in enumerate(kinds)
        ]
        work += [pool.submit(_merged, spark, tmp_path / str(number), [number], Traits()) for number in range(10, 12)]
        for future in work:
            future.result()


def _beside_writers(number: int) -> Case:
    """A table that is read in chunks while transactions run; each changes its rows when it commits."""
    case = Case(number, random.Random(number))
    for key in case.rng.sample(KEYS, 8):
        case.state[key] = case.fresh_row()
    next_xid, time, running = _FIRST_XID, 0, []
    chunks = [KEYS[:4], KEYS[4:8], KEYS[8:]]
    todo = ["chunk"] * len(chunks) + ["begin", "commit", "commit"] * 5
    case.rng.shuffle(todo)
    for step in todo:
        if step == "chunk":
            keys = chunks.pop(case.rng.randrange(len(chunks)))
            case.read(keys, f"{number}-{len(chunks)}", next_xid, running)
        elif step == "begin":
            running.append(next_xid)
            next_xid += case.rng.randint(1, 4)
        else:
            xid = running.pop(case.rng.randrange(len(running))) if running else next_xid
            next_xid = max(next_xid, xid + 1)
            time += case.rng.randint(1, 150)
            case.transaction(time, xid)
    return case


@pytest.mark.timeout(300)
def test_a_snapshot_in_chunks_beside_writers(spark: "SparkSession", tmp_path: Path) -> None:
    cases = [_beside_writers(number) for number in range(500)]
    whole = [case for case in cases if not case.unresolvable()]
    assert 250 < len(whole) < 500
    write_raw(str(tmp_path / "raw"), whole)
    chunks = write_snapshot(str(tmp_path / "snapshot"), whole, GENERATION)
    replace(spark, replace_request(tmp_path, 10 * WINDOW_BYTES, Traits(), chunks, key=KEY, columns=COLUMNS, snapshot_lsn=_SNAPSHOT_LSN))
    assert _differences(_found(tmp_path / "current"), expected(whole, _SNAPSHOT_LSN)) == []


def test_values_that_nobody_sent_or_read_are_named(spark: "SparkSession", tmp_path: Path) -> None:
    cases = [case for case in map(_beside_writers, range(500)) if case.unresolvable()][:8]
    assert cases
    write_raw(str(tmp_path / "raw"), cases)
    chunks = write_snapshot(str(tmp_path / "snapshot"), cases, GENERATION)
    with pytest.raises(Unresolved) as caught:
        replace(spark, replace_request(tmp_path, 10 * WINDOW_BYTES, Traits(), chunks, key=KEY, columns=COLUMNS))
    named = {(row["case"], _key_of(row["id"])): set(names) for row, names in caught.value.rows}
    assert named == {(case.number, key): names for case in cases for key, names in case.unresolvable().items()}
    assert not DeltaTable.is_deltatable(str(tmp_path / "current"))

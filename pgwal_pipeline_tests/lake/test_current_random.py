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

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("several_parts"), pytest.mark.usefixtures("either_size")]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FIRST_XID = 3 * 2**32 - 40  # the 32 bits that raw has begin anew on the way
_SNAPSHOT_LSN = WINDOW_BYTES
_WINDOWS = range(1, 3)
"""The windows of the changes; in the first one the tables are read."""


def _simulated(number: int, traits: Traits) -> tuple[Case, list[dict[Any, Any]]]:
    """A table that is read whole, then changed window by window; and its expected rows as it was read and after each window."""
    case = Case(number, random.Random(number), traits.key_changes, traits.unchanged)
    for key in case.rng.sample(KEYS, case.rng.randint(0, len(KEYS))):
        case.state[key] = case.fresh_row()
    case.read(KEYS, f"chunk-{number}", _FIRST_XID, [])
    xid, truths = _FIRST_XID, [expected([case], _SNAPSHOT_LSN)]
    for window in _WINDOWS:
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


def _merged(spark: "SparkSession", folder: Path, traits: Traits, ends: Iterable[int]) -> list[dict[Any, Any]]:
    """The rows of `current` after a merge up to each of `ends`."""
    start, states = WINDOW_BYTES, []
    for end in ends:
        result = merge(spark, merge_request(folder, start, end, traits, key=KEY, columns=COLUMNS))
        states.append(_found(folder / "current", result.version))
        start = end
    return states


def test_merged_by_windows_and_at_once_as_the_source_has_it(spark: "SparkSession", tmp_path: Path) -> None:
    """All tables are read as one; then each kind's events are merged into a copy of it, side by side: none shows in another."""
    kinds = [Traits(False, True, True), Traits(False, True, False), Traits(False, False, True)]
    simulated = [[_simulated(kind * 1000 + number, traits) for number in range(150)] for kind, traits in enumerate(kinds)]
    emptied = [next(found for found in (_simulated(9000 + number, Traits()) for number in range(100)) if _truncates(found[0]) > 1)]
    every = [one for kind in [*simulated, emptied] for one in kind]
    chunks = write_snapshot(str(tmp_path / "snapshot"), [case for case, _ in every], GENERATION)
    nothing = Traits(False, False, False)
    replace(spark, replace_request(tmp_path, WINDOW_BYTES, nothing, chunks, key=KEY, columns=COLUMNS, snapshot_lsn=_SNAPSHOT_LSN))
    as_read = {key: row for _, truths in every for key, row in truths[0].items()}
    assert _differences(_found(tmp_path / "current"), as_read) == []
    ends = [(window + 1) * WINDOW_BYTES for window in _WINDOWS]

    def merged(name: str, cases: Sequence[tuple[Case, Any]], traits: Traits, ends: Sequence[int]) -> list[dict[Any, Any]]:
        shutil.copytree(tmp_path / "current", tmp_path / name / "current")
        write_raw(str(tmp_path / name / "raw"), [case for case, _ in cases])
        return _merged(spark, tmp_path / name, traits, ends)

    with ThreadPoolExecutor(4) as pool:
        by_window = [pool.submit(merged, str(kind), cases, kinds[kind], ends) for kind, cases in enumerate(simulated)]
        at_once = pool.submit(merged, "at_once", simulated[0], kinds[0], ends[-1:])
        truncated = pool.submit(merged, "truncated", emptied, Traits(), ends[-1:])
    for kind, cases in enumerate(simulated):
        others = {key: row for key, row in as_read.items() if key[0] // 1000 != kind}
        for window, state in enumerate(by_window[kind].result(), 1):
            wanted = {key: row for _, truths in cases for key, row in truths[window].items()}
            assert _differences(state, others | wanted) == [], f"{kinds[kind]}, window {window}"
    assert _differences(at_once.result()[0], by_window[0].result()[-1]) == []
    assert _differences(truncated.result()[0], emptied[0][1][-1]) == []


def _truncates(case: Case) -> int:
    return sum(event["op"] == "T" for event in case.events)


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

"""Merging and replacing `current` tables: fences, faults, TRUNCATE, changing columns, odd keys, bags, and Spark Connect."""

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as altered
from math import copysign, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake import current
from pgwal_pipeline.lake.current import (
    ChunkSnapshot,
    MergeRequest,
    Traits,
    Unresolved,
    generation,
    merge,
    replace,
    row_count,
    version,
    watermark,
)
from pgwal_pipeline.messages.errors import LakeError, TableError
from pgwal_pipeline_tests.lake.publishing import merge_request, replace_request, rows_of, write_events, write_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("either_size")]

PLAIN = Traits(truncated=False, key_changes=False, unchanged=False)
INT = pa.int32()
TEXT = pa.string()
_BEFORE = ChunkSnapshot("c1", "100:100:")
"""What a chunk read that saw no transaction from 100 on."""


def values(path: Path, *columns: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row[name] for name in columns) for row in rows_of(path)), key=repr)


@pytest.fixture(scope="module")
def _things(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, columns = tmp_path_factory.mktemp("things"), {"id": INT, "body": TEXT}
    write_rows(folder / "snapshot", columns, [(1, "one"), (2, "two")])
    write_events(folder / "raw", columns, [("U", 1500, 0, (1, "new"))])
    replace(spark, replace_request(folder, 1000, PLAIN, [_BEFORE], key=["id"], columns=["id", "body"]))
    return folder


@pytest.fixture
def things(_things: Path, tmp_path: Path) -> Path:
    """A lake with a table (id, body) that has two rows at 1000, and one event in the window that follows; each test has its own copy."""
    return shutil.copytree(_things, tmp_path / "things")


def next_window(
    folder: Path, traits: Traits = PLAIN, *, key: Sequence[str] = ("id",), columns: Sequence[str] = ("id", "body")
) -> MergeRequest:
    return merge_request(folder, 1000, 2000, traits, key=key, columns=columns)


def test_a_merge_that_dies_is_done_once(spark: "SparkSession", things: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the commit nothing has changed, after it everything has; done again, it changes nothing."""
    request = next_window(things)
    for passing, body in ((1, "one"), (2, "new")):
        monkeypatch.setattr(failpoints, "_points", {"publish.in_merge": ("error", passing)})
        monkeypatch.setattr(failpoints, "_passed", {})
        with pytest.raises(RuntimeError):
            merge(spark, request)
        assert values(things / "current", "id", "body") == [(1, body), (2, "two")]
    monkeypatch.setattr(failpoints, "_points", {})
    assert watermark(request.current_path) == 2000
    assert merge(spark, request) == current.MergeResult(1, 0)
    # Delta itself skips what has been committed, should two publishes look at once.
    monkeypatch.setattr(current, "watermark", lambda path: 1000)
    assert merge(spark, request) == current.MergeResult(1, 0)
    assert values(things / "current", "id", "body") == [(1, "new"), (2, "two")]


def test_only_from_where_the_table_stands(spark: "SparkSession", things: Path) -> None:
    with pytest.raises(LakeError, match=r"stands at 0/3E8, not at 0/5DC"):
        merge(spark, altered(next_window(things), from_lsn=1500))
    with pytest.raises(LakeError, match="does not exist"):
        merge(spark, altered(next_window(things), current_path=str(things / "nowhere")))


def test_a_value_that_is_nowhere_names_the_row_and_changes_nothing(spark: "SparkSession", things: Path) -> None:
    unsent = [("U", 1600, 0, (7, None), ["body"]), ("K", 1700, 0, (8, None)), ("U", 1700, 0, (9, None), ["body"])]
    write_events(things / "raw", {"id": INT, "body": TEXT}, unsent)
    with pytest.raises(Unresolved, match=r"public\.things: the source did not send the value of body in the row with id = ") as caught:
        merge(spark, next_window(things, Traits(truncated=False)))
    assert {(key["id"], names) for key, names in caught.value.rows} == {(7, ("body",)), (9, ("body",))}
    assert (version(str(things / "current")), watermark(str(things / "current"))) == (0, 1000)


def test_truncate_leaves_what_came_after(spark: "SparkSession", things: Path) -> None:
    columns = {"id": INT, "body": TEXT}
    more = [("I", 1600, 0, (3, "lost")), ("T", 1600, 1, None), ("I", 1600, 2, (4, "kept")), ("U", 1700, 0, (4, None), ["body"])]
    write_events(things / "raw", columns, more)
    assert merge(spark, next_window(things, Traits(key_changes=False))).rows_changed == 1
    assert values(things / "current", "id", "body", "_pgwal_commit_lsn") == [(4, "kept", 1700)]
    write_events(things / "raw", columns, [("T", 2500, 0, None)])
    emptied = Traits(key_changes=False, unchanged=False)
    assert merge(spark, merge_request(things, 2000, 3000, emptied, key=["id"], columns=["id", "body"])).rows_changed == 0
    assert rows_of(things / "current") == []
    assert watermark(str(things / "current")) == 3000


def test_columns_come_and_go(spark: "SparkSession", tmp_path: Path) -> None:
    write_rows(tmp_path / "snapshot", {"id": INT, "going": TEXT, "last": INT}, [(1, "g1", 1), (2, "g2", 2)])
    replace(spark, replace_request(tmp_path, 1000, PLAIN, [_BEFORE], key=["id"], columns=["id", "going", "last"]))
    write_events(tmp_path / "raw", {"id": INT, "going": TEXT, "last": INT}, [("U", 1100, 0, (2, "g3", 3))])
    added = {"id": INT, "a b,c": pa.list_(pa.decimal128(9, 2)), "last": INT}
    write_events(tmp_path / "raw", added, [("U", 1200, 0, (2, None, 4)), ("I", 1300, 0, (3, ["1.50", None], 5))])
    merge(spark, next_window(tmp_path, columns=["id", "a b,c", "last", "not yet in raw"]))
    rows = rows_of(tmp_path / "current")
    assert list(rows[0]) == ["id", "a b,c", "going", "last", "_pgwal_commit_lsn", "_pgwal_text"]
    found = sorted(((row["id"], row["a b,c"], row["going"], row["last"]) for row in rows), key=lambda row: row[0])
    assert [(row[0], None if row[1] is None else [None if item is None else str(item) for item in row[1]], *row[2:]) for row in found] == [
        (1, None, "g1", 1),
        (2, None, None, 4),
        (3, ["1.50", None], None, 5),
    ]


def test_a_column_of_another_type_is_refused(spark: "SparkSession", things: Path) -> None:
    folder = things / "other"
    write_events(folder / "raw", {"id": INT, "body": INT}, [("U", 1500, 0, (1, 7))])
    with pytest.raises(TableError, match=r"its column 'body' is string in the current table and has become int; run `pgwal resnapshot"):
        merge(spark, altered(next_window(things), raw_path=str(folder / "raw")))


def test_inserts_alone(spark: "SparkSession", things: Path) -> None:
    write_events(things / "inserts", {"id": INT, "body": TEXT}, [("I", 1500, number, (3 + number, "new")) for number in range(2)])
    shutil.copytree(things / "current", things / "bag")
    for key, name in ((["id"], "current"), ([], "bag")):
        request = next_window(things, Traits(False, False, False), key=key)
        request = altered(request, raw_path=str(things / "inserts"), current_path=str(things / name))
        assert merge(spark, request) == current.MergeResult(1, 2)
        assert merge(spark, request) == current.MergeResult(1, 0)
        assert values(things / name, "id", "body") == [(1, "one"), (2, "two"), (3, "new"), (4, "new")]
        assert watermark(str(things / name)) == 2000


@pytest.mark.parametrize("windows", [pytest.param(2, marks=pytest.mark.soak), 40])  # some files, which other tests have too, and many
def test_some_windows_in_a_folder_of_any_name(windows: int, spark: "SparkSession", tmp_path: Path) -> None:
    folder, columns = tmp_path / "a {y,z} *?#", {"id": INT, "body": TEXT}
    write_rows(folder / "snapshot", columns, [(1, "one")])
    replace(spark, replace_request(folder, 1000, PLAIN, [_BEFORE], key=["id"], columns=["id", "body"]))
    for window in range(windows + 2):
        write_events(folder / "raw", columns, [("I", window * 1000 + 1, 0, (window + 1, "new"))])
    assert merge(spark, altered(next_window(folder), to_lsn=(windows + 1) * 1000)) == current.MergeResult(1, windows)
    assert sorted(row["id"] for row in rows_of(folder / "current")) == [*range(1, windows + 2)]


@pytest.mark.parametrize("session", ["spark", pytest.param("spark_connect", marks=pytest.mark.soak)])
def test_names_that_a_parser_would_take_for_more(session: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whatever the session makes of `${…}`, of backslashes and of backticks, names are names."""
    spark = request.getfixturevalue(session)
    wanted = {"spark.sql.parser.escapedStringLiterals": "true", "spark.sql.parser.quotedRegexColumnNames": "true"}
    columns = {"${x}id": INT, "id": INT, "${x}it's \\d": TEXT, "it's \\d": TEXT, "a.b": TEXT, "aXb": TEXT}
    folder, key = tmp_path / "its", ["${x}id", "a.b"]
    write_rows(folder / "snapshot", columns, [(1, 10, "one", "uno", "k", "x"), (2, 20, "two", "due", "k", "x")])
    unsent = ["${x}it's \\d"]
    write_events(
        folder / "raw", columns, [("U", 500, 0, (1, 11, None, "un", "k", "y"), unsent), ("I", 501, 0, (3, 30, "t", "q", "k", "z"))]
    )
    moved = [("K", 1500, 0, (2, None, None, None, "k", None)), ("U", 1500, 0, (4, 21, None, "d", "m", "w"), unsent)]
    write_events(folder / "raw", columns, [*moved, ("U", 1600, 0, (1, 12, None, "u", "k", "v"), unsent)])
    for name, value in wanted.items():
        spark.conf.set(name, value)
    try:
        anything = Traits(truncated=False)
        replace(spark, replace_request(folder, 1000, anything, [_BEFORE], key=key, columns=list(columns)))
        merge(spark, merge_request(folder, 1000, 2000, anything, key=key, columns=list(columns)))
    finally:
        for name in wanted:
            spark.conf.unset(name)
    table = spark.read.format("delta").load(str(folder / "current"))
    assert set(columns) < set(table.columns)
    found = sorted(tuple(row[name] for name in columns) for row in table.collect())
    assert found == [(1, 12, "one", "u", "k", "v"), (3, 30, "t", "q", "k", "z"), (4, 21, "two", "d", "m", "w")]


def test_keys_of_floating_point(spark: "SparkSession", tmp_path: Path) -> None:
    columns = {"id": pa.float64(), "body": TEXT}
    nan = float("nan")
    write_rows(tmp_path / "snapshot", columns, [(-0.0, "zero"), (nan, "nan"), (float("inf"), "inf")])
    changes = [
        ("U", 1500, 0, (nan, None), ["body"]),
        ("K", 1500, 1, (-0.0, None)),
        ("U", 1500, 1, (0.0, None), ["body"]),
        ("D", 1500, 2, (float("inf"), None)),
    ]
    write_events(tmp_path / "raw", columns, changes)
    followed = Traits(truncated=False)
    replace(spark, replace_request(tmp_path, 1000, PLAIN, [_BEFORE], key=["id"], columns=["id", "body"]))
    merge(spark, next_window(tmp_path, followed))
    replace(spark, replace_request(tmp_path, 2000, followed, [_BEFORE], key=["id"], columns=["id", "body"], current="replaced"))
    for name in ("current", "replaced"):
        zero, other = sorted(rows_of(tmp_path / name), key=lambda row: isnan(row["id"]))
        assert (zero["id"], copysign(1, zero["id"]), zero["body"], isnan(other["id"]), other["body"]) == (0.0, 1.0, "zero", True, "nan")


# --- bags ---

BAG = {"n": INT, "f": pa.float64(), "body": TEXT}
_BAG_VALUES: list[tuple[Any, ...]] = [
    (1, 0.0, "a"),
    (1, -0.0, "a"),
    (1, float("nan"), None),
    (None, None, None),
    (2, 0.5, {"text": "{{x}}"}),
]


def _bag_rows(path: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows_of(path):
        body = {"text": row["_pgwal_text"]["body"]} if row["_pgwal_text"] else row["body"]
        found[repr((row["n"], row["f"], body))] += 1
    return found


@pytest.mark.usefixtures("several_parts")
def test_a_bag_counts_copies(spark: "SparkSession", tmp_path: Path) -> None:
    """Of the events before 1000 the snapshot has seen the transactions 90 and 95, not 97 and 103; later ones it has not seen."""
    rng = random.Random(7)
    rows = [rng.choice(_BAG_VALUES) for _ in range(40)]
    write_rows(tmp_path / "snapshot", BAG, rows)
    one, other, never = _BAG_VALUES[0], _BAG_VALUES[4], (9, None, None)
    events: list[tuple[Any, ...]] = [
        ("I", 500, 0, one, [], 90),
        ("I", 600, 0, one, [], 97),
        ("D", 700, 0, other, [], 103),
        ("D", 800, 0, never, [], 95),
    ]
    bag = [*rows, one]
    bag.remove(other)
    before = Counter(map(repr, bag))
    for number in range(120):
        lsn = 1000 + number * 8
        kind = rng.choice("IUUDD") if bag else "I"
        if kind in "UD":
            old = bag.pop(rng.randrange(len(bag)))
            events.append(("K" if kind == "U" else "D", lsn, 0, old))
        if kind in "UI":
            bag.append(rng.choice(_BAG_VALUES))
            events.append((kind, lsn, 0, bag[-1]))
    write_events(tmp_path / "raw", BAG, events)
    snapshot, columns, moves = ChunkSnapshot("c1", "97:103:97,99"), list(BAG), Traits(truncated=False, unchanged=False)
    replace(spark, replace_request(tmp_path, 1000, moves, [snapshot], key=[], columns=columns))
    assert _bag_rows(tmp_path / "current") == before
    merge(spark, merge_request(tmp_path, 1000, 2000, moves, key=[], columns=columns))
    assert _bag_rows(tmp_path / "current") == Counter(map(repr, bag))

    # No row is lost that is not there.
    write_events(tmp_path / "raw", BAG, [("I", 2100, 0, never), ("D", 2200, 0, never), ("D", 2200, 1, never)])
    with pytest.raises(TableError, match="deleted more copies of a row than its current table has"):
        merge(spark, merge_request(tmp_path, 2000, 3000, moves, key=[], columns=columns))
    assert (version(str(tmp_path / "current")), row_count(str(tmp_path / "current"))) == (1, len(bag))

    write_events(tmp_path / "raw", BAG, [("T", 2900, 0, None), ("I", 2900, 1, one)])
    replace(spark, replace_request(tmp_path, 3000, Traits(), [snapshot], key=[], columns=columns, current="emptied"))
    assert _bag_rows(tmp_path / "emptied") == Counter([repr(one)])


# --- replacing ---


def test_truncate_takes_the_rows_of_chunks_that_did_not_see_it(spark: "SparkSession", tmp_path: Path) -> None:
    columns = {"id": INT, "body": TEXT}
    write_rows(tmp_path / "snapshot", columns, [(1, "before")], chunk="early")
    write_rows(tmp_path / "snapshot", columns, [(11, "after")], chunk="late")
    events = [
        ("I", 400, 0, (2, "gone"), [], 2**32 - 5),
        ("T", 500, 0, None, [], 2**32 - 1),
        ("I", 600, 0, (11, "after"), [], 3),
        ("I", 700, 0, (3, "new"), [], 4),
        ("U", 800, 0, (11, "newer"), [], 5),
    ]
    write_events(tmp_path / "raw", columns, events)
    high = 7 * 2**32
    chunks = [ChunkSnapshot("early", f"{high - 1}:{high - 1}:"), ChunkSnapshot("late", f"{high + 4}:{high + 5}:{high + 4}")]
    truncated = Traits(key_changes=False, unchanged=False)
    replace(spark, replace_request(tmp_path, 1000, truncated, chunks, key=["id"], columns=["id", "body"]))
    assert values(tmp_path / "current", "id", "body") == [(11, "newer"), (3, "new")]


def test_read_again_the_table_is_as_the_source_is_now(spark: "SparkSession", things: Path) -> None:
    """Rows gone from the source are gone, columns are others or have another type; the same work is not done twice."""
    path, columns = str(things / "current"), ["id", "new", "body"]
    write_rows(things / "snapshot2", {"id": INT, "new": INT, "body": INT}, [(2, 2, 5)], chunk="c2", generation="g2")
    write_events(things / "raw", {"id": INT, "body": TEXT}, [("U", 900, 0, (2, "4"), [], 90)])
    again = replace_request(things, 1000, PLAIN, [ChunkSnapshot("c2", "100:100:")], key=["id"], columns=columns, generation="g2")
    again = altered(again, snapshot_path=str(things / "snapshot2"))
    assert replace(spark, again) == current.MergeResult(1, 1)
    assert (generation(path), watermark(path)) == ("g2", 1000)
    assert replace(spark, again) == current.MergeResult(1, 0)
    assert values(things / "current", *columns) == [(2, 2, 5)]
    with pytest.raises(LakeError, match="stands at 0/3E8, past 0/1F4"):
        replace(spark, altered(again, to_lsn=500))


def test_a_table_that_was_never_written_to(spark: "SparkSession", tmp_path: Path) -> None:
    """Read while it was empty, and no event has come: no raw table, no row in the snapshot's; or events alone."""
    columns = {"id": INT, "body": TEXT}
    write_rows(tmp_path / "snapshot", columns, [])
    replace(spark, replace_request(tmp_path, 1000, PLAIN, [_BEFORE], key=["id"], columns=["id", "body"]))
    assert rows_of(tmp_path / "current") == []
    write_events(tmp_path / "raw", columns, [("I", 500, 0, (1, "one"))])
    request = replace_request(tmp_path, 1000, PLAIN, [], key=["id"], columns=["id", "body"], current="events")
    replace(spark, altered(request, snapshot_path=str(tmp_path / "none")))
    assert values(tmp_path / "events", "id", "body") == [(1, "one")]


def test_nulls_of_any_type_on_a_connect_server(spark_connect: "SparkSession", tmp_path: Path) -> None:
    """The columns that nobody has values for: other readers know their types as well."""
    columns = {"id": INT, "body": TEXT, "many": pa.list_(pa.string()), "price": pa.decimal128(9, 2)}
    write_rows(tmp_path / "snapshot", columns, [])
    first = replace_request(tmp_path, 1000, PLAIN, [_BEFORE], key=["id"], columns=[*columns])
    replace(spark_connect, first)
    types = DeltaTable(tmp_path / "current").schema()
    assert [field.type.to_json() for field in types.fields][:2] == ['"integer"', '"string"']
    known = DeltaTable(tmp_path / "snapshot").schema().to_json()
    again = altered(first, snapshot_path=str(tmp_path / "none"), generation="g2", schema_json=known)
    replace(spark_connect, altered(again, columns=("id",), keep=("body", "many", "price")))
    assert DeltaTable(tmp_path / "current").schema() == types
    write_events(tmp_path / "raw", {"id": INT}, [("I", 1500, 0, (1,)), ("T", 1500, 1, None), ("I", 1500, 2, (2,))])
    merge(spark_connect, next_window(tmp_path, Traits(), columns=[*columns]))
    assert rows_of(tmp_path / "current") == [
        {"id": 2, "body": None, "many": None, "price": None, "_pgwal_commit_lsn": 1500, "_pgwal_text": None}
    ]
    assert DeltaTable(tmp_path / "current").schema() == types


# --- Spark Connect ---


def test_side_by_side_on_a_connect_server(spark_connect: "SparkSession", tmp_path: Path) -> None:
    """Each merge carries its own table's LSN; the tables have a bag, a chain of key changes, and a value that is nowhere among them."""
    columns = {"id": INT, "body": TEXT}
    chain = [
        ("K", 1500, 0, (1, None)),
        ("U", 1500, 0, (5, None), ["body"]),
        ("K", 1600, 0, (5, None)),
        ("U", 1600, 0, (6, None), ["body"]),
    ]
    lost = [("U", 1700, 0, (8, None), ["body"])]
    swapped = [("K", 1500, 0, (2, "two")), ("U", 1500, 0, (3, "three"))]
    kinds = [
        (swapped, Traits(False, True, False), []),
        (chain, Traits(False, True, True), ["id"]),
        (lost, Traits(False, False, True), ["id"]),
    ]
    write_rows(tmp_path / "snapshot", columns, [(1, "one"), (2, "two")])
    replace(spark_connect, replace_request(tmp_path, 1000, PLAIN, [_BEFORE], key=["id"], columns=["id", "body"]))

    def one(number: int) -> Any:
        folder, end = tmp_path / str(number), 2000 + number
        events, traits, key = kinds[number]
        shutil.copytree(tmp_path / "current", folder / "current")
        write_events(folder / "raw", columns, events)
        try:
            merge(spark_connect, merge_request(folder, 1000, end, traits, key=key, columns=["id", "body"]))
        except Unresolved as error:
            return error.rows
        return values(folder / "current", "id", "body"), watermark(str(folder / "current"))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(one, range(3)))
    assert found[0] == ([(1, "one"), (3, "three")], 2000)
    assert found[1] == ([(2, "two"), (6, "one")], 2001)
    assert found[2] == (({"id": 8}, ("body",)),)

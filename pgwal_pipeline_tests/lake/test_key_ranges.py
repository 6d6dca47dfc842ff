"""The ranges of changed keys: none is missed, and files that have none of them are not read."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import StructType

from pgwal_pipeline.lake import files, key_ranges, replacing, rewrite
from pgwal_pipeline.lake.current import ChunkSnapshot, Traits, merge, replace
from pgwal_pipeline.lake.key_ranges import KeyRanges
from pgwal_pipeline_tests.lake.publishing import merge_request, replace_request, rows_of, write_events, write_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LONG_AGO, _AT_LAST = datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)
_TEXTS = ["", "a", "a" * 64, "a" * 65, "aa\U0010ffff", "\U0010ffff" * 70, "b'\\\"$`", "Ä", "z" * 63 + "\ud7ff" + "more", "\x01\n"]


@dataclass(frozen=True)
class Kind:
    """A type of key: how a number becomes one, in the order of the numbers, and keys at the edges of the type."""

    arrow: pa.DataType
    of: Callable[[int], Any]
    edges: Sequence[Any] = ()


KINDS = {
    "short": Kind(pa.int16(), lambda n: n - 500, [-(2**15), 2**15 - 1]),
    "integer": Kind(pa.int32(), lambda n: n * 1000, [-(2**31), 2**31 - 1]),
    "long": Kind(pa.int64(), lambda n: n + 2**40, [-(2**63), 2**63 - 1]),
    "text": Kind(pa.string(), lambda n: f"k{n:09}", _TEXTS),
    "uuid": Kind(pa.string(), lambda n: str(UUID(int=n << 100))),
    "date": Kind(pa.date32(), lambda n: date(2020, 1, 1) + timedelta(n), [date(1, 1, 1), date(9999, 12, 31), {"text": "infinity"}]),
    "timestamp": Kind(
        pa.timestamp("us", "UTC"),
        lambda n: datetime(2020, 1, 1, tzinfo=UTC) + timedelta(microseconds=n * 700),
        [_LONG_AGO.replace(tzinfo=UTC), _AT_LAST.replace(tzinfo=UTC), {"text": "-infinity"}],
    ),
    "timestamp_ntz": Kind(
        pa.timestamp("us"), lambda n: datetime(2020, 1, 1) + timedelta(microseconds=n * 700), [_LONG_AGO, _AT_LAST, {"text": "infinity"}]
    ),
    "decimal": Kind(pa.decimal128(20, 4), lambda n: Decimal(n - 500) / 8, [Decimal("-9999999999999999.9999"), {"text": "NaN"}]),
    "boolean": Kind(pa.bool_(), lambda n: n % 2 == 1),
    "double": Kind(pa.float64(), lambda n: n / 8 - 50, [-0.0, float("inf"), float("-inf"), float("nan")]),
}
_FILES = 10
_PRUNED = [name for name in KINDS if name not in ("boolean", "double")]


def _target(folder: Path, columns: dict[str, pa.DataType], parts: Sequence[Sequence[tuple[Any, ...]]]) -> DeltaTable:
    for part in parts:
        columns_of = list(zip(*part, strict=True))
        arrays = [pa.array(values, kind) for values, kind in zip(columns_of, columns.values(), strict=True)]
        write_deltalake(folder / "current", pa.table(arrays, list(columns)), mode="append")
    return DeltaTable(folder / "current")


def _found(folder: Path, target: DeltaTable, key: Sequence[str]) -> KeyRanges | None:
    changes = files.changes(str(folder / "raw"), 1000, 2000)
    assert changes is not None
    return key_ranges.find(target, StructType.fromJson(json.loads(target.schema().to_json())), changes, key)


def _holds(found: KeyRanges, key: dict[str, Any]) -> bool:
    def within(name: str, low: Any, high: Any) -> bool:
        value = None if isinstance(key[name], dict) else key[name]
        if value is None or low is None:
            return value is None and low is None
        above = key_ranges._most(high)
        return key_ranges._least(low) <= value and (above is None or value <= above)

    return any(all(within(*bound) for bound in one.bounds) for one in found.ranges)


@pytest.mark.parametrize("name", _PRUNED)
def test_every_changed_key_is_in_a_range_and_few_files_are_hit(name: str, tmp_path: Path) -> None:
    kind, rng = KINDS[name], random.Random(name)
    parts = [[(kind.of(number),) for number in range(first, first + 100)] for first in range(0, 100 * _FILES, 100)]
    target = _target(tmp_path, {"id": kind.arrow}, parts)
    hit = sorted(rng.sample(range(_FILES), 3))
    keys = [kind.of(number) for file in hit for number in rng.sample(range(file * 100, file * 100 + 100), 20)]
    write_events(tmp_path / "raw", {"id": kind.arrow}, [("U", 1500, number, (key,)) for number, key in enumerate(keys)])
    found = _found(tmp_path, target, ["id"])
    assert found is not None
    assert (found.files, found.rows) == (3, 300)
    assert all(_holds(found, {"id": key}) for key in keys)
    write_events(tmp_path / "raw", {"id": kind.arrow}, [("D", 1600, number, (key,)) for number, key in enumerate(kind.edges)])
    found = _found(tmp_path, target, ["id"])
    assert found is not None
    assert found.files <= 5
    assert all(_holds(found, {"id": key}) for key in [*keys, *kind.edges])


def test_of_a_key_of_several_columns_each_counts(tmp_path: Path) -> None:
    """The newest rows of some tenants, whose numbers run each by itself; one row lies in a file of several tenants."""
    columns = {"tenant": pa.int32(), "number": pa.int64()}
    parts = [[(tenant, number) for number in range(first, first + 100)] for tenant in range(6) for first in range(0, 500, 100)]
    target = _target(tmp_path, columns, [*parts, [(tenant, 0) for tenant in range(20, 60)]])
    keys = [(tenant, number) for tenant in (1, 2, 5) for number in range(470, 490)] + [(40, 0)]
    write_events(tmp_path / "raw", columns, [("U", 1500, number, key) for number, key in enumerate(keys)])
    found = _found(tmp_path, target, ["tenant", "number"])
    assert found is not None
    assert found.files == 4
    assert all(_holds(found, {"tenant": tenant, "number": number}) for tenant, number in keys)


def test_of_more_keys_than_there_are_ranges_the_widest_gaps_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ranges, "_RANGES", 6)
    target = _target(tmp_path, {"id": pa.int64()}, [[(number * 10,), (number * 10 + 9,)] for number in range(40)])
    keys = [number * 20 + 5 for number in range(20) if not 8 <= number < 18]
    write_events(tmp_path / "raw", {"id": pa.int64()}, [("U", 1500, number, (key,)) for number, key in enumerate(keys)])
    found = _found(tmp_path, target, ["id"])
    assert found is not None
    assert len(found.ranges) == 6
    assert found.files < 20
    assert all(_holds(found, {"id": key}) for key in keys)


def test_of_very_many_keys_only_the_bounds_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"tenant": pa.string(), "number": pa.int64()}
    target = _target(tmp_path, columns, [[(f"t{tenant}", number)] for tenant in range(8) for number in range(10)])
    keys: list[tuple[Any, ...]] = [(f"t{tenant}", number) for tenant in (2, 3) for number in (4, 5, 6)]
    keys.append(({"text": "\\xe9"}, 5))
    for number, key in enumerate(keys):
        write_events(tmp_path / "raw", columns, [("U", 1500, number, key)])
    monkeypatch.setattr(key_ranges, "_KEY_BYTES", 10)
    found = _found(tmp_path, target, ["tenant", "number"])
    assert found is not None
    assert found.files == 6
    assert all(_holds(found, dict(zip(columns, key, strict=True))) for key in keys)


def test_no_ranges_where_they_would_spare_nothing(tmp_path: Path) -> None:
    target = _target(tmp_path, {"id": pa.int64(), "f": pa.float64()}, [[(number, number / 2)] for number in range(4)])
    write_events(tmp_path / "raw", {"id": pa.int64(), "f": pa.float64()}, [("U", 1500, number, (number, 0.0)) for number in range(4)])
    assert _found(tmp_path, target, ["id"]) is None
    assert _found(tmp_path, target, ["f"]) is None


def test_the_condition_means_to_spark_what_the_ranges_say(spark: "SparkSession", tmp_path: Path) -> None:
    """For each type the rows of a table that fulfill the condition: all with a changed key, and none that is in no range."""
    kinds = {name: KINDS[name] for name in _PRUNED}
    columns = {name: kind.arrow for name, kind in kinds.items()}
    edges = [tuple(kind.edges[number] if number < len(kind.edges) else None for kind in kinds.values()) for number in range(len(_TEXTS))]
    rows = [tuple(kind.of(number) for kind in kinds.values()) for number in range(40)]
    plain = [tuple(None if isinstance(value, dict) else value for value in row) for row in edges]
    target = _target(tmp_path, columns, [rows[:10], rows[10:20], rows[20:30], rows[30:], plain])
    keys = [rows[number] for number in (12, 15, 17, 33)] + edges
    write_events(tmp_path / "raw", columns, [("U", 1500, number, key) for number, key in enumerate(keys)])
    conditions, wanted = [], []
    for place, name in enumerate(kinds):
        found = _found(tmp_path, target, [name])
        assert found is not None
        conditions.append(f"count_if({found.condition()}) AS `{name}`")
        wanted.append(sum(_holds(found, {name: row[place]}) for row in [*rows, *plain]))
    counted = spark.read.format("delta").load(str(tmp_path / "current")).selectExpr(*conditions).collect()[0]
    assert (list(counted), max(wanted) < 40) == (wanted, True)


# --- merges ---

_COLUMNS = ("id", "n")
_BEFORE = ChunkSnapshot("c1", "100:100:")
_PLAIN = Traits(False, False, False)


def _as_key(value: Any) -> Any:
    if isinstance(value, dict):
        return value["text"]
    return repr(value) if isinstance(value, float) else value


def _contents(path: Path) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for row in rows_of(path):
        text = row["_pgwal_text"] or {}
        key = text.get("id", _as_key(row["id"]))
        assert key not in found, f"{key} is there twice"
        found[key] = row["n"]
    return found


class _Source:
    """A table of the source with one key column, changed at random."""

    def __init__(self, kind: Kind, numbers: range, seed: object) -> None:
        self.kind, self.rng = kind, random.Random(repr(seed))
        self.keys = [kind.of(number) for number in numbers] + list(kind.edges)
        self.rows = {_as_key(key): (key, 0) for key in self.keys}
        self._at = 0

    def changes(self, among: Sequence[Any], count: int, lsn: int) -> list[tuple[Any, ...]]:
        """Insert, update, delete and move rows with keys of `among`; what the stream says of it."""
        events: list[tuple[Any, ...]] = []
        for _ in range(count):
            self._at += 1
            key, other = self.rng.choice(among), self.rng.choice(among)
            name, new = _as_key(key), _as_key(other)
            if name not in self.rows:
                self.rows[name] = (key, self._at)
                events.append(("I", lsn, self._at, (key, self._at)))
            elif self.rng.random() < 0.2:
                del self.rows[name]
                events.append(("D", lsn, self._at, (key, None)))
            elif new not in self.rows and self.rng.random() < 0.5:
                del self.rows[name]
                self.rows[new] = (other, self._at)
                events += [("K", lsn, self._at, (key, None)), ("U", lsn, self._at, (other, self._at))]
            else:
                self.rows[name] = (key, self._at)
                events.append(("U", lsn, self._at, (key, self._at)))
        return events


def _as_the_source(spark: "SparkSession", folder: Path, name: str, rounds: int) -> None:
    """Changes that lie close together, and spread ones, in turn, are in `current` as in the source."""
    kind = KINDS[name]
    columns = {"id": kind.arrow, "n": pa.int64()}
    source = _Source(kind, range(0, 1000, 2), name)
    write_rows(folder / "snapshot", columns, list(source.rows.values()))
    replace(spark, replace_request(folder, 1000, _PLAIN, [_BEFORE], key=["id"], columns=_COLUMNS))
    table = DeltaTable(folder / "current")
    assert len(table.file_uris()) > 3 or name == "boolean"
    every = [kind.of(number) for number in range(1000)] + list(kind.edges)
    for number in range(rounds):
        start = source.rng.randrange(900)
        among = every[start : start + 40] if number % 2 == 0 else [*source.rng.sample(every, 60), *kind.edges]
        lsn = 1000 * (number + 1)
        events = source.changes(among, 50, lsn + 500)
        write_events(folder / "raw", columns, events)
        traits = Traits(False, any(event[0] == "K" for event in events), False)
        merge(spark, merge_request(folder, lsn, lsn + 1000, traits, key=["id"], columns=_COLUMNS))
        assert _contents(folder / "current") == {key: n for key, (_, n) in source.rows.items()}, (name, number)


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables are merged like large ones, and have several files."""
    monkeypatch.setattr(rewrite, "_ROWS", -1)
    monkeypatch.setattr(replacing, "FILE_BYTES", 2 << 10)


@pytest.mark.usefixtures("many_files")
def test_keys_of_text_are_merged_as_the_source_has_them(spark: "SparkSession", tmp_path: Path) -> None:
    _as_the_source(spark, tmp_path, "text", 3)


@pytest.mark.soak
@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("name", KINDS)
def test_keys_of_every_type_are_merged_as_the_source_has_them(name: str, spark: "SparkSession", tmp_path: Path) -> None:
    _as_the_source(spark, tmp_path, name, 12)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("name", ["decimal", *(pytest.param(name, marks=pytest.mark.soak) for name in _PRUNED if name != "decimal")])
def test_files_without_a_changed_key_are_not_read(name: str, spark: "SparkSession", tmp_path: Path) -> None:
    """They are not even there while the merge runs, which also looks for the values of rows that changed their key."""
    kind, folder = KINDS[name], tmp_path
    columns = {"id": kind.arrow, "n": pa.int64(), "body": pa.string()}
    keys = [kind.of(number) for number in range(0, 1000, 2)]
    write_rows(folder / "snapshot", columns, [(key, 0, f"body of {key}") for key in keys])
    replace(spark, replace_request(folder, 1000, _PLAIN, [_BEFORE], key=["id"], columns=list(columns)))
    table = DeltaTable(folder / "current")
    changed, moved = [kind.of(number) for number in (500, 504, 506)], kind.of(501)
    events = [("U", 1500, number, (key, 7, None), ["body"]) for number, key in enumerate(changed[:2])]
    events += [("K", 1500, 9, (changed[2], None, None)), ("U", 1500, 9, (moved, 8, None), ["body"])]
    write_events(folder / "raw", columns, events)
    found = _found(folder, table, ["id"])
    assert found is not None
    assert found.files < len(table.file_uris()) / 4
    near = spark.read.format("delta").load(str(folder / "current")).where(found.condition()).inputFiles()
    kept = {Path(uri).name for uri in near}
    assert len(kept) == found.files
    away = [file for file in (folder / "current").glob("*.parquet") if file.name not in kept]
    for file in away:
        file.rename(file.with_suffix(".away"))
    merge(spark, merge_request(folder, 1000, 2000, Traits(False, True, True), key=["id"], columns=list(columns)))
    for file in away:
        file.with_suffix(".away").rename(file)
    rows = {row["id"]: (row["n"], row["body"]) for row in rows_of(folder / "current")}
    wanted = {key: (0, f"body of {key}") for key in keys}
    wanted |= {key: (7, f"body of {key}") for key in changed[:2]} | {moved: (8, wanted.pop(changed[2])[1])}
    assert rows == wanted

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Chunk, Ledger, Publish, TableState, Window
from pgwal_pipeline.lake.maintenance import Pruned, compact, forget, prune_raw, vacuum
from pgwal_pipeline.lake.raw import WindowWriter, commit_window
from pgwal_pipeline.lake.records import State
from pgwal_pipeline.lake.snapshots import SnapshotWriter, generations
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.lake.changes import FakeChanges, inserts, read, relation

_ORDERS, _LINES = TableName("shop", "orders"), TableName("shop", "lines")
_NOW = datetime(2026, 6, 1, tzinfo=UTC)
_NOTHING = timedelta(0)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def ledger(lake: Lake) -> Ledger:
    ledger = Ledger(lake)
    ledger.append_window(Window(window_key(100), "pgwal", 100, 100, "complete"))
    return ledger


def _drain(ledger: Ledger, start: int, *changes: FakeChanges, at: datetime = _NOW) -> None:
    """The window from `start`, 100 long, prepared and completed at a time of one's own."""
    key = window_key(start + 100)
    with WindowWriter(ledger.lake, 1 << 20, key) as writer:
        for change in changes:
            writer.add(change)
        window = Window(key, "pgwal", start, start + 100, "prepared", tables=writer.finish(), at=at)
    ledger.append_window(window)
    commit_window(ledger.lake, key, window.tables)
    ledger.append_window(replace(window, state="complete"))


def _ids(lake: Lake, table: TableName) -> list[int]:
    return sorted(row["id"] for row in read(lake, lake.raw(table)))


def _ready(ledger: Ledger, *tables: TableName) -> None:
    ledger.record_tables([TableState(table, 1, "ready", generation="g1", published="g1") for table in tables])


def test_windows_past_retention_and_published_go_and_the_others_stay(lake: Lake, ledger: Ledger) -> None:
    old = _NOW - timedelta(days=8)
    _drain(ledger, 100, inserts("orders", {"id": [1]}), inserts("lines", {"id": [1]}), at=old)
    _drain(ledger, 200, inserts("orders", {"id": [2]}), at=old)
    _drain(ledger, 300, inserts("orders", {"id": [3]}), at=_NOW)
    _drain(ledger, 400, inserts("orders", {"id": [4]}), at=old)
    _ready(ledger, _ORDERS, _LINES)
    pruned = prune_raw(lake, ledger, _NOW - timedelta(days=7), 400)
    assert pruned == Pruned((window_key(200), window_key(300)), 3)
    assert _ids(lake, _ORDERS) == [3, 4]
    assert _ids(lake, _LINES) == []
    assert ledger.frontier() == 500
    assert prune_raw(lake, ledger, _NOW - timedelta(days=7), 400) == Pruned((), 0)
    assert prune_raw(lake, ledger, _NOW + timedelta(days=1), 500).keys == (window_key(400), window_key(500))
    assert _ids(lake, _ORDERS) == []
    assert Ledger(lake).frontier() == 500


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (TableState(_ORDERS, 1, "pending"), True),
        (TableState(_ORDERS, 1, "snapshotting", reading="g1"), True),
        (TableState(_ORDERS, 1, "ready", generation="g1"), True),
        (TableState(_ORDERS, 1, "ready", generation="g2", published="g1"), True),
        (TableState(_ORDERS, 1, "ready", generation="g1", published="g1", reading="g2"), True),
        (TableState(_ORDERS, 1, "error", generation="g1", published="g1"), False),
        (TableState(_ORDERS, 1, "ready", generation="g1", published="g1"), False),
        (TableState(_ORDERS, 1, "gone", generation="g1"), False),
    ],
)
def test_a_window_stays_while_a_table_needs_its_changes(lake: Lake, ledger: Ledger, state: TableState, kept: bool) -> None:
    _drain(ledger, 100, inserts("orders", {"id": [1]}), inserts("lines", {"id": [1]}))
    _drain(ledger, 200, inserts("lines", {"id": [2]}))
    _ready(ledger, _LINES)
    ledger.record_tables([state])
    pruned = prune_raw(lake, ledger, _NOW + timedelta(days=1), 300)
    assert pruned.keys == ((window_key(300),) if kept else (window_key(200), window_key(300)))
    assert _ids(lake, _ORDERS) == ([1] if kept else [])
    assert _ids(lake, _LINES) == ([1] if kept else [])


def test_a_table_in_error_has_a_gap_once_its_changes_are_pruned(lake: Lake, ledger: Ledger) -> None:
    """It holds up no other; tried again by itself it would lack them."""
    _drain(ledger, 100, inserts("orders", {"id": [1]}), inserts("lines", {"id": [1]}))
    _ready(ledger, _LINES)
    ledger.record_tables([TableState(_ORDERS, 1, "ready", generation="g1", published="g1").failed("merge", "It failed.", _NOW)])
    prune_raw(lake, ledger, _NOW + timedelta(days=1), 300)
    state = ledger.tables()[_ORDERS]
    assert (state.state, state.left_out, state.generation) == ("error", True, None)
    assert (state.reason or "").startswith("It failed. Raw has been pruned")
    assert ledger.tables()[_LINES].state == "ready"


def test_pruning_that_was_cut_off_is_finished_by_the_next(lake: Lake, ledger: Ledger) -> None:
    _drain(ledger, 100, inserts("orders", {"id": [1]}))
    _drain(ledger, 200, inserts("orders", {"id": [2]}))
    _ready(ledger, _ORDERS)
    ledger.prune_windows([window_key(200)])
    assert _ids(lake, _ORDERS) == [1, 2]
    assert prune_raw(lake, ledger, _NOW - timedelta(days=1), 300) == Pruned((), 1)
    assert _ids(lake, _ORDERS) == [2]


def test_a_window_that_is_only_prepared_is_never_pruned(lake: Lake, ledger: Ledger) -> None:
    key = window_key(200)
    with WindowWriter(lake, 1 << 20, key) as writer:
        writer.add(inserts("orders", {"id": [1]}))
        ledger.append_window(Window(key, "pgwal", 100, 200, "prepared", tables=writer.finish(), at=_NOW - timedelta(days=99)))
    _ready(ledger, _ORDERS)
    assert prune_raw(lake, ledger, _NOW, 1000).keys == ()
    assert vacuum(lake, ledger, _NOTHING, _NOTHING) == 0
    (window,) = ledger.prepared()
    commit_window(lake, window.key, window.tables)
    assert _ids(lake, _ORDERS) == [1]


def test_small_files_of_a_partition_become_one_and_keep_their_rows(lake: Lake, ledger: Ledger) -> None:
    key = window_key(200)
    with WindowWriter(lake, 1, key) as writer:  # no budget: a file for each addition
        for number in range(5):
            writer.add(inserts("orders", {"id": [number], "name": [f"n{number}"]}))
        window = Window(key, "pgwal", 100, 200, "prepared", tables=writer.finish())
    ledger.append_window(window)
    commit_window(lake, key, window.tables)
    _drain(ledger, 200, inserts("orders", {"id": [9], "name": ["n9"]}))
    for attempt in ("a1", "a2"):
        SnapshotWriter(lake, relation("orders", "id"), "g1").write(
            attempt, [inserts("orders", {"id": [1]}).rows.select(["id", "_pgwal_text"])]
        )
    before = sorted(map(str, read(lake, lake.raw(_ORDERS))))
    snapshot = sorted(map(str, read(lake, lake.snapshot(_ORDERS))))
    assert compact(lake, [_ORDERS, _LINES]) == 4 + 1
    assert sorted(map(str, read(lake, lake.raw(_ORDERS)))) == before
    assert sorted(map(str, read(lake, lake.snapshot(_ORDERS)))) == snapshot
    assert len(DeltaTable(lake.raw(_ORDERS)).file_uris()) == 2
    assert compact(lake, [_ORDERS, _LINES]) == 0
    commit_window(lake, key, window.tables)
    assert sorted(map(str, read(lake, lake.raw(_ORDERS)))) == before


def test_vacuum_removes_what_nothing_names_and_nothing_else(lake: Lake, ledger: Ledger) -> None:
    _drain(ledger, 100, inserts("orders", {"id": [1]}))
    _drain(ledger, 200, inserts("orders", {"id": [2]}))
    SnapshotWriter(lake, relation("orders", "id"), "g1").write("a1", [inserts("orders", {"id": [1]}).rows.select(["id", "_pgwal_text"])])
    with WindowWriter(lake, 1 << 20, window_key(999)) as writer:
        writer.add(inserts("orders", {"id": [7]}))
        writer.finish()  # and then the process dies
    _ready(ledger, _ORDERS)
    prune_raw(lake, ledger, _NOW + timedelta(days=1), 200)
    files = set(Path(lake.uri).rglob("part-*"))
    assert vacuum(lake, ledger) == 0
    assert set(Path(lake.uri).rglob("part-*")) == files
    assert vacuum(lake, ledger, _NOTHING, _NOTHING) >= 2
    left = {path.relative_to(lake.raw(_ORDERS)) for path in Path(lake.raw(_ORDERS)).rglob("part-*")}
    assert [path.parent.name for path in left] == [f"_pgwal_window={window_key(300)}"]
    assert _ids(lake, _ORDERS) == [2]
    assert len(read(lake, lake.snapshot(_ORDERS))) == 1
    fresh = Ledger(lake)
    assert fresh.frontier() == ledger.frontier() == 300
    assert fresh.tables().keys() == {_ORDERS}


def test_generations_that_no_table_goes_by_are_forgotten_but_not_one_that_begins(lake: Lake, ledger: Ledger) -> None:
    old = datetime.now(UTC) - timedelta(days=30)
    piece = inserts("orders", {"id": [1]}).rows.select(["id", "_pgwal_text"])
    states: dict[str, State] = {"old": "ready", "reading": "ready", "force": "ready", "begins": "ready"}
    for name in states:
        ledger.record_chunks([Chunk(_ORDERS, name, 0, at=None if name == "begins" else old)])
        SnapshotWriter(lake, relation("orders", "id"), name).write("a1", [piece])
    ledger.record_tables([TableState(_ORDERS, 1, "ready", generation="force", published="force", reading="reading")])
    ledger.record_publish(Publish(100, old))
    ledger.record_publish(Publish(200, old))
    assert forget(lake, ledger, datetime.now(UTC)) == 1
    assert generations(lake, _ORDERS) == {"reading", "force", "begins"}
    assert ledger.generations(_ORDERS) == {"reading", "force", "begins"}
    assert [publish.lsn for publish in ledger.publishes()] == [200]

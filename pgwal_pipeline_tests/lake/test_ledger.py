import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Chunk, Ledger, Publish, Source, TablePointer, TableState, Window
from pgwal_pipeline.lake.records import FORMAT, FileWrite, Registration, TableWrite
from pgwal_pipeline.lake.rows import source_rows, sources, window_rows, windows
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import Column, PgType, Relation, TableName

_ORDERS = TableName("shop", "Order Lines")
_RELATION = Relation(
    16384,
    _ORDERS,
    "f",
    (Column("id", PgType(20, -1, "bigint"), True, False), Column("tags", PgType(1009, -1, "text[]", PgType(25, -1, "text")))),
    ("id",),
)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def _window(start: int, end: int, state: str = "complete", slot: str = "pgwal", tables: Sequence[TableWrite] = ()) -> Window:
    return Window(key=window_key(end), slot=slot, start_lsn=start, end_lsn=end, state=state, tables=tuple(tables))  # pyright: ignore[reportArgumentType]


def _write(lake: Lake, table: TableName = _ORDERS) -> TableWrite:
    return TableWrite(
        table=str(table),
        path=lake.raw(table),
        schema_json='{"type":"struct","fields":[]}',
        files=(FileWrite("_pgwal_window=0/part-1.parquet", 10, 3, '{"numRecords": 3}'), FileWrite("b.parquet", 20, 4, "{}")),
        rows=7,
        inserts=1,
        updates=2,
        deletes=3,
        truncates=1,
        key_changes=1,
        unchanged=True,
        newest_lsn=90,
        newest_at=1_700_000_000_000_000,
    )


def test_a_missing_lake_has_an_empty_ledger_and_is_not_made_by_looking(lake: Lake) -> None:
    ledger = Ledger(lake)
    assert ledger.source() is None
    assert ledger.windows() == ledger.prepared() == ledger.publishes() == ledger.chunks(_ORDERS, "g") == ()
    assert ledger.tables() == {}
    assert ledger.frontier() is None
    assert ledger.publish() is None
    assert not Path(lake.uri).exists()


def test_a_place_that_holds_something_else_is_no_lake(lake: Lake) -> None:
    folder = Path(lake.uri)
    (folder / ".cache").mkdir(parents=True)
    assert Ledger(lake).source() is None
    (folder / "thesis.odt").touch()
    with pytest.raises(LakeError, match=r"something else \(thesis.odt\)"):
        Ledger(lake).source()


def test_records_are_read_back_as_they_were(lake: Lake) -> None:
    source = Source(2**64 - 1, 3, 5, "shop", "pgwal", "pgwal")
    window = replace(
        _window(100, 200, "prepared", tables=[_write(lake)]),
        transactions=5,
        changes=6,
        bytes=7,
        seconds={"drain": 1.5, "decode": 0.25},
        min_xid=3,
        max_xid=2**32 - 1,
        at=datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
    )
    state = TableState(
        table=_ORDERS,
        oid=2**32 - 1,
        state="error",
        reason="why",
        key=("id",),
        relation=_RELATION,
        generation="g1",
        reading="g2",
        published="g0",
        joined_xid=2**40,
        required_lsn=300,
        at=datetime(2026, 1, 2, tzinfo=UTC),
    )
    chunk = Chunk(_ORDERS, "g1", 3, ("1", "é,\n"), None, "a1", 5, 6, "10:20:11,15", 400, datetime(2026, 1, 2, tzinfo=UTC))
    publish = Publish(200, datetime(2026, 1, 2, tzinfo=UTC), {_ORDERS: TablePointer(lake.current(_ORDERS), 7)})
    writer = Ledger(lake)
    writer.record_source(source)
    writer.append_window(window)
    writer.record_tables([state])
    writer.record_chunks([chunk])
    writer.record_publish(publish)

    reader = Ledger(lake)
    assert reader.source() == source
    assert reader.windows() == reader.prepared() == (window,)
    assert reader.tables() == {_ORDERS: state}
    assert reader.chunks(_ORDERS, "g1") == (chunk,)
    assert reader.publish() == publish
    assert reader.publishes() == (publish,)


def test_the_ledger_still_holds_after_the_lake_has_moved(lake: Lake, tmp_path: Path) -> None:
    writer = Ledger(lake)
    writer.append_window(_window(100, 200, "prepared", tables=[_write(lake)]))
    writer.record_publish(Publish(200, datetime.now(UTC), {_ORDERS: TablePointer(lake.current(_ORDERS), 7)}))
    moved = Lake(str(tmp_path / "elsewhere"))
    shutil.move(lake.uri, moved.uri)
    assert Ledger(moved).prepared()[0].tables[0].path == moved.raw(_ORDERS)
    publish = Ledger(moved).publish()
    assert publish is not None
    assert publish.tables[_ORDERS].path == moved.current(_ORDERS)


def test_a_complete_window_keeps_its_counts_and_names_no_files(lake: Lake) -> None:
    ledger = Ledger(lake)
    prepared = _window(100, 200, "prepared", tables=[_write(lake)])
    ledger.append_window(prepared)
    assert ledger.frontier() is None
    ledger.append_window(replace(prepared, state="complete"))
    assert ledger.prepared() == ()
    assert ledger.frontier() == 200
    assert ledger.windows()[0].tables == (replace(_write(lake), files=(), schema_json=""),)


def test_the_frontier_is_where_the_windows_have_their_first_gap(lake: Lake) -> None:
    ledger = Ledger(lake)
    ledger.append_window(_window(100, 100))
    assert ledger.frontier() == 100
    ledger.append_window(_window(100, 200))
    ledger.append_window(_window(300, 400, slot="pgwal_w_1"))
    assert ledger.frontier() == 200
    ledger.append_window(_window(200, 300, "prepared", slot="pgwal_w_2"))
    assert ledger.frontier() == 200
    ledger.append_window(_window(200, 300, slot="pgwal_w_2"))
    assert ledger.frontier() == 400
    assert [window.end_lsn for window in ledger.windows(after=200)] == [300, 400]


def test_a_slot_made_anew_begins_a_new_frontier(lake: Lake) -> None:
    ledger = Ledger(lake)
    for window in (_window(100, 100), _window(100, 200), _window(500, 500)):
        ledger.append_window(window)
    assert ledger.frontier() == 500
    ledger.append_window(_window(500, 600))
    assert ledger.frontier() == 600


def test_a_slot_that_begins_where_the_last_window_ended_changes_nothing(lake: Lake) -> None:
    ledger = Ledger(lake)
    ledger.append_window(_window(100, 200))
    ledger.append_window(_window(200, 200))
    ledger.append_window(_window(200, 300))
    assert ledger.frontier() == 300


def test_writing_a_window_again_is_nothing(lake: Lake) -> None:
    prepared = _window(100, 200, "prepared", tables=[_write(lake)])
    one, other = Ledger(lake), Ledger(lake)
    one.append_window(prepared)
    other.append_window(prepared)
    one.append_window(replace(prepared, state="complete"))
    other.append_window(replace(prepared, state="complete"))
    assert [window.state for window in Ledger(lake).windows()] == ["complete"]


@pytest.mark.parametrize(
    "window",
    [
        _window(100, 200, "prepared", slot="other"),
        _window(150, 200, "prepared"),
        _window(50, 150, "prepared"),
        _window(199, 300, "complete"),
        _window(100, 250, "prepared"),
    ],
)
def test_a_window_that_another_process_has_is_refused(lake: Lake, window: Window) -> None:
    first, second = Ledger(lake), Ledger(lake)
    assert second.windows() == ()
    first.append_window(_window(100, 200, "prepared", tables=[_write(lake)]))
    with pytest.raises(LakeError, match=r"0/64 to 0/C8.*Only one pipeline"):
        second.append_window(window)
    assert len(Ledger(lake).windows()) == 1


def test_the_same_window_with_other_files_is_refused(lake: Lake) -> None:
    Ledger(lake).append_window(_window(100, 200, "prepared", tables=[_write(lake)]))
    with pytest.raises(LakeError, match="Only one pipeline"):
        Ledger(lake).append_window(_window(100, 200, "prepared", tables=[replace(_write(lake), files=())]))


def test_pruned_windows_that_follow_one_another_become_one_record(lake: Lake) -> None:
    ledger = Ledger(lake)
    ledger.append_window(_window(100, 100))
    for start in range(100, 700, 100):
        ledger.append_window(replace(_window(start, start + 100), changes=start))
    ledger.prune_windows([window_key(end) for end in (200, 300, 500)])
    assert [(window.start_lsn, window.end_lsn, window.state) for window in ledger.windows()] == [
        (100, 100, "complete"),
        (100, 300, "pruned"),
        (300, 400, "complete"),
        (400, 500, "pruned"),
        (500, 600, "complete"),
        (600, 700, "complete"),
    ]
    ledger.prune_windows([window_key(400), window_key(600)])
    assert [(window.start_lsn, window.end_lsn, window.state, window.changes) for window in Ledger(lake).windows()] == [
        (100, 100, "complete", 0),
        (100, 600, "pruned", 1500),
        (600, 700, "complete", 600),
    ]
    assert Ledger(lake).frontier() == 700
    ledger.append_window(_window(700, 800))
    assert ledger.frontier() == 800


def test_tables_change_together_and_the_newest_state_counts(lake: Lake) -> None:
    ledger = Ledger(lake)
    other = TableName("shop", "b")
    ledger.record_tables([TableState(_ORDERS, 1, "pending"), TableState(other, 2, "pending")])
    ledger.record_tables([TableState(_ORDERS, 1, "ready", generation="g")])
    assert {table: state.state for table, state in Ledger(lake).tables().items()} == {_ORDERS: "ready", other: "pending"}
    ledger.amend_tables(lambda known: [replace(known[other], state="gone")])
    assert Ledger(lake).tables()[other].oid == 2
    assert Ledger(lake).tables()[other].state == "gone"


def test_publishes_go_forward_only(lake: Lake) -> None:
    now = datetime.now(UTC)
    one, other = Ledger(lake), Ledger(lake)
    one.record_publish(Publish(200, now, {_ORDERS: TablePointer(lake.current(_ORDERS), 7)}))
    other.record_publish(Publish(200, now, {_ORDERS: TablePointer(lake.current(_ORDERS), 8)}))
    with pytest.raises(LakeError, match="version 8"):
        one.record_publish(Publish(200, now, {_ORDERS: TablePointer(lake.current(_ORDERS), 7)}))
    with pytest.raises(LakeError, match="0/64 cannot follow the one at 0/C8"):
        one.record_publish(Publish(100, now))
    one.record_publish(Publish(300, now, {_ORDERS: TablePointer(lake.current(_ORDERS), 2)}))
    assert [(publish.lsn, publish.tables[_ORDERS].version) for publish in Ledger(lake).publishes()] == [(200, 8), (300, 2)]


def test_forgetting_keeps_the_newest_publish_and_the_snapshots_in_use(lake: Lake) -> None:
    now = datetime.now(UTC)
    ledger = Ledger(lake)
    for lsn in (100, 200, 300):
        ledger.record_publish(Publish(lsn, now - timedelta(days=1000 - lsn)))
    old = now - timedelta(days=30)
    ledger.record_chunks([Chunk(_ORDERS, name, 0, at=old) for name in ("old", "reading", "published", "force")])
    ledger.record_chunks([Chunk(_ORDERS, "just beginning", 0)])
    ledger.record_tables([TableState(_ORDERS, 1, "ready", generation="force", reading="reading", published="published")])
    ledger.forget(now - timedelta(days=750), now - timedelta(days=1))
    assert [publish.lsn for publish in ledger.publishes()] == [300]
    assert ledger.generations(_ORDERS) == {"reading", "published", "force", "just beginning"}
    later = datetime.now(UTC) + timedelta(minutes=1)
    ledger.forget(later, later)
    assert [publish.lsn for publish in Ledger(lake).publishes()] == [300]
    assert Ledger(lake).generations(_ORDERS) == {"reading", "published", "force"}


def test_what_is_read_does_not_grow_with_every_append(lake: Lake) -> None:
    ledger = Ledger(lake)
    for start in range(0, 4000, 100):
        prepared = _window(start, start + 100, "prepared", tables=[_write(lake)] * 5)
        ledger.append_window(prepared)
        ledger.append_window(replace(prepared, state="complete"))
    fresh = Ledger(lake)
    assert fresh.frontier() == 4000
    assert len(fresh.windows()) == 40
    assert len(fresh._windows._files) < 10
    assert len(list(Path(lake.ledger("windows"), "_delta_log").glob("*.checkpoint.parquet"))) >= 80 // 20


def _published(ledger: Ledger, lsn: int) -> None:
    ledger.record_publish(Publish(lsn, datetime.now(UTC), {_ORDERS: TablePointer(ledger.lake.current(_ORDERS), 1)}))


def test_a_drain_and_a_publish_read_none_of_the_windows_that_were_published_long_ago(lake: Lake) -> None:
    ledger = Ledger(lake)
    ledger.append_windows([_window(0, 0)])
    for first in range(0, 60_000, 10_000):
        ledger.append_windows([_window(start, start + 10) for start in range(first, first + 10_000, 10)])
        _published(ledger, first + 10_000)
    ledger.append_window(_window(60_000, 60_010, "prepared", tables=[_write(lake)]))
    old = [name for name, file in ledger._windows._named.items() if file.order < 50_000]
    assert old
    for name in old:
        Path(lake.ledger("windows"), name).unlink()
    fresh = Ledger(lake)
    assert fresh.frontier() == 60_000
    assert [window.key for window in fresh.prepared()] == [window_key(60_010)]
    fresh.append_window(_window(60_000, 60_010, tables=[_write(lake)]))
    assert fresh.frontier() == 60_010
    assert [window.end_lsn for window in fresh.windows(60_000)] == [60_010]
    _published(fresh, 60_010)
    published = fresh.publish()
    assert published is not None
    assert published.lsn == Ledger(lake).frontier() == 60_010
    with pytest.raises(LakeError, match="cannot follow"):
        _published(fresh, 60_000)
    with pytest.raises(LakeError, match="cannot be added"):
        fresh.append_window(_window(59_995, 60_005))


@pytest.mark.parametrize("published", [0, 100, 200, 300])
def test_the_frontier_is_the_same_whatever_was_published(lake: Lake, published: int) -> None:
    ledger = Ledger(lake)
    ledger.append_windows([_window(0, 0), _window(0, 100), _window(100, 200), _window(200, 300)])
    if published:
        _published(ledger, published)
    assert ledger.frontier() == 300
    ledger.prune_windows([window_key(100), window_key(200)])
    assert Ledger(lake).frontier() == 300
    ledger.append_windows([_window(300, 400, "prepared"), _window(400, 500)])
    assert Ledger(lake).frontier() == 300
    ledger.append_window(_window(300, 400))
    assert Ledger(lake).frontier() == 500
    ledger.append_window(_window(700, 700))
    assert Ledger(lake).frontier() == 700
    ledger.append_window(_window(700, 800))
    assert Ledger(lake).frontier() == 800


def test_a_publish_is_found_by_lsn_and_by_time(lake: Lake) -> None:
    ledger, noon = Ledger(lake), datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert ledger.publish_before(100) is None
    for number in (1, 2, 3):
        ledger.record_publish(Publish(number * 100, noon + timedelta(hours=number), {}))
    found = [ledger.publish_before(lsn) for lsn in (99, 100, 299, 1000)]
    assert [None if publish is None else publish.lsn for publish in found] == [None, 100, 200, 300]
    at = [ledger.publish_before(moment=noon + timedelta(minutes=minutes)) for minutes in (0, 60, 179, 999)]
    assert [None if publish is None else publish.lsn for publish in at] == [None, 100, 200, 300]


def test_a_window_of_an_older_version_does_not_know_its_newest_commits(lake: Lake) -> None:
    made = [
        _window(0, 10, tables=[_write(lake)]),
        _window(10, 20),
        _window(20, 30, tables=[_write(lake), _write(lake, TableName("a", "b"))]),
    ]
    rows = window_rows(made, lake, datetime.now(UTC))
    place = rows.schema.get_field_index("newest")
    older = rows.set_column(
        place, rows.schema.field(place), pa.array([None, *rows["newest"].to_pylist()[1:]], rows.schema.field(place).type)
    )
    assert [[write.newest_lsn for write in window.tables] for window in windows(older, lake)] == [[0], [], [90, 90]]
    assert [window.tables[-1].newest_at for window in windows(rows, lake) if window.tables] == [_write(lake).newest_at] * 2


def test_a_source_of_an_older_version_does_not_know_its_publication_nor_its_form() -> None:
    rows = source_rows(Source(1, 1, 5, "shop", "pgwal", "pgwal", publication_oid=7, format=FORMAT), datetime.now(UTC))
    for name in ("publication_oid", "format"):
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.nulls(1, pa.int64()))
    assert sources(rows) == [Source(1, 1, 5, "shop", "pgwal", "pgwal", publication_oid=0, format=1)]


def test_a_lake_that_a_newer_version_has_worked_on_is_refused(lake: Lake) -> None:
    source = Source(1, 1, 5, "shop", "pgwal", "pgwal")
    ledger = Ledger(lake)
    ledger.record_source(source)
    ledger.record_source(replace(source, format=FORMAT))
    assert Ledger(lake).tables() == {}
    ledger.record_source(replace(source, format=FORMAT + 1))
    for read in (Ledger(lake).source, Ledger(lake).tables):
        with pytest.raises(LakeError, match=f"A newer version of pgwal_pipeline .* form {FORMAT + 1}.*install that version again"):
            read()


def test_what_a_catalog_has_of_a_table_is_remembered(lake: Lake) -> None:
    ledger, moment = Ledger(lake), datetime(2026, 1, 31, tzinfo=UTC)
    assert ledger.registrations() == {}
    first = Registration(_ORDERS, None, "target", "tried", error="It is away.", failures=2, retry_at=moment, at=moment)
    ledger.record_registrations([first, replace(first, location=TableName("shop", "a"))])
    ledger.record_registrations([Registration(_ORDERS, "c.shop.order_lines", "target", "tried", "comments", at=moment)])
    found = Ledger(lake).registrations()
    assert found[_ORDERS] == Registration(_ORDERS, "c.shop.order_lines", "target", "tried", "comments", at=moment)
    assert found[TableName("shop", "a")] == replace(first, location=TableName("shop", "a"))

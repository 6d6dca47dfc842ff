import dagster as dg
import pytest

from pgwal_pipeline.asset_specs import AssetNames, AssetSpecs
from pgwal_pipeline.components import windows
from pgwal_pipeline.components.source import CdcSource
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.partitions import wal_windows
from pgwal_pipeline.pipeline.reports import TableCounts, WindowReport
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.components.instances import dagster_instance

_SOURCE = CdcSource("", Settings(), AssetSpecs(AssetNames("pgwal"), Lake("lake")), ())
_ORDERS, _LINES, _RARE = TableName("shop", "orders"), TableName("shop", "Order Lines"), TableName("shop", "rare")


def _window(number: int, *tables: TableName) -> WindowReport:
    counts = {_ORDERS: TableCounts()} | {table: TableCounts(rows=1, inserts=1) for table in tables}
    return WindowReport(window_key(number * 100 + 100), number * 100, number * 100 + 100, 1, 1, 1, {}, counts)


def _keys(instance: dg.DagsterInstance, table: TableName | None = None) -> list[str]:
    name = wal_windows("", None if table is None else str(table)).name
    assert name is not None
    return sorted(instance.get_dynamic_partitions(name))


def _expected(*numbers: int) -> list[str]:
    return [window_key(number * 100 + 100) for number in numbers]


def test_a_table_has_the_windows_in_which_it_has_rows_and_of_these_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_WINDOWS", 20)
    monkeypatch.setattr(windows, "_AT_ONCE", 4)
    with dagster_instance() as instance:
        windows.register(instance, _SOURCE, [_window(0, _RARE)])
        for number in range(1, 50):
            windows.register(instance, _SOURCE, [_window(number, *([_LINES] if number % 2 else []))])
        assert _keys(instance) == _expected(*range(30, 50))
        assert _keys(instance, _LINES) == _expected(*range(31, 50, 2))
        assert _keys(instance, _ORDERS) == []
        assert _keys(instance, _RARE) == _expected(0)  # nothing was written for a table that did not change
        windows.register(instance, _SOURCE, [_window(50, _RARE)])
        assert _keys(instance, _RARE) == _expected(50)
        # A long backlog at once: only the newest are registered at all.
        windows.register(instance, _SOURCE, [_window(number, _LINES) for number in range(51, 100)])
        assert _keys(instance) == _keys(instance, _LINES) == _expected(*range(80, 100))
        windows.register(instance, _SOURCE, [])
        assert len(_keys(instance)) == 20


def test_pruned_windows_go_from_the_jobs_and_from_every_table() -> None:
    with dagster_instance() as instance:
        windows.register(instance, _SOURCE, [_window(number, _LINES, _RARE) for number in range(6)])
        gone = frozenset(_expected(3))
        assert windows.delete(instance, _SOURCE, [_LINES, _RARE, _ORDERS], gone, window_key(200)) == 2
        assert _keys(instance) == _keys(instance, _LINES) == _keys(instance, _RARE) == _expected(1, 2, 4, 5)
        assert windows.delete(instance, _SOURCE, [_LINES], frozenset(), None) == 0

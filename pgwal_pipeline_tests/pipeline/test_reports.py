import json
from datetime import UTC, datetime

from pgwal_pipeline.pipeline.reports import (
    DrainReport,
    PublishReport,
    RunReport,
    SnapshotReport,
    SnapshotsReport,
    TableCounts,
    TablePublish,
    WindowReport,
    publish_json,
)
from pgwal_pipeline.values.relation import TableName

ORDERS, ODD = TableName("shop", "orders"), TableName("public", "Order Lines")
WINDOW = WindowReport(
    key="00000001000000FF",
    start_lsn=0x100000010,
    end_lsn=0x1000000FF,
    transactions=2,
    changes=3,
    bytes=400,
    seconds={"drain": 1.23456, "decode": 0.5, "write": 0.25},
    tables={ORDERS: TableCounts(rows=4, inserts=2, updates=1, key_changes=1)},
)
DRAIN = DrainReport(
    windows=(WINDOW,),
    tables={ORDERS: TableCounts(rows=4, inserts=2, updates=1, key_changes=1), ODD: TableCounts()},
    warnings=("careful",),
    seconds={"drain": 1.23456, "decode": 0.5, "write": 0.25},
)
PUBLISH = PublishReport(
    lsn=0x1000000FF,
    published_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    tables={
        ORDERS: TablePublish("/lake/orders", 7, 3),
        ODD: TablePublish("", None, 0, errors=('public."Order Lines" lost a value.',)),
    },
    warnings=("careful",),
    seconds={"session": 6.0, "publish": 2.0},
)


def test_a_command_prints_what_its_steps_left() -> None:
    snapshots = SnapshotsReport((SnapshotReport(ORDERS, 10, 100, 2, 3.0, 50.0), SnapshotReport(ODD, 1, 10, 1, 1.0, 52.5))).to_json()
    report = RunReport.join([snapshots, DRAIN.to_json(), publish_json(PUBLISH)])
    printed = json.loads(json.dumps(report.to_json(12.3456)))
    assert printed == {
        "windows": [
            {
                "key": "00000001000000FF",
                "start_lsn": "1/10",
                "end_lsn": "1/FF",
                "transactions": 2,
                "changes": 3,
                "bytes": 400,
                "seconds": 1.235,
            }
        ],
        "changes": 3,
        "snapshots": [
            {"table": "shop.orders", "rows": 10, "chunks": 2, "seconds": 3.0},
            {"table": 'public."Order Lines"', "rows": 1, "chunks": 1, "seconds": 1.0},
        ],
        "publish": {
            "lsn": "1/FF",
            "published_at": "2026-01-02T03:04:05+00:00",
            "tables": {"shop.orders": {"path": "/lake/orders", "version": 7}},
        },
        "warnings": ["careful"],
        "seconds": {"drain": 1.235, "decode": 0.5, "write": 0.25, "snapshot": 3.5, "session": 6.0, "publish": 2.0, "total": 12.346},
    }
    assert report.errors == {'public."Order Lines"': 'public."Order Lines" lost a value.'}


def test_nothing_done_and_nothing_published() -> None:
    assert PublishReport(lsn=None, published_at=None, tables={}).to_json() is None
    printed = RunReport.join([]).to_json(0.5)
    assert printed["publish"] is None
    assert printed["windows"] == printed["snapshots"] == printed["warnings"] == []
    assert printed["seconds"]["total"] == 0.5


def test_several_drains_add_up_and_the_last_publish_stands() -> None:
    report = RunReport.join([DRAIN.to_json(), publish_json(PUBLISH), DRAIN.to_json(), {"publish": None, "errors": {}}])
    printed = report.to_json(1.0)
    assert printed["changes"] == 6
    assert printed["seconds"]["drain"] == 2.47
    assert printed["publish"]["lsn"] == "1/FF"
    assert report.errors == {}

"""What a lake's age costs: a drain, a publish and a status after ten windows, and after ten thousand."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from bench.report import Measure, Result
from bench.source import PUBLICATION, make_database, make_tables, server, values
from pgwal_pipeline.lake import rows
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Window
from pgwal_pipeline.lake.log import RowLog
from pgwal_pipeline.lake.records import Publish, TableWrite
from pgwal_pipeline.lake.standing import FENCE
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.drain import bootstrap, drain
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.snapshot import snapshot
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.spark.session import spark_session
from pgwal_pipeline.values.lsn import window_key
from pgwal_pipeline.values.own_columns import WINDOW
from pgwal_pipeline.values.relation import TableName

_TABLES = 10
_CHANGED = 2  # tables with rows in each window
_ROWS = 1000
_STEP = 512  # bytes of WAL that each window made here stands for
_BATCH = 50  # windows a commit of the ledger
_EVERY = 60.0  # seconds from window to window


def by_age(counts: tuple[int, int], rounds: int) -> Result:
    """Measure the same drain, publish and status after each number of windows in `counts`, in one warm session."""
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    with server() as postgres, tempfile.TemporaryDirectory() as folder:
        lakes = {count: _lake(make_database(postgres, f"w{count}"), Path(folder, str(count)), count) for count in counts}
        spark = spark_session(lakes[counts[0]])
        for settings in lakes.values():
            _round(settings, lambda: spark, -1)
        timed: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for number in range(rounds):
            for count, settings in lakes.items():
                timed[count].append(_round(settings, lambda: spark, number))
        found = {count: {what: tuple(times[what] for times in timed[count]) for what in timed[count][0]} for count in counts}
        spark.stop()
    measures = tuple(Measure(f"{what} after {count:,} windows", "s", times) for count in counts for what, times in found[count].items())
    few, many = ({measure.what.split()[0]: measure.median for measure in measures if f" {count:,} " in measure.what} for count in counts)
    return Result(
        "windows",
        f"a change of {_CHANGED} of {_TABLES} tables after {counts[0]:,} and {counts[1]:,} windows",
        measures,
        max(many[what] / few[what] for what in few),
        f"the largest of the ratios {counts[1]:,} windows / {counts[0]:,} windows",
        {what: f"{many[what] / few[what]:.2f}" for what in few},
    )


def _round(settings: Settings, spark: Callable[[], Any], number: int) -> dict[str, float]:
    with plain_session(settings.dsn) as conn:
        for table in range(_CHANGED):
            conn.execute(f"UPDATE t{table:02d} SET note = 'round {number}' WHERE id <= 20".encode())
    return {
        "drain": _seconds(lambda: drain(settings, progress=Silent())),
        "publish": _seconds(lambda: publish(settings, spark, progress=Silent())),
        "status": _seconds(lambda: status(settings)),
    }


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _lake(dsn: str, folder: Path, windows: int) -> Settings:
    """Make a lake that has had `windows` windows, each with rows of some tables, and a publish after each."""
    tables = make_tables(dsn, _TABLES)
    settings = Settings.from_environment({}, source_dsn=dsn, lake=str(folder), slot=f"w{windows}", publication=PUBLICATION, spark_idle=0)
    with plain_session(dsn) as conn:
        for table in tables:
            conn.execute(f"INSERT INTO {table} SELECT {values('n')} FROM generate_series(1::bigint, {_ROWS}) n".encode())
    spark = spark_session(settings)
    bootstrap(settings, progress=Silent())
    snapshot(settings, progress=Silent())
    with plain_session(dsn) as conn:
        for table in tables[:_CHANGED]:
            conn.execute(f"UPDATE {table} SET note = 'first' WHERE id <= 20".encode())
    drain(settings, progress=Silent())
    publish(settings, lambda: spark, progress=Silent())
    _age(settings, windows)
    drain(settings, progress=Silent())
    publish(settings, lambda: spark, progress=Silent())
    return settings


def _age(settings: Settings, windows: int) -> None:
    """Add windows, each with copies of the newest real window's rows and a publish, as if one had come a minute for all the time before."""
    ledger = Ledger(Lake(settings.lake))
    model = next(window for window in reversed(ledger.windows()) if window.tables)
    publish, frontier = ledger.publish(), ledger.frontier()
    assert publish is not None
    assert frontier is not None
    _write_wal(settings.dsn, frontier + _STEP * windows)
    began = datetime.now(UTC) - timedelta(seconds=_EVERY * windows)
    made = [
        replace(
            model,
            key=window_key(frontier + _STEP * (number + 1)),
            start_lsn=frontier + _STEP * number,
            end_lsn=frontier + _STEP * (number + 1),
            marks=(),
            at=began + timedelta(seconds=_EVERY * number),
        )
        for number in range(windows)
    ]
    for write in model.tables:
        _add_files(write.path, model.key, made)
    for write in model.tables:
        _move_on(publish, write, made)
    publishes = RowLog(ledger.lake, "publishes", rows.PUBLISHES, ["lsn"])
    remaining = iter(made)
    while batch := list(islice(remaining, _BATCH)):
        ledger.append_windows(batch)
        named = [rows.publish_rows(Publish(one.end_lsn, one.at or began, publish.tables), ledger.lake) for one in batch]
        publishes.append(lambda _, named=named: pa.concat_tables(named))


def _write_wal(dsn: str, end: int) -> None:
    """Have the source write WAL up to `end`, so that it is past what the windows stand for."""
    with plain_session(dsn) as conn:
        while int(conn.execute(b"SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchall()[0][0]) < end:
            conn.execute(b"SELECT pg_switch_wal()")
            conn.execute(b"SELECT txid_current()")


def _add_files(raw: str, key: str, windows: Sequence[Window]) -> None:
    """Add a file to a raw table for each window, in a commit of its own: the file of the window `key` again."""
    before = DeltaTable(raw).version()
    actions = _actions(raw, before)
    add = next(action["add"] for action in actions if "add" in action and action["add"]["partitionValues"][WINDOW] == key)
    for version, window in enumerate(windows, before + 1):
        path = f"{WINDOW}={window.key}/{PurePosixPath(add['path']).name}"
        Path(raw, path).parent.mkdir()
        Path(raw, path).hardlink_to(Path(raw, add["path"]))
        added = {"add": add | {"path": path, "partitionValues": {WINDOW: window.key}}}
        _write_commit(raw, version, [added, _mark("pgwal_windows", version - 1)], window)
    _tidy(raw, before, before + len(windows) - 400, windows)


def _move_on(publish: Publish, write: TableWrite, windows: Sequence[Window]) -> None:
    """Add a commit to a current table for each window, which moves its LSN on."""
    current = publish.tables[TableName.parse(write.table)].path
    before = DeltaTable(current).version()
    for version, window in enumerate(windows, before + 1):
        _write_commit(current, version, [_mark(FENCE, window.end_lsn)], window)
    _tidy(current, before, before, windows)


def _actions(table: str, version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(table, f"_delta_log/{version:020}.json").read_text().splitlines()]


def _mark(name: str, version: int) -> dict[str, Any]:
    return {"txn": {"appId": name, "version": version, "lastUpdated": int(time.time() * 1000)}}


def _write_commit(table: str, version: int, actions: Sequence[dict[str, Any]], window: Window) -> None:
    assert window.at is not None
    about = {"commitInfo": {"timestamp": int(window.at.timestamp() * 1000), "operation": "WRITE", "operationParameters": {}}}
    path = Path(table, f"_delta_log/{version:020}.json")
    path.write_text("".join(json.dumps(action) + "\n" for action in (about, *actions)))
    _set_time(path, window)


def _set_time(path: Path, window: Window) -> None:
    assert window.at is not None
    os.utime(path, (window.at.timestamp(), window.at.timestamp()))


def _tidy(table: str, before: int, checkpointed: int, windows: Sequence[Window]) -> None:
    """Write a checkpoint of the version `checkpointed` and one of the newest, and remove the commits that are too old.

    Commits up to the version `before` are given the age of the first window. A real table has a checkpoint every few commits.
    """
    log = Path(table, "_delta_log")
    for version in range(before + 1):
        _set_time(log / f"{version:020}.json", windows[0])
    if checkpointed > before:
        DeltaTable(table, version=checkpointed).create_checkpoint()
        for path in log.glob(f"{checkpointed:020}.checkpoint*"):
            _set_time(path, windows[checkpointed - before - 1])
    DeltaTable(table).create_checkpoint()
    DeltaTable(table).cleanup_metadata()

import io
import logging

import pytest

from pgwal_pipeline import progress


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    caplog.set_level(logging.INFO, "of_a_run")
    return logging.getLogger("of_a_run")


def test_a_log_gets_the_first_line_of_a_stage_and_its_last(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    shown = progress.DagsterLog(log)
    for done in range(1001):
        shown.stage("read", done, 1000, "rows")
        shown.stage("other", done, None, "chunks")
    assert caplog.messages == ["read: 0 of 1,000 rows", "other: 0 chunks", "read: 1,000 of 1,000 rows"]


def test_a_log_gets_a_line_now_and_then(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    shown = progress.DagsterLog(log, every_seconds=0.0)
    for done in range(3):
        shown.stage("read", done, 10, "rows")
    assert len(caplog.messages) == 3


def test_bytes_are_shown_as_sizes(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    shown = progress.DagsterLog(log)
    shown.stage("drain", 1536 << 10, 3 << 30, "bytes of WAL")
    shown.stage("copy", 512, None, "bytes")
    assert caplog.messages == ["drain: 1.5 MB of 3.0 GB of WAL", "copy: 512 B"]


def test_long_work_tells_its_pace_and_what_is_left(
    log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = progress.DagsterLog(log, every_seconds=0.0)
    shown.stage("read", 500, 10_500, "rows")
    now += 2.0
    shown.stage("read", 2_500, 10_500, "rows")
    shown.stage("drain", 0, None, "bytes of WAL")
    now += 4.0
    shown.stage("drain", 8 << 20, None, "bytes of WAL")
    assert caplog.messages == [
        "read: 500 of 10,500 rows",
        "read: 2,500 of 10,500 rows, 1,000 rows/s, 8 s left",
        "drain: 0 B of WAL",
        "drain: 8.0 MB of WAL, 2.0 MB/s",
    ]


def test_slow_work_tells_the_seconds_that_one_takes(
    log: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = progress.DagsterLog(log, every_seconds=0.0)
    shown.stage("publish", 0, 5, "tables")
    now += 8.0
    shown.stage("publish", 2, 5, "tables")
    shown.stage("drain", 0, None, "bytes of WAL")
    now += 10.0
    shown.stage("drain", 5, None, "bytes of WAL")
    assert caplog.messages == [
        "publish: 0 of 5 tables",
        "publish: 2 of 5 tables, 4.0 s each, 12 s left",
        "drain: 0 B of WAL",
        "drain: 5 B of WAL, 0 B/s",
    ]


def test_warnings_are_noted_once(log: logging.Logger) -> None:
    noted = progress.Noted(progress.DagsterLog(log))
    for text in ("one", "two", "one"):
        noted.warn(text)
    assert noted.warnings == ("one", "two")


def test_warnings_and_lines(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    shown = progress.DagsterLog(log)
    shown.warn("look out")
    shown.say("done")
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "look out"), ("INFO", "done")]


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    stream = io.StringIO()
    with progress.Terminal(stream) as shown:
        for done in range(100):
            shown.stage("snapshot of public.a", done, 99, "chunks")
        shown.warn("a [b] is not markup")
        shown.say("done")
    assert stream.getvalue().splitlines() == [
        "snapshot of public.a: 0 of 99 chunks",
        "snapshot of public.a: 99 of 99 chunks",
        "warning: a [b] is not markup",
        "done",
    ]


def test_a_run_of_this_process_is_shown_to_who_watches(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with progress.watched_by(progress.Terminal(stream)):
        progress.for_run(log).say("both")
    progress.for_run(log).say("log alone")
    assert stream.getvalue() == "both\n"
    assert caplog.messages == ["both", "log alone"]

"""A sync while nothing has been committed: it needs no Dagster run, and loading Dagster would take longer than all of its work."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pgwal_pipeline.known_tables import state_path
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline import publish as publishes
from pgwal_pipeline.pipeline import snapshot as snapshots
from pgwal_pipeline.pipeline.reports import LagReading, publish_json
from pgwal_pipeline.pipeline.status import lag, publish_due
from pgwal_pipeline.settings import Settings

_MOST_WAL = 16 << 20  # bytes; more than that is read in a run that Dagster shows


class _SparkIsNeeded(Exception):
    pass


@dataclass(frozen=True)
class QuietSync:
    """What was done without a run: the steps' JSON, and whether that was all there is to do.

    `windows` are the end LSNs of windows with changes: they came just as the sync began, and Dagster does not know them yet.
    """

    parts: tuple[dict[str, Any], ...] = ()
    done: bool = False
    windows: tuple[int, ...] = ()


def sync(settings: Settings, *, progress: Progress) -> QuietSync:
    """Drain and publish if the source shows that nothing was committed since the last drain, else do nothing."""
    ledger = Ledger(Lake(settings.lake))
    remembered = _remembered(settings)
    if remembered is None or ledger.frontier() is None:
        return QuietSync()
    try:
        target, reading = drains.next_target(settings), lag(settings)
    except SourceUnavailable:
        return QuietSync()
    if not _is_quiet(reading, remembered):
        return QuietSync()
    drained = drains.drain(settings, end_lsn=target, progress=progress)
    came = tuple(window.end_lsn for window in drained.windows if window.changes)
    if came or snapshots.needed(settings) or publish_due(ledger):
        return QuietSync(windows=came)
    try:
        report = publishes.publish(settings, _no_spark, progress=progress)
    except _SparkIsNeeded:
        return QuietSync()
    return QuietSync((drained.to_json(), publish_json(report)), done=True)


def remember(settings: Settings, reading: LagReading) -> None:
    """Keep what the source showed before it was drained. A file that cannot be written costs the next sync a second."""
    with suppress(OSError):
        path = _path(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([reading.snapshot, reading.insert_lsn]), encoding="utf-8")


def _is_quiet(reading: LagReading, remembered: tuple[str, int]) -> bool:
    """Return whether no commit is unread: the slot has read all of that time, and no transaction has ended or begun to write since."""
    snapshot, insert_lsn = remembered
    confirmed = reading.confirmed_flush_lsn
    return (
        confirmed is not None
        and confirmed >= insert_lsn
        and reading.snapshot == snapshot
        and reading.lag_bytes < _MOST_WAL
        and not reading.publish_due
    )


def _remembered(settings: Settings) -> tuple[str, int] | None:
    try:
        snapshot, insert_lsn = json.loads(_path(settings).read_text(encoding="utf-8"))
        return str(snapshot), int(insert_lsn)
    except (OSError, ValueError, TypeError):
        return None


def _path(settings: Settings) -> Path:
    tables = state_path(settings)
    return tables.with_name(tables.name.replace("tables-", "reading-", 1))


def _no_spark() -> NoReturn:
    raise _SparkIsNeeded

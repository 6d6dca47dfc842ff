from dataclasses import replace

import dagster as dg
import pytest

from pgwal_pipeline.components.checks import judge_health
from pgwal_pipeline.pipeline.reports import LagReading

WELL = LagReading(
    slot_exists=True, lag_bytes=2048, confirmed_flush_lsn=1, flush_lsn=2049, insert_lsn=2049, snapshot="1:1:", wal_status="reserved"
)
ERROR, WARN = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN


def test_a_slot_that_keeps_up_is_well() -> None:
    verdict = judge_health("s", WELL, 0.0)
    assert verdict.passed
    assert verdict.sentence == "Slot s is 2,048 bytes behind."
    assert verdict.metadata == {"pgwal/wal_status": "reserved", "pgwal/lag_bytes": 2048, "pgwal/wal_bytes_per_second": 0}


@pytest.mark.parametrize(
    ("reading", "rate", "severity", "says"),
    [
        (replace(WELL, slot_exists=False), None, WARN, "The next sync creates it. If the lake already holds changes"),
        (replace(WELL, slot_exists=False), None, WARN, "PGWAL_ON_SLOT_LOSS is stop, run `pgwal resnapshot --all`"),
        (replace(WELL, wal_status="lost"), 1.0, ERROR, "pgwal resnapshot --all"),
        (replace(WELL, wal_status="unreserved"), 1.0, ERROR, "drain it now"),
        (replace(WELL, wal_status="extended", safe_wal_size=600 << 20), float(1 << 20), WARN, "lost in 10 min"),
    ],
)
def test_what_is_wrong_and_what_to_do(reading: LagReading, rate: float | None, severity: dg.AssetCheckSeverity, says: str) -> None:
    verdict = judge_health("s", reading, rate)
    assert not verdict.passed
    assert verdict.severity == severity
    assert says in verdict.sentence


def test_time_left_is_told_where_the_server_bounds_the_slot() -> None:
    verdict = judge_health("s", replace(WELL, safe_wal_size=1 << 30), 1024.0)
    assert verdict.passed
    assert verdict.metadata["pgwal/seconds_to_invalidation"] == 1 << 20
    assert "pgwal/seconds_to_invalidation" not in judge_health("s", replace(WELL, safe_wal_size=1 << 30), 0.0).metadata

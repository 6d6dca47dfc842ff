"""Which publish is found by an LSN or a time."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, Publish, TablePointer
from pgwal_pipeline.messages.errors import LakeError, SettingError
from pgwal_pipeline.pipeline.as_of import find_publish
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ORDERS = TableName("shop", "orders")


@pytest.fixture
def empty(tmp_path: Path) -> Settings:
    return Settings.from_environment({}, lake=str(tmp_path / "lake"))


@pytest.fixture
def published(empty: Settings) -> Settings:
    """Publishes at 0/100 on the 31st at noon, 0/200 an hour later, 0/300 an hour after that."""
    lake = Lake(empty.lake)
    for number in range(3):
        pointers = {ORDERS: TablePointer(lake.current(ORDERS), number)}
        Ledger(lake).record_publish(Publish(0x100 * (number + 1), NOON + timedelta(hours=number), pointers))
    return empty


@pytest.mark.parametrize(
    ("when", "lsn"),
    [
        ("latest", "0/300"),
        ("0/300", "0/300"),
        ("FF/0", "0/300"),
        ("0/2FF", "0/200"),
        ("0/100", "0/100"),
        ("2026-01-31T13:00:00Z", "0/200"),
        ("2026-01-31T12:59:59.999999Z", "0/100"),
        ("2026-01-31T13:30:00", "0/200"),
        ("2026-01-31T15:30:00+02:00", "0/200"),
        ("2026-02-01", "0/300"),
    ],
)
def test_the_newest_at_or_before(when: str, lsn: str, published: Settings) -> None:
    assert find_publish(published, when)["lsn"] == lsn


def test_what_is_told_of_it(published: Settings) -> None:
    found = find_publish(published, "0/200")
    assert datetime.fromisoformat(found["published_at"]) == NOON + timedelta(hours=1)
    assert found["tables"] == {"shop.orders": {"path": Lake(published.lake).current(ORDERS), "version": 1}}


@pytest.mark.parametrize("when", ["0/FF", "2026-01-31T11:59:59Z", "2026-01-31"])
def test_before_the_oldest(when: str, published: Settings) -> None:
    with pytest.raises(LakeError, match="the oldest publish in the lake is from 2026-01-31T12:00:00"):
        find_publish(published, when)


@pytest.mark.parametrize("when", ["", "newest", "16/", "G/1", "2026-02-30"])
def test_what_is_neither(when: str, published: Settings) -> None:
    with pytest.raises(SettingError, match="is not latest, an LSN such as"):
        find_publish(published, when)


def test_nothing_is_published_yet(empty: Settings) -> None:
    with pytest.raises(LakeError, match="run `pgwal sync` first"):
        find_publish(empty)

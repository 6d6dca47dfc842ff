"""Describe a publish that is found by LSN or time."""

from typing import Any

from pgwal_pipeline.lake.as_of import publish_as_of
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.pipeline.status import publish_report
from pgwal_pipeline.settings import Settings


def find_publish(settings: Settings, when: str = "latest") -> dict[str, Any]:
    """Return the newest publish at or before `when` as `pgwal as-of --json` prints it; see `publish_as_of`."""
    answer = publish_report(publish_as_of(Ledger(Lake(settings.lake)), when)).to_json()
    assert answer is not None
    return answer

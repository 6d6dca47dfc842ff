"""Find a publish in the ledger by LSN or time."""

from datetime import UTC, datetime

from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import Publish
from pgwal_pipeline.messages.errors import LakeError, SettingError
from pgwal_pipeline.values.lsn import parse_lsn

LATEST = "latest"
"""What stands for the newest publish."""


def publish_as_of(ledger: Ledger, when: str = LATEST) -> Publish:
    """Return the newest publish at or before `when`: `latest`, an LSN as `X/Y`, or an ISO 8601 time (UTC if it has no offset).

    Raises SettingError if `when` is none of these, LakeError if nothing was published by then.
    """
    newest = ledger.publish()
    if newest is None:
        raise LakeError(f"Nothing has been published in the lake {ledger.lake.uri} yet; run `pgwal sync` first.")
    found = newest if when == LATEST else _before(ledger, when)
    if found is None:
        oldest = ledger.publishes()[0].published_at.isoformat()
        raise LakeError(f"Nothing was published at or before {when}; the oldest publish in the lake is from {oldest}.")
    return found


def _before(ledger: Ledger, when: str) -> Publish | None:
    at = parse_when(when)
    if at is None:
        raise SettingError(f"{when!r} is not latest, an LSN such as 16/B374D848 or a time such as 2026-01-31T12:00:00Z.")
    return ledger.publish_before(at) if isinstance(at, int) else ledger.publish_before(moment=at)


def parse_when(when: str) -> int | datetime | None:
    """Return an LSN as an integer, or an ISO 8601 time (UTC if it has no offset); None if `when` is neither."""
    try:
        return parse_lsn(when)
    except ValueError:
        pass
    try:
        return with_offset(datetime.fromisoformat(when))
    except ValueError:
        return None


def with_offset(moment: datetime) -> datetime:
    """Return a time as an aware one: UTC if it has no offset."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

"""When a slot that nobody reads is lost."""

import pytest

from pgwal_pipeline.postgres.slot_loss import seconds_to_loss


@pytest.mark.parametrize(
    ("room", "rate", "seconds"),
    [
        (7_200_000, 1000.0, 7200.0),
        (-5, 10.0, 0.0),  # past the limit already
        (None, 1000.0, None),
        (600_000, 0.0, None),
        (600_000, -10.0, None),  # drained faster than it is written
        (600_000, None, None),
    ],
)
def test_seconds_to_loss(room: int | None, rate: float | None, seconds: float | None) -> None:
    assert seconds_to_loss(room, rate) == seconds

"""Standbys that a slot waits for: from 17 on a failover slot goes no further than those of synchronized_standby_slots have confirmed."""

import time
from collections.abc import Callable
from contextlib import closing

import psycopg2

from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.postgres.dsn import connect, translate

_LOOK = 5.0  # seconds without getting any further before it is looked whether standbys hold the slot back
_HELD = 60.0  # the same, after which a slot that is held back is given up


def held_back(dsn: str, slot: str) -> str | None:
    """The server's synchronized_standby_slots, where `slot` is held back until the standbys of those have the WAL to there; else None.

    Asked over a connection of its own. Raises SourceUnavailable.
    """
    with closing(connect(dsn)) as conn:
        try:
            row = conn.execute(
                "SELECT current_setting('synchronized_standby_slots', true) FROM pg_catalog.pg_replication_slots s "
                "JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid "
                "WHERE s.slot_name = %s AND a.wait_event = 'WaitForStandbyConfirmation'",
                [slot],
            ).fetchone()
        except psycopg2.Error as error:
            raise translate(error, f"looking at what slot {slot} waits for") from error
    return None if row is None else str(row[0])


class HeldBack:
    """Notices a slot that gets no further because standbys have not confirmed the WAL to there, however often the server says it lives."""

    def __init__(self, dsn: str, slot: str, warn: Callable[[str], None]) -> None:
        self._dsn = dsn
        self._slot = slot
        self._warn = warn
        self.moved()

    def moved(self) -> None:
        """It got further."""
        self._since = self._looked = time.monotonic()

    def stands(self) -> None:
        """It did not; to be called now and then. Warns after 5 s of being held back, raises SourceUnavailable after 60 s."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        first, self._looked = self._looked == self._since, now
        standbys = held_back(self._dsn, self._slot)
        if standbys is None:
            return
        why = (
            f"The source goes no further with slot {self._slot} until the standbys of synchronized_standby_slots ({standbys}) have "
            f"confirmed the WAL to there, which they do not"
        )
        if now - self._since > _HELD:
            raise SourceUnavailable(f"{why}: bring them back, or take them out of synchronized_standby_slots, and run it again.")
        if first:
            self._warn(f"{why}; waiting for {_HELD:.0f} s.")

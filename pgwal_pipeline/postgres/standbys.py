"""Notice a slot that waits for standbys: from 17 on a failover slot only advances to what synchronized_standby_slots have confirmed."""

import time
from collections.abc import Callable
from contextlib import closing

import psycopg2

from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.postgres.dsn import connect, translate

_CHECK_EVERY = 5.0  # seconds without progress before each check whether standbys hold the slot back
_HELD = 60.0  # seconds without progress after which waiting for standbys ends with an error


def held_back(dsn: str, slot: str) -> str | None:
    """Return the server's synchronized_standby_slots if `slot` waits for their standbys to confirm the WAL; else None.

    Uses a connection of its own. Raises SourceUnavailable.
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
            raise translate(error, f"finding out what slot {slot} waits for") from error
    return None if row is None else str(row[0])


class HeldBack:
    """Notices that a slot does not advance because standbys have not confirmed the WAL, even if the server keeps sending keepalives."""

    def __init__(self, dsn: str, slot: str, warn: Callable[[str], None]) -> None:
        self._dsn = dsn
        self._slot = slot
        self._warn = warn
        self.moved()

    def moved(self) -> None:
        """Record that the slot has advanced."""
        self._since = self._checked = time.monotonic()

    def stands(self) -> None:
        """Record that the slot has not advanced; call it now and then. Warns after 5 s held back, raises SourceUnavailable after 60 s."""
        now = time.monotonic()
        if now - self._checked < _CHECK_EVERY:
            return
        first, self._checked = self._checked == self._since, now
        standbys = held_back(self._dsn, self._slot)
        if standbys is None:
            return
        why = (
            f"Slot {self._slot} does not advance, because the standbys in synchronized_standby_slots ({standbys}) have not confirmed "
            f"the WAL up to there"
        )
        if now - self._since > _HELD:
            raise SourceUnavailable(f"{why}: bring them back, or take them out of synchronized_standby_slots, and run it again.")
        if first:
            self._warn(f"{why}; waiting for {_HELD:.0f} s.")

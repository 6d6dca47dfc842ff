"""Watch a slot while tables are read: past max_slot_wal_keep_size the slot is lost, and the tables would have to be read again."""

import time
from dataclasses import dataclass

from pgwal_pipeline.messages.amounts import duration
from pgwal_pipeline.messages.errors import SlotLost
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.postgres import slot
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.slot import SlotState
from pgwal_pipeline.postgres.slot_loss import seconds_to_loss

_CHECK_EVERY = 2.0  # seconds
_WARN_AT = 0.5  # share of the WAL that may be kept
_WARN_EVERY = 60.0  # seconds


@dataclass
class SlotWatch:
    """Checks the slot `name` from time to time. To be used on one thread, which owns `conn`."""

    conn: Connection
    name: str
    progress: Progress
    _checked: float = 0.0
    _warned: float = float("-inf")
    _first: tuple[float, int] | None = None

    def check(self) -> None:
        """Check the slot if a check is due. Raises SlotLost if it is gone or the server has invalidated it.

        Warns once it keeps more than half of the WAL that it may keep, with the time left at the rate since the first check.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_EVERY:
            return
        self._checked = now
        state = slot.inspect(self.conn, self.name)
        if state is None:
            raise SlotLost(
                f"Slot {self.name} was dropped while tables were read, and the changes since are lost. Run `pgwal resnapshot --all` to "
                f"make it anew and read every table again."
            )
        slot.require_usable(state, self.conn.info.dbname)
        self._judge(state, now)

    def _judge(self, state: SlotState, now: float) -> None:
        if state.safe_wal_size is None or state.restart_lsn == 0:
            return
        end = state.confirmed_flush_lsn + state.lag_bytes
        kept = max(0, end - state.restart_lsn)
        self._first = self._first or (now, end)
        share = kept / max(1, kept + max(0, state.safe_wal_size))
        if share < _WARN_AT or now - self._warned < _WARN_EVERY:
            return
        self._warned = now
        elapsed, written = now - self._first[0], end - self._first[1]
        seconds = seconds_to_loss(state.safe_wal_size, written / elapsed if elapsed > 0 else None)
        left = "when more is written" if seconds is None else f"in {duration(seconds)} at the present rate"
        self.progress.warn(
            f"Slot {self.name} keeps {share:.0%} of the WAL that the source allows it, and is lost {left}: "
            f"drain it (`pgwal drain`), or raise max_slot_wal_keep_size."
        )

"""Transactions: what tells one from another, and which of them a snapshot sees, as `pg_current_snapshot()` tells it."""

from dataclasses import dataclass

_WRAP = 1 << 32


@dataclass(frozen=True, slots=True)
class TransactionMark:
    """What tells a transaction from every other at its place: commit LSN, 32-bit xid, and time of commit in microseconds since 1970 UTC."""

    commit_lsn: int
    xid: int
    committed_at: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions had ended at one moment: all below `low`, and those below `high` but for `running`. All ids have 64 bits."""

    low: int
    high: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Read `xmin:xmax:xip,xip`."""
        low, high, running = text.split(":")
        return cls(int(low), int(high), frozenset(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid: int) -> bool:
        """Whether the committed transaction `xid`, of which the lower 32 bits are given, is visible."""
        full = self.widened(xid)
        return full < self.low or (full < self.high and full not in self.running)

    def widened(self, xid: int) -> int:
        """The 64 bits of a transaction of which 32 are known, being at most 2³¹ away from this snapshot's."""
        distance = (xid - self.high) % _WRAP
        return self.high + (distance - _WRAP if distance >= _WRAP // 2 else distance)

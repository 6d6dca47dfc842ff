"""Identify transactions, and tell which of them a snapshot from `pg_current_snapshot()` sees."""

from dataclasses import dataclass

_WRAP = 1 << 32


@dataclass(frozen=True, slots=True)
class TransactionMark:
    """What identifies a transaction: commit LSN, 32-bit xid, and time of commit in microseconds since 1970 UTC."""

    commit_lsn: int
    xid: int
    committed_at: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions had ended at one moment: all below `low`, and those below `high` except `running`. All xids have 64 bits."""

    low: int
    high: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Read `xmin:xmax:xip,xip`, the text form of Postgres."""
        low, high, running = text.split(":")
        return cls(int(low), int(high), frozenset(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid: int) -> bool:
        """Return whether the committed transaction with the 32-bit `xid` is visible."""
        full = self.widened(xid)
        return full < self.low or (full < self.high and full not in self.running)

    def widened(self, xid: int) -> int:
        """Return the 64-bit xid of a 32-bit one, which must be at most 2³¹ away from this snapshot's `high`."""
        distance = (xid - self.high) % _WRAP
        return self.high + (distance - _WRAP if distance >= _WRAP // 2 else distance)

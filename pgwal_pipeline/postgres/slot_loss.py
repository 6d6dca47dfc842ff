"""Estimate when a slot that nobody reads is lost: the server keeps only a limited amount of WAL for it (max_slot_wal_keep_size)."""

LEAST_NOTICE = 3600.0
"""If a slot is lost in fewer seconds than this, it is reported as unhealthy."""


def seconds_to_loss(safe_wal_size: int | None, bytes_per_second: float | None) -> float | None:
    """Return in how many seconds a slot is lost if the source writes `bytes_per_second` of WAL; None if there is no limit or no growth.

    `safe_wal_size` is the column of `pg_replication_slots`: the bytes of WAL that may still be written, None without a limit, negative once
    the limit has been passed.
    """
    if safe_wal_size is None or not bytes_per_second or bytes_per_second < 0:
        return None
    return max(0, safe_wal_size) / bytes_per_second

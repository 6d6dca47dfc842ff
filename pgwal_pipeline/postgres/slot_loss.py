"""When a slot is lost that nobody reads: the server keeps so much WAL for it and no more (max_slot_wal_keep_size)."""

LEAST_NOTICE = 3600.0
"""Seconds until a slot is lost below which it is no longer well."""


def seconds_to_loss(safe_wal_size: int | None, bytes_per_second: float | None) -> float | None:
    """Say in how many seconds a slot is lost while `bytes_per_second` of WAL are added to what it keeps.

    `safe_wal_size` is what may yet be added, in bytes, as `pg_replication_slots` has it: None where nothing limits it, negative where the
    limit has been passed already. None where nothing limits it or nothing is added.
    """
    if safe_wal_size is None or not bytes_per_second or bytes_per_second < 0:
        return None
    return max(0, safe_wal_size) / bytes_per_second

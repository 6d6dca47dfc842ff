"""Taking everything of ours off the source again."""

from pgwal_pipeline.postgres import publication, slot
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.settings import Settings


def drop(settings: Settings) -> list[str]:
    """Drop our slots and our publication; the lake stays. Returns what was there, as `slot NAME` or `publication NAME`.

    A publication that somebody else made stays. Raises SlotBusy while a drain reads the slot.
    """
    dropped = []
    with slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout), connect(settings.dsn) as conn:
        for name in slot.ours(conn, settings.slot):
            slot.drop(conn, name)
            dropped.append(f"slot {name}")
        if publication.drop(conn, settings.publication):
            dropped.append(f"publication {settings.publication}")
    return dropped

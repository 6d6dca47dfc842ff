"""Remove what the pipeline made on the source."""

from pgwal_pipeline.postgres import publication, slot
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.settings import Settings


def drop(settings: Settings) -> list[str]:
    """Drop our slot and our publication, and return what was dropped, as `slot NAME` or `publication NAME`. The lake stays.

    Copies of the slot end with the drain that made them. A publication that is not ours stays. Raises SlotBusy if a drain holds the slot
    for longer than PGWAL_BUSY_TIMEOUT, SourceRefused if a slot of that name is of another kind than ours.
    """
    dropped = []
    with slot.exclusive(settings.dsn, settings.slot, settings.busy_timeout), connect(settings.dsn) as conn:
        if (state := slot.inspect(conn, settings.slot)) is not None:
            slot.require_kind(state, conn.info.dbname)
        if slot.drop(conn, settings.slot):
            dropped.append(f"slot {settings.slot}")
        if publication.drop(conn, settings.publication):
            dropped.append(f"publication {settings.publication}")
    return dropped

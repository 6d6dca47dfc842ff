"""Read timelines: how much WAL a promoted server shares with the server before it."""

import psycopg2

from pgwal_pipeline.postgres.command import run
from pgwal_pipeline.postgres.dsn import replication_connection, translate
from pgwal_pipeline.values.lsn import parse_lsn


def left_at(dsn: str, old: int, new: int) -> int | None:
    """Return the LSN up to which timeline `new` has the WAL of timeline `old`; None if it does not descend from it.

    A timeline's history file has a line for each timeline before it: its number, the LSN at which it was left, and why. Raises the error
    that `translate` returns for a server error.
    """
    walsender = replication_connection(dsn)
    try:
        (_, history) = run(walsender, f"TIMELINE_HISTORY {new}").fetchall()[0]
    except psycopg2.Error as error:
        raise translate(error, f"reading the history of timeline {new}") from error
    finally:
        walsender.close()
    text = history if isinstance(history, str) else bytes(history).decode(errors="replace")  # text from 15 on, bytes before
    lines = (line.split("\t") for line in text.splitlines())
    return next((parse_lsn(parts[1].strip()) for parts in lines if len(parts) > 1 and parts[0].strip() == str(old)), None)

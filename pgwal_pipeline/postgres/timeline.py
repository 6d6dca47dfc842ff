"""Timelines: what the WAL of a server that was promoted has in common with that of the server before."""

import psycopg

from pgwal_pipeline.lsn import parse_lsn
from pgwal_pipeline.postgres.command import run
from pgwal_pipeline.postgres.dsn import replication_connection, translate


def left_at(dsn: str, old: int, new: int) -> int | None:
    """The LSN up to which timeline `new` has the WAL of timeline `old`; None where it does not come from it.

    A timeline's history file has a line for each one before it: its number, where it was left, and why. Raises what `translate` makes of
    the server's errors.
    """
    pgconn = replication_connection(dsn)
    try:
        history = run(pgconn, f"TIMELINE_HISTORY {new}").get_value(0, 1) or b""
    except psycopg.Error as error:
        raise translate(error, f"reading the history of timeline {new}") from error
    finally:
        pgconn.finish()
    lines = (line.split("\t") for line in history.decode(errors="replace").splitlines())
    return next((parse_lsn(parts[1].strip()) for parts in lines if len(parts) > 1 and parts[0].strip() == str(old)), None)

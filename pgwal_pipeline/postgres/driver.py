"""What the pipeline needs of psycopg2 beyond what it documents. Seen in 2.9.13; `test_driver` fails if it is gone."""

from psycopg2.extras import ReplicationCursor

from pgwal_pipeline.postgres.connection import ReplicationConnection

_BEYOND_ALL = (1 << 64) - 1


def reading_cursor(conn: ReplicationConnection) -> ReplicationCursor:
    """Return a cursor that reads a stream and never confirms anything by itself: it answers keepalives with LSN 0, which moves no slot.

    By default a cursor confirms a keepalive's LSN if the last message's own LSN is not past the one last given to `send_feedback`. But
    Relation messages have no LSN, and the LSNs of a long transaction are smaller than those of transactions that came before it: changes
    that were received but are not durable would be confirmed. The cursor never confirms a keepalive at or below the LSN last given. So the
    largest possible LSN is given here, and `__init__` then resets what would be sent, but not what was given. Confirm with another cursor
    of the connection.
    """
    cursor = conn.cursor()
    assert isinstance(cursor, ReplicationCursor)
    cursor.send_feedback(flush_lsn=_BEYOND_ALL)  # sends nothing
    cursor.__init__(conn)
    return cursor

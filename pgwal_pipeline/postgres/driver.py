"""What of psycopg2 is used beyond what it documents; seen in psycopg2 2.9.13."""

from psycopg2.extras import ReplicationCursor

from pgwal_pipeline.postgres.connection import ReplicationConnection

_BEYOND_ALL = (1 << 64) - 1


def reading_cursor(conn: ReplicationConnection) -> ReplicationCursor:
    """A cursor that reads a stream and by itself never confirms anything: what it answers to keepalives has the LSN 0, which moves no slot.

    A cursor as it comes takes a keepalive's LSN for confirmed while the last message's own LSN is not past what `send_feedback` was told
    last. But Relation messages have no LSN, and a long transaction's are smaller than those of transactions that came before it: what was
    received and is not durable would be confirmed. It does so for no keepalive at or below what was told last. That is told as large as
    can be here, and `__init__` then forgets what would be sent, but not what was told. Confirm by another cursor of the connection.
    """
    cursor = conn.cursor()
    assert isinstance(cursor, ReplicationCursor)
    cursor.send_feedback(flush_lsn=_BEYOND_ALL)  # sends nothing
    cursor.__init__(conn)
    return cursor

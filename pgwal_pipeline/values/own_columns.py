"""The names of the columns that the lake's tables have besides the source's."""

RESERVED = "_pgwal_"
"""The prefix of all of them. A column of the source may not begin with it."""

OP = "_pgwal_op"
COMMIT_LSN = "_pgwal_commit_lsn"
ORDINAL = "_pgwal_ordinal"
XID = "_pgwal_xid"
COMMITTED_AT = "_pgwal_committed_at"
UNCHANGED = "_pgwal_unchanged"
TEXT = "_pgwal_text"

WINDOW = "_pgwal_window"
"""The partition column of raw: the window's key."""

GENERATION = "_pgwal_generation"
"""The partition column of a snapshot table: the id of the generation that a row belongs to."""

CHANGE = "_pgwal_change"
FIRST_LSN = "_pgwal_first_lsn"
LAST_LSN = "_pgwal_last_lsn"
"""What net changes say of a key: `insert`, `update` or `delete`, and the LSNs of its first and its last commit."""

DELETED_AT = "_pgwal_deleted_at"
DELETED_LSN = "_pgwal_deleted_lsn"
"""When a row that `current` keeps was deleted: the commit time and the commit LSN. Both are null for living rows."""

CHUNK = "_pgwal_chunk"
"""The id of the attempt at a chunk that wrote a row of a snapshot table."""

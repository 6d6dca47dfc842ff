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

VALID_FROM_LSN = "_pgwal_valid_from_lsn"
VALID_FROM = "_pgwal_valid_from"
VALID_TO_LSN = "_pgwal_valid_to_lsn"
VALID_TO = "_pgwal_valid_to"
"""Where and when a version in a history began and ended: commit LSNs and commit times, null while it is the newest."""

END_OP = "_pgwal_end_op"
"""The kind of change that ended a version; what began it is in `_pgwal_op`."""

OLD_KEY = "_pgwal_old_key"
"""The key, as JSON, that a row had before the change of its key that began a version."""

UNSEEN = "_pgwal_unseen"
"""True for a version of which the beginning or the end was found by reading the table again, not in the stream."""

OPEN = "_pgwal_open"
"""The partition column of a history: true for versions that have not ended."""

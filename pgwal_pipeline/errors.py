"""The errors a user may meet: each is one sentence that says what happened, to what, and what to do."""

from pgwal_pipeline.printable import printable


class PgwalError(Exception):
    """Something the pipeline cannot go on from; the message is the whole explanation.

    `exit_code` is what `pgwal` ends with. `transient` says that the same work may succeed when tried again. Names in the message may hold
    anything; what would act on a terminal is written out.
    """

    exit_code = 1
    transient = False

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class SettingError(PgwalError):
    """A wrong or missing setting; names the variable and what it takes."""

    exit_code = 2


class SourceUnavailable(PgwalError):
    """The source cannot be reached now, or the connection to it broke."""

    transient = True


class SourceRefused(PgwalError):
    """The source is reached but is not as it must be: a privilege, `wal_level`, a missing table, a full slot table."""


class SlotBusy(PgwalError):
    """Another drain holds the slot; names who."""

    transient = True


class SlotLost(PgwalError):
    """The slot is gone, lost, or stands where the lake has no rows for: a gap that only a new snapshot can close."""


class PublicationMissing(SlotLost):
    """The publication was not there at a point of the WAL that the slot has still to read."""


class BlockedByTransaction(PgwalError):
    """Others on the source, old transactions as a rule, did not end within `PGWAL_BLOCKED_TIMEOUT`; names pid, age and query."""


class LakeError(PgwalError):
    """The lake cannot be read or written, or it is another source's."""


class FileGone(LakeError):
    """A file that a drain has written is not there any more, and no table names it yet."""


class DecodeError(PgwalError):
    """A message of the stream that cannot be read; the message shows its position and its first bytes.

    `lsn` is where the WAL sender placed it (0 where it did not say) and `payload` the whole of it, to be set aside.
    """

    def __init__(self, message: str, *, lsn: int = 0, payload: bytes = b"") -> None:
        super().__init__(message)
        self.lsn = lsn
        self.payload = payload


class TableError(PgwalError):
    """One table cannot be followed; the others can.

    `table` is its quoted name, `oid` is 0 where it is not known, `stage` is the work that failed (`lake.faults.STAGES`), empty where it is
    not known.
    """

    def __init__(self, table: str, message: str, oid: int = 0, stage: str = "") -> None:
        super().__init__(message)
        self.table = table
        self.oid = oid
        self.stage = stage

"""The errors a user may meet: each is one sentence that says what happened, to what, and what to do."""

from collections.abc import Mapping
from typing import Any, Self

from pgwal_pipeline import amounts
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

    def to_json(self) -> dict[str, Any]:
        """The error as JSON that `error_from_json` makes the same one of, in another process."""
        return {"kind": type(self).__name__, "text": str(self), "transient": self.transient, **self._more()}

    def _more(self) -> dict[str, Any]:
        """What else it was made with, by name."""
        return {}

    @classmethod
    def _made(cls, text: str, more: Mapping[str, Any]) -> Self:  # noqa: ARG003 - for kinds that are made with more
        return cls(text)


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


class ChangeNotSent(SlotLost):
    """The source fails at a change that the slot has still to send: nothing behind it can be read on this slot."""


class BlockedByTransaction(PgwalError):
    """Others on the source, old transactions as a rule, did not end within `PGWAL_BLOCKED_TIMEOUT`; names pid, age and query."""


class LakeError(PgwalError):
    """The lake cannot be read or written, or it is another source's."""


class FileGone(LakeError):
    """A file that a drain has written is not there any more, and no table names it yet."""


class DecodeError(PgwalError):
    """A message of the stream that cannot be read; the message shows its position and its first bytes.

    `lsn` is where the WAL sender placed it (0 where it did not say) and `payload` the whole of it, to be set aside. `oid` is the table that
    the message belongs to, 0 where it belongs to none or to several.
    """

    def __init__(self, message: str, *, lsn: int = 0, payload: bytes = b"", oid: int = 0) -> None:
        super().__init__(message)
        self.lsn = lsn
        self.payload = payload
        self.oid = oid

    def _more(self) -> dict[str, Any]:
        return {"lsn": self.lsn, "payload": self.payload.hex(), "oid": self.oid}

    @classmethod
    def _made(cls, text: str, more: Mapping[str, Any]) -> Self:
        return cls(text, lsn=more["lsn"], payload=bytes.fromhex(more["payload"]), oid=more["oid"])


class TableWorkFailed(Exception):
    """Work for one table alone failed; its `__cause__` is what was raised. Whose fault that is, the caller judges (`lake.faults`).

    `oid` and `table` are the table's, `stage` the work.
    """

    def __init__(self, oid: int, table: str, stage: str) -> None:
        super().__init__(f"{stage} of table {table} failed")
        self.oid = oid
        self.table = table
        self.stage = stage


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

    def _more(self) -> dict[str, Any]:
        return {"table": self.table, "oid": self.oid, "stage": self.stage}

    @classmethod
    def _made(cls, text: str, more: Mapping[str, Any]) -> Self:
        return cls(more["table"], text, more["oid"], more["stage"])


def row_too_large(table: object, size: int, largest: int, oid: int, stage: str) -> TableError:
    """The error of a table with a row of `size` bytes, where `largest` is what one may have."""
    said = (
        f"Table {table} has a row of {amounts.size(size)}, and one may have {amounts.size(largest)} (64 MB, or a quarter of "
        f"PGWAL_MEMORY_BUDGET where that is more); raise that, or make the row smaller on the source."
    )
    return TableError(str(table), said, oid, stage)


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Any error as JSON for another process; of one that is not the pipeline's the sentence says what it was.

    One of a kind that only its own module knows is told as the nearest kind that all know.
    """
    if not isinstance(error, PgwalError):
        return PgwalError(f"Unexpected {type(error).__name__}: {error}").to_json()
    known = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return error.to_json() | {"kind": known}


def error_from_json(found: Mapping[str, Any]) -> PgwalError:
    """The error that `error_to_json` told of."""
    kind: type[PgwalError] = globals()[found["kind"]]
    error = kind._made(found["text"], found)  # noqa: SLF001 - this module's own
    error.transient = found["transient"]
    return error

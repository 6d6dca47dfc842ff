"""The errors a user may see. Each is one sentence: what happened, to which table, slot or setting, and what to do."""

from collections.abc import Mapping
from typing import Any, Self

from pgwal_pipeline.messages import amounts
from pgwal_pipeline.messages.printable import printable


class PgwalError(Exception):
    """An error that ends the pipeline's work; its message is the whole explanation.

    `exit_code` is the exit code of `pgwal`. `transient`: the same work may succeed if tried again. Names in the message may contain any
    character; those that would act on a terminal are written out.
    """

    exit_code = 1
    transient = False

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))

    def to_json(self) -> dict[str, Any]:
        """Return the error as JSON, from which `error_from_json` builds the same error in another process."""
        return {"kind": type(self).__name__, "text": str(self), "transient": self.transient, **self._more()}

    def _more(self) -> dict[str, Any]:
        """Return the further arguments it was made with, by name."""
        return {}

    @classmethod
    def _made(cls, text: str, more: Mapping[str, Any]) -> Self:  # noqa: ARG003 - for kinds that are made with more
        return cls(text)


class SettingError(PgwalError):
    """A setting is wrong or missing; the message names the variable and what it takes."""

    exit_code = 2


class SourceUnavailable(PgwalError):
    """The source cannot be reached now, or the connection to it broke."""

    transient = True


class SourceRefused(PgwalError):
    """The source can be reached but lacks something: a privilege, `wal_level`, a table, a free replication slot."""


class SlotBusy(PgwalError):
    """Another drain holds the slot; the message names it."""

    transient = True


class SlotLost(PgwalError):
    """The slot is missing, invalidated, or ahead of what the lake holds: a gap that only a new snapshot can close."""


class PublicationMissing(SlotLost):
    """The publication did not exist at a point of the WAL that the slot has not read yet."""


class ChangeNotSent(SlotLost):
    """The source fails at a change that the slot has still to send: nothing behind it can be read on this slot."""


class BlockedByTransaction(PgwalError):
    """Sessions on the source, usually old transactions, did not end within `PGWAL_BLOCKED_TIMEOUT`; names pid, age and query."""


class LakeError(PgwalError):
    """The lake cannot be read or written, or it belongs to another source."""


class FileGone(LakeError):
    """A file that a drain has written is gone, and no Delta table names it yet."""


class DecodeError(PgwalError):
    """A message of the stream cannot be decoded; the error shows its LSN and its first bytes.

    `lsn` is the LSN that the walsender gave with it (0 if none) and `payload` the whole message, to be set aside. `oid` is the table that
    the message belongs to, 0 if it belongs to none or to several.
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
    """Work for one table failed; `__cause__` is the original error. The caller decides whether the table is to blame (`lake.faults`).

    `oid` and `table` name the table, `stage` the work (`lake.faults.STAGES`).
    """

    def __init__(self, oid: int, table: str, stage: str) -> None:
        super().__init__(f"{stage} of table {table} failed")
        self.oid = oid
        self.table = table
        self.stage = stage


class TableError(PgwalError):
    """One table cannot be followed; the others can.

    `table` is its quoted name, `oid` its oid (0: not known), `stage` the work that failed (`lake.faults.STAGES`; empty: not known).
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
    """Return the error of a table with a row of `size` bytes, where one may have `largest`."""
    said = (
        f"Table {table} has a row of {amounts.size(size)}, and one may have {amounts.size(largest)} (64 MB, or a quarter of "
        f"PGWAL_MEMORY_BUDGET where that is more); raise that, or make the row smaller on the source."
    )
    return TableError(str(table), said, oid, stage)


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return any error as JSON for another process. An error that is not the pipeline's becomes a PgwalError that names its type.

    An error whose class is defined in another module becomes the nearest class of this module.
    """
    if not isinstance(error, PgwalError):
        return PgwalError(f"Unexpected {type(error).__name__}: {error}").to_json()
    known = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return error.to_json() | {"kind": known}


def error_from_json(found: Mapping[str, Any]) -> PgwalError:
    """Return the error that `error_to_json` described."""
    kind: type[PgwalError] = globals()[found["kind"]]
    error = kind._made(found["text"], found)  # noqa: SLF001 - this module's own
    error.transient = found["transient"]
    return error

"""A source's DSN, with what libpq does not know of the way to it."""

from dataclasses import dataclass
from typing import Self

from pgwal_pipeline.values.ssh_address import SshAddress


@dataclass(frozen=True, slots=True)
class Way:
    """What connections to a source need besides its DSN.

    `password_command` prints the password, for each connection anew. `tunnel` is the host that they go through. None: as libpq has it.
    """

    password_command: str | None = None
    tunnel: SshAddress | None = None


DIRECT = Way()


class SourceDsn(str):
    """A DSN that knows its way. Whatever takes a DSN takes it, so the way needs no place of its own beside each DSN."""

    __slots__ = ("way",)
    way: Way

    def __new__(cls, dsn: str, way: Way = DIRECT) -> Self:
        """Return `dsn` with its way."""
        made = super().__new__(cls, dsn)
        made.way = way
        return made


def way_of(dsn: str) -> Way:
    """Return the way that a DSN knows; a plain text knows none."""
    return dsn.way if isinstance(dsn, SourceDsn) else DIRECT

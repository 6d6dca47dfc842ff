"""The address of a host that is reached by SSH, as `ssh://user@host:port`."""

import re
from dataclasses import dataclass
from typing import Self

# No password, and nothing that ssh could take for an option or a shell for a command.
PATTERN = r"^ssh://([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?([A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?$"
"""What an address looks like."""


@dataclass(frozen=True, slots=True)
class SshAddress:
    """A host, and the user and the port there; None: as ssh's configuration has them."""

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that a text gives. Raises ValueError."""
        match = re.fullmatch(PATTERN, text)
        if match is None or (match[3] is not None and not 0 < int(match[3][1:]) < 65536):
            raise ValueError(f"{text} is no address such as ssh://user@host:22")
        return cls(match[2].strip("[]"), match[1] and match[1][:-1], None if match[3] is None else int(match[3][1:]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{f'{self.user}@' if self.user else ''}{host}{'' if self.port is None else f':{self.port}'}"

"""Parse and format LSNs, positions in the write-ahead log (WAL).

Everywhere else an LSN is an `int`: bytes from the start of the log, unsigned 64 bits.
"""

import re

_LSN = re.compile(r"\A([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")


def parse_lsn(text: str) -> int:
    """Return the LSN of a text such as `16/B374D848`, as Postgres writes it. Raises ValueError for anything else."""
    match = _LSN.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not an LSN; Postgres writes one as 16/B374D848")
    return int(match[1], 16) << 32 | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """Return the LSN as Postgres writes it, such as `16/B374D848`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def window_key(end_lsn: int) -> str:
    """Return the key of the window that ends at `end_lsn`: 16 upper-case hex digits, so keys sort like LSNs."""
    return f"{end_lsn:016X}"


def parse_window_key(key: str) -> int:
    """Return the end LSN of the window with that key. Raises ValueError for anything but 16 upper-case hex digits."""
    if not re.fullmatch(r"[0-9A-F]{16}", key):
        raise ValueError(f"{key!r} is not a window's key; it is an LSN as 16 upper-case hex digits")
    return int(key, 16)

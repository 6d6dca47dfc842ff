"""Return freed memory to the system."""

import ctypes
from contextlib import suppress

import pyarrow as pa


def give_back() -> None:
    """Return freed memory to the system, as far as the allocators can; this takes milliseconds.

    Without it the process grows the longer several threads decode, because glibc keeps what each of them has freed.
    """
    pa.default_memory_pool().release_unused()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)

"""Memory that has been freed goes back to the system."""

import ctypes
from contextlib import suppress

import pyarrow as pa


def give_back() -> None:
    """Return freed memory to the system, as far as the allocators here can; takes milliseconds.

    Without it what a process holds grows with how long several threads have been decoding: glibc keeps what each of them has freed.
    """
    pa.default_memory_pool().release_unused()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)

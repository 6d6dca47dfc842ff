"""Tell this machine's processes from those of another one, or of another container, that have the same ids."""

import hashlib
import os
import platform
from functools import cache
from pathlib import Path


@cache
def machine() -> str:
    """Return 8 hex digits that are the same for all processes whose ids this one can use, and for no others.

    They stand for this boot of the kernel and this container's space of process ids. A host's name would not do: containers may share one.
    """
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux, so there are no containers that share a kernel
        known = platform.node()
    return hashlib.sha256(f"{known} {os.geteuid()}".encode()).hexdigest()[:8]

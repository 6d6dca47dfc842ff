"""Know how much memory this process may have: the machine's, or what its container or service is limited to."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def machine_memory(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory of this machine in bytes, or that of the container or service if it has less, under cgroups of either version.

    `cgroups` is where they are mounted, `own` says in which of them this process is.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_limits(cgroups, own)])


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    """The limits of this process's cgroups and those above. A container may see its own as the uppermost, whatever `own` says."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    places = {kind: place for line in lines if len(line) == 3 for kind in line[1].split(",") for place in [line[2].strip("/")]}
    for folder, place, name in (
        (cgroups, places.get("", ""), "memory.max"),
        (cgroups / "memory", places.get("memory", ""), "memory.limit_in_bytes"),
    ):
        for above in {folder, *(folder / part for part in (Path(place), *Path(place).parents))}:
            with suppress(OSError):
                limit = (above / name).read_text().strip()
                if limit.isdigit():  # else it is "max"
                    yield int(limit)

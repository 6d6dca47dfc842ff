"""The memory that this process may have, by either version of cgroups; the files are laid out as the kernel does."""

import os
from pathlib import Path

import pytest

from pgwal_pipeline.host.limits import machine_memory

_WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_NO_LIMIT = "9223372036854771712"


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("own", "files", "memory"),
    [
        ("0::/", {"memory.max": "1073741824"}, 1 << 30),
        ("0::/", {"memory.max": "max"}, _WHOLE),
        ("0::/system.slice/x.service", {"system.slice/memory.max": "2147483648", "system.slice/x.service/memory.max": "max"}, 2 << 30),
        ("4:memory:/docker/abc\n0::/", {"memory/memory.limit_in_bytes": "2147483648"}, 2 << 30),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": _NO_LIMIT}, _WHOLE),
        (
            "4:memory:/jobs/one",
            {"memory/memory.limit_in_bytes": _NO_LIMIT, "memory/jobs/one/memory.limit_in_bytes": "536870912"},
            512 << 20,
        ),
        ("", {}, _WHOLE),
    ],
)
def test_the_lowest_limit_counts(tmp_path: Path, own: str, files: dict[str, str], memory: int) -> None:
    _write(tmp_path / "cgroup", files)
    _write(tmp_path, {"own": own})
    assert machine_memory(tmp_path / "cgroup", tmp_path / "own") == memory


def test_without_cgroups_it_is_the_machines(tmp_path: Path) -> None:
    assert machine_memory(tmp_path / "none", tmp_path / "none") == _WHOLE

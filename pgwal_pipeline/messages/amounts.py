"""Format amounts for people."""


def size(count: int) -> str:
    """Return a number of bytes as `512 B` or `1.5 MB`; 1 kB is 1024 bytes."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """Return a number of seconds as `12 s`, `5 min` or `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""A source whose SQL tells positions of another sequence than its WAL's."""

import pytest

from pgwal_pipeline.postgres import positions
from pgwal_pipeline_tests.support import Source

FAR = 1 << 40


def shift_sql(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """Have SQL tell positions of another sequence, `by` bytes off, as a storage of its own below Postgres may."""
    for name in ("FLUSHED", "_INSERTED", "_RECEIVED"):
        monkeypatch.setattr(positions, name, f"(({getattr(positions, name)}) + {by}::numeric)")


def flushed(source: Source) -> int:
    return int(source.value("SELECT pg_current_wal_flush_lsn() - '0/0'"))

"""What a file holds, also where it is compressed: for tests that look for values which must not be there."""

import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pyarrow.parquet as pq


def octets_in(path: Path) -> Iterator[bytes]:
    """A file's bytes and name, and what is compressed in it."""
    octets = path.read_bytes()
    yield octets + os.fsencode(path)
    if octets[:4] == b"PAR1":
        yield repr(pq.ParquetFile(path).read().to_pylist()).encode()
    if octets[:15] == b"SQLite format 3":
        with closing(sqlite3.connect(path)) as database:
            for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                for row in database.execute(f'SELECT * FROM "{table}"'):
                    for value in row:
                        if isinstance(value, bytes):
                            with suppress(zlib.error):
                                yield zlib.decompress(value)

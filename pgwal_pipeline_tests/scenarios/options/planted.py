"""Look for planted values in all that a pipeline leaves behind."""

import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pyarrow.parquet as pq

from pgwal_pipeline_tests.pipelines import Pipeline


def assert_nowhere(pipeline: Pipeline, *values: str, said: str = "") -> None:
    """Fail where one of `values` stands in a file of the lake, or beside it, or in what was said."""
    assert_nowhere_in(Path(pipeline.settings.lake).parent, *values, said=said)


def assert_nowhere_in(folder: Path, *values: str, said: str = "") -> None:
    """Fail where one of `values` stands in a file in or below `folder`, or in what was said."""
    wanted = [form for value in values for form in (value.encode(), value.encode().hex().encode(), value.encode("utf-16-le"))]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    found = [str(path) for path in files if any(form in octets for octets in _contents(path) for form in wanted)]
    assert not found, found
    assert [value for value in values if value in said] == []


def _contents(path: Path) -> Iterator[bytes]:
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

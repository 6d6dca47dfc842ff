"""Reads of a table in chunks: its relation, the plan, and the rows as texts."""

import itertools
import struct
from typing import Any

from pgwal_pipeline.postgres import catalog, dsn
from pgwal_pipeline.postgres.copy import ChunkBounds, plan_chunks
from pgwal_pipeline.values.relation import Relation
from pgwal_pipeline_tests.support import Source, copy_messages

WHOLE = ChunkBounds(None, None)


def relation_of(source: Source, table: str = "t", with_options: str = "") -> Relation:
    publication = f"p_{table}"
    source.sql(f"drop publication if exists {publication}; create publication {publication} for table only {table} {with_options}")
    with dsn.connect(source.dsn) as conn:
        (relation,) = catalog.tables_of(conn, publication)
    return relation


def fields_of(blocks: list[bytes]) -> list[tuple[str | None, ...]]:
    """The rows of a COPY in binary format whose fields are texts."""
    data = b"".join(blocks)
    assert data[:19] == b"PGCOPY\n\xff\r\n\0" + bytes(8)
    assert data[-2:] == b"\xff\xff"
    rows, at = [], 19
    while at < len(data) - 2:
        (count,) = struct.unpack_from(">h", data, at)
        at += 2
        row = []
        for _ in range(count):
            (length,) = struct.unpack_from(">i", data, at)
            at += 4
            row.append(None if length < 0 else data[at : at + length].decode())
            at += max(length, 0)
        rows.append(tuple(row))
    return rows


def read(source: Source, relation: Relation, bounds: ChunkBounds = WHOLE, **options: Any) -> list[tuple[str | None, ...]]:
    done, blocks = copy_messages(source.dsn, relation, bounds, **options)
    rows = fields_of(blocks)
    assert done.rows == len(rows)
    assert done.bytes == sum(map(len, blocks))
    return rows


def plan(source: Source, relation: Relation, rows: int) -> list[ChunkBounds]:
    with dsn.connect(source.dsn) as conn:
        return list(plan_chunks(conn, relation, rows))


def check_chunks(source: Source, relation: Relation, size: int = 250, *, total: int = 1000) -> list[ChunkBounds]:
    chunks = plan(source, relation, size)
    assert len(chunks) == total // size
    assert chunks[0].lower is None and chunks[-1].upper is None
    assert all(one.upper == other.lower is not None for one, other in itertools.pairwise(chunks))
    parts = [read(source, relation, chunk) for chunk in chunks]
    assert [len(part) for part in parts] == [size] * len(chunks)
    rows = [row for part in parts for row in part]
    assert sorted(rows, key=str) == sorted(read(source, relation), key=str)
    return chunks

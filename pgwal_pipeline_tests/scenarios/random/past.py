"""The past of a source's tables, read from the source itself after each commit, to be compared with their histories."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from pgwal_pipeline.values.lsn import format_lsn, parse_lsn
from pgwal_pipeline_tests.oracle import rows_of, source_rows
from pgwal_pipeline_tests.support import Source

Rows = Counter[tuple[Any, ...]]


@dataclass
class Past:
    """What tables held at positions of the WAL: each is before the next commit, and at or after the last one."""

    source: Source
    held: list[tuple[int, dict[str, tuple[list[str], Rows]]]] = field(default_factory=list)

    def remember(self, *tables: str) -> int:
        """Take down what the tables hold now; nobody may commit meanwhile. Returns the position."""
        with self.source.connect() as conn:
            rows = {table: source_rows(conn, table) for table in tables}
            at = parse_lsn(conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchall()[0][0]) - 1
        self.held.append((at, rows))
        return at

    def compare(self, table: str, path: str, since: int, *, exact: bool = True) -> int:
        """Fail unless the history at `path` has at each position from `since` on what the table held; gives the number of positions.

        Without `exact` columns may differ: the history has those that the source has had since.
        """
        history = pl.read_delta(path)
        positions = 0
        for at, held in self.held:
            if at < since or table not in held:
                continue
            columns, expected = held[table]
            if not exact and not set(columns) <= set(history.columns):
                continue
            found = rows_at(history, at, columns)
            missing, extra = expected - found, found - expected
            assert not missing and not extra, f"{table} at {format_lsn(at)}: missing {list(missing)[:3]}, extra {list(extra)[:3]}"
            positions += 1
        return positions


def valid_at(history: pl.DataFrame, at: int) -> pl.DataFrame:
    """The rows of a history that were valid at a position."""
    begun, ended = pl.col("_pgwal_valid_from_lsn"), pl.col("_pgwal_valid_to_lsn")
    return history.filter((begun <= at) & (ended.is_null() | (ended > at)))


def rows_at(history: pl.DataFrame, at: int, columns: list[str]) -> Rows:
    return rows_of(valid_at(history, at).select(columns))

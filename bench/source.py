"""A server for the benchmarks, and the changes made on it."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.postgres.connection import plain_session

PUBLICATION = "bench"

# Like a small production server, except for the WAL: none may be removed while several slots wait to be read.
_SETTINGS = {
    "wal_level": "logical",
    "shared_buffers": "256MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "max_slot_wal_keep_size": "-1",
    "autovacuum": "off",
}

# Ten columns of common types.
_COLUMNS = """
    id bigint PRIMARY KEY, customer integer NOT NULL, status text NOT NULL, amount numeric(12,2) NOT NULL,
    quantity smallint, note text, score double precision, active boolean NOT NULL, day date NOT NULL, changed_at timestamptz NOT NULL"""
_BATCH = 1000  # changes a transaction


@contextlib.contextmanager
def server() -> Iterator[Postgres]:
    """Start a new server in a temporary folder; both are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="pgwal-bench-") as folder:
        Path(folder).chmod(0o755)
        postgres = Postgres(Path(folder) / "data", settings=_SETTINGS)
        postgres.start()
        try:
            yield postgres
        finally:
            postgres.destroy()


def make_database(postgres: Postgres, name: str) -> str:
    """Create a database on `postgres`; return its DSN."""
    with plain_session(postgres.dsn()) as conn:
        conn.execute(f'CREATE DATABASE "{name}"'.encode())
    return postgres.dsn(name)


def make_tables(dsn: str, count: int) -> list[str]:
    """`count` empty tables of ten columns and a publication for all; returns their names."""
    names = [f"t{number:02d}" for number in range(count)]
    with plain_session(dsn) as conn:
        for name in names:
            conn.execute(f"CREATE TABLE {name} ({_COLUMNS})".encode())
        conn.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES".encode())
    return names


def load(dsn: str, tables: Sequence[str], changes: int, times: int = 0) -> int:
    """Make about `changes` changes, 60 % inserts, 30 % updates and 10 % deletes; return the exact number.

    Each transaction makes about a thousand on one table; the tables take turns. Updates and deletes change rows that the table's previous
    transaction inserted. `times` is how many calls with the same `changes` came before.
    """
    inserts = _BATCH * 6 // 10
    made = 0
    turns = round(changes / _BATCH) // len(tables)
    with plain_session(dsn) as conn:
        for batch in range(round(changes / _BATCH)):
            table, turn = tables[batch % len(tables)], turns * times + batch // len(tables)
            first = turn * inserts
            before = f"id >= {first - inserts} AND id < {first}"
            with conn.transaction():
                work = (
                    f"INSERT INTO {table} SELECT {values('n')} FROM generate_series({first}::bigint, {first + inserts - 1}) n",
                    f"UPDATE {table} SET status = 'changed', amount = amount + 1 WHERE {before} AND id % 2 = 1",
                    f"DELETE FROM {table} WHERE {before} AND id % 6 = 0",
                )
                made += sum(conn.execute(statement.encode()).rowcount for statement in work)
    return made


def values(number: str) -> str:
    """Return a select list for a row of the tables; all values are computed from the SQL expression `number`, the key."""
    return f"""{number}, ({number} * 7919 % 100000)::int, (ARRAY['new','paid','sent','closed'])[1 + {number} % 4],
        ({number} % 1000000)::numeric / 100, ({number} % 50)::smallint, 'order ' || md5({number}::text), {number} * 0.37, {number} % 3 = 0,
        DATE '2025-01-01' + ({number} % 365)::int, TIMESTAMPTZ '2025-01-01 00:00Z' + {number} * interval '1 second'"""


def flush_lsn(dsn: str) -> str:
    """Return the server's flush LSN, after a switch to a new WAL segment."""
    with plain_session(dsn) as conn:
        conn.execute("SELECT pg_switch_wal()")
        row = conn.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return row[0]

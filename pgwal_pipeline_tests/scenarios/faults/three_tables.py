"""Three tables, some of which fail: what the tests of faults in a drain and in a publish share."""

from collections.abc import Sequence

from pgwal_pipeline_tests.support import Source

TABLES = ["public.a", "public.b", "public.c"]

CASES = {
    "first": (["public.a"], TABLES),
    "last": (["public.c"], TABLES),
    "only": (["public.b"], ["public.b"]),
    "all": (TABLES, TABLES),
}
"""Which tables fail, and which get changes in that window."""


def create(source: Source) -> None:
    for table in TABLES:
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")


def insert(source: Source, tables: Sequence[str], *ids: int) -> None:
    for table in tables:
        for number in ids:
            source.sql(f"INSERT INTO {table} VALUES (%s, 'x')", number)

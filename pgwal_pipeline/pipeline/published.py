"""Read a publication's tables and row filters repeatedly, without waiting each time for whoever has locked a table that has a filter."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from psycopg2 import errors

from pgwal_pipeline.messages.errors import SourceUnavailable
from pgwal_pipeline.postgres import catalog
from pgwal_pipeline.postgres.catalog import PublishedTable
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.values.protection import NO_PROTECTION, Protection

_PATIENCE = "1s"  # for a lock on one of the tables: the server opens those that have a row filter
_AS_BEFORE = 30.0  # seconds after that in which the catalog is not read again


@dataclass
class Published:
    """The tables of a publication by their OIDs, as `protection` makes them.

    To be used on the thread that owns `conn`, outside of a transaction.
    """

    conn: Connection
    publication: str
    protection: Protection = NO_PROTECTION
    _seen: Mapping[int, PublishedTable] | None = None
    _again_at: float = field(default=float("-inf"))

    def _tables(self) -> list[PublishedTable]:
        found = catalog.published_tables(self.conn, self.publication)
        return [
            replace(table, relation=self.protection.relation(table.relation))
            for table in found
            if self.protection.misused(table.relation) is None
        ]

    def now(self) -> Mapping[int, PublishedTable]:
        """Return the tables as the catalog has them, or as it had them a moment ago while one of them is locked.

        Only the first call waits for locks. A table that was altered since then is found when its rows are read.
        """
        if self._seen is not None and time.monotonic() < self._again_at:
            return self._seen
        try:
            with self.conn.transaction():
                if self._seen is not None:
                    self.conn.execute(f"SET LOCAL lock_timeout = '{_PATIENCE}'".encode())
                self._seen = {table.relation.oid: table for table in self._tables()}
        except SourceUnavailable as error:
            if self._seen is None or not isinstance(error.__cause__, errors.LockNotAvailable):
                raise
            self._again_at = time.monotonic() + _AS_BEFORE
        return self._seen

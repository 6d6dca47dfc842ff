"""What is known of the source's tables without reading them: their sizes, and their newest commits in raw."""

from collections.abc import Collection, Mapping

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import TableWrite
from pgwal_pipeline.pipeline.reports import NewestCommit
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.sizes import TableSize, table_sizes
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

_CONNECT_TIMEOUT = 5  # seconds; sizes are not worth a longer wait


def sizes(settings: Settings, tables: Collection[TableName]) -> Mapping[TableName, TableSize]:
    """Return the sizes of those of `tables` that exist. Raises SourceUnavailable if the source cannot be reached."""
    with connect(settings.dsn, connect_timeout=_CONNECT_TIMEOUT) as conn:
        return table_sizes(conn, tables)


def newest_commits(settings: Settings) -> Mapping[TableName, NewestCommit]:
    """Return the newest commit in raw of each table that has one, as far as the ledger remembers windows."""
    ledger = Ledger(Lake(settings.lake))
    writes: dict[str, list[TableWrite]] = {}
    for window in ledger.windows():
        if window.state == "complete":
            for write in window.tables:
                writes.setdefault(write.path, []).append(write)
    found = {table: NewestCommit.of(writes.get(ledger.lake.raw(state.location), ())) for table, state in ledger.tables().items()}
    return {table: newest for table, newest in found.items() if newest is not None}

"""Keep the Delta logs of raw and the ledger short: each reader and writer pays for every commit and every file that a log names."""

from collections.abc import Mapping

from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from pgwal_pipeline import failpoints
from pgwal_pipeline.lake.delta import has_checkpoint, lake_errors, open_table
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake, stored
from pgwal_pipeline.lake.ledger import LOGS
from pgwal_pipeline.lake.log import CONFIGURATION as LEDGER
from pgwal_pipeline.lake.maintenance import Refused, raised
from pgwal_pipeline.lake.raw import CONFIGURATION as RAW
from pgwal_pipeline.messages.errors import TableError


def shorten_logs(lake: Lake, refused: Refused = raised) -> None:
    """Write a checkpoint of each log of raw and of the ledger, and remove the commits before it that are older than its table keeps them.

    A table of an earlier version gets the properties that a new one has. It may run beside drains and publishes: what loses against their
    commits is left for the next time. The error of a table that fails by its own fault goes to `refused`. Raises LakeError.
    """
    for location in sorted(stored(lake, "raw")):
        try:
            with table_work(lake, location, "maintain"):
                _shorten(lake, lake.raw(location), RAW)
        except TableError as error:
            refused(error)
    for name in LOGS:
        _shorten(lake, lake.ledger(name), LEDGER)


def _shorten(lake: Lake, uri: str, properties: Mapping[str, str]) -> None:
    with lake_errors(uri):
        table = open_table(lake, uri)
        if table is None:
            return
        try:
            _set(table, properties)
            table.update_incremental()
            if not has_checkpoint(lake, uri, table.version()):
                table.create_checkpoint()
            failpoints.hit("maintenance.after_checkpoint")
            table.cleanup_metadata()
        except CommitFailedError:
            return


def _set(table: DeltaTable, properties: Mapping[str, str]) -> None:
    has = table.metadata().configuration
    changed = {name: value for name, value in properties.items() if has.get(name) != value}
    if changed:
        table.alter.set_table_properties(changed)

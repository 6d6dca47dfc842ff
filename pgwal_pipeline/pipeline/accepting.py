"""Accept the schema of tables that stopped at a change, or that kept the columns they had."""

from collections.abc import Callable, Sequence
from typing import Any

from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.messages.errors import SlotBusy, SlotLost, SourceUnavailable
from pgwal_pipeline.messages.progress import Noted, Silent
from pgwal_pipeline.pipeline import schema_policy
from pgwal_pipeline.pipeline.drain import bootstrap
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName


def accept(settings: Settings, tables: Sequence[TableName], *, warn: Callable[[str], None]) -> dict[str, Any]:
    """Take the schema of `tables` as the source has it now; return what that changes, and which are read again, as JSON.

    Without the source, or beside a drain, it is the schema as it was last recorded. Raises SourceRefused for a table that is not followed.
    """
    ledger = Ledger(Lake(settings.lake))
    if ledger.tables():
        try:
            bootstrap(settings, progress=Noted(Silent()))
        except (SourceUnavailable, SlotBusy, SlotLost) as error:
            warn(f"{error} What was known of the source before is accepted.")
    found = schema_policy.accept(ledger, tables)
    return {
        "accepted": {
            str(table): {"changes": [str(change) for change in changes], "read_again": again} for table, (changes, again) in found.items()
        }
    }

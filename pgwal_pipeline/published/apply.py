"""Merge changes of a published table into a Delta table of one's own, once each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgwal_pipeline.published.changes import Changes


def apply_changes(session: "SparkSession", target_path: str, changes: "Changes", key: Sequence[str] | None = None) -> int:
    """Bring the Delta table at `target_path` to the LSN of `changes`, and return its version. It has the table's columns then.

    The table records up to which LSN it was brought, so the same changes are applied once, however often a run is repeated. Complete
    changes replace all rows; others are merged by `key`, which is the table's own unless one is given. The target is made if it is missing.
    Raises PgwalError if `changes` begin after what the target has, or are a history, and if there is no key.
    """
    from pgwal_pipeline.published.applied import bring

    return bring(session, target_path, changes, key)

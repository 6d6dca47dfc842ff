"""Proof that `current` equals the source: both read at one LSN and compared value by value."""

import os
import uuid
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from pgwal_pipeline.decode.batch import decode_copy
from pgwal_pipeline.errors import SourceRefused
from pgwal_pipeline.lake import compare
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.pipeline.drain import drain
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.reports import TableComparison, VerifyReport
from pgwal_pipeline.postgres import copy, slot
from pgwal_pipeline.progress import Progress
from pgwal_pipeline.relation import Relation, TableName
from pgwal_pipeline.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def verify(
    settings: Settings,
    spark_factory: Callable[[], "SparkSession"],
    tables: Collection[TableName] | None = None,
    *,
    progress: Progress,
) -> VerifyReport:
    """Bring `current` to the LSN of a snapshot of the source, and compare the two there.

    A temporary slot gives that pair: the transactions with a commit LSN below its consistent point are just those that its exported
    snapshot sees. Making it waits for the transactions that are open. Raises SourceRefused for a table that is not followed.
    """
    lake = Lake(settings.lake)
    name = f"{settings.slot}_v_{os.getpid()}"
    with slot.create_with_snapshot(settings.dsn, name) as (lsn, exported):
        drained = drain(settings, end_lsn=lsn, progress=progress)
        published = publish(settings, spark_factory, progress=progress)
        states = Ledger(lake).tables()
        names = sorted(published.tables) if tables is None else list(tables)
        comparisons = {}
        for done, table in enumerate(names):
            pointer = published.tables.get(table)
            state = states.get(table)
            if pointer is None or pointer.version is None or state is None or state.relation is None:
                raise SourceRefused(f"Table {table} has no published current to compare with; `pgwal status` says where it stands.")
            progress.stage("verify", done, len(names), "tables")
            expected = _copy_source(settings, lake, state.relation, exported)
            try:
                result = compare.compare(
                    spark_factory(), expected, pointer.path, pointer.version, key=state.relation.key, columns=state.relation.column_names
                )
            finally:
                compare.remove(expected)
            comparisons[table] = TableComparison(
                equal=not (result.missing or result.extra or result.different),
                rows=result.rows,
                missing=result.missing,
                extra=result.extra,
                different=result.different,
            )
        progress.stage("verify", len(names), len(names), "tables")
    return VerifyReport(
        lsn=lsn, equal=all(comparison.equal for comparison in comparisons.values()), tables=comparisons, drain=drained, publish=published
    )


def _copy_source(settings: Settings, lake: Lake, relation: Relation, exported: str) -> str:
    """The table as the exported snapshot shows it, as a Delta table of its own in the lake; its path."""
    blocks: list[bytes] = []
    copy.read_chunk(
        settings.dsn, relation, copy.ChunkBounds(None, None), lambda block: blocks.append(bytes(block)), exported_snapshot=exported
    )
    path = f"{lake.ledger('verify')}/{uuid.uuid4().hex}"
    compare.write(path, decode_copy(blocks, relation))
    return path

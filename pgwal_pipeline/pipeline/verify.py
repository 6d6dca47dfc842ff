"""Verify that `current` equals the source: read both at one LSN and compare them value by value."""

import secrets
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa

from pgwal_pipeline.decode.copy import copy_schema
from pgwal_pipeline.lake import compare
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.schema import schema_json
from pgwal_pipeline.messages.errors import SourceRefused, SourceUnavailable, TableError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.drain import drain
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.published import Published
from pgwal_pipeline.pipeline.reports import TableComparison, VerifyReport
from pgwal_pipeline.pipeline.schema_policy import taken
from pgwal_pipeline.pipeline.table_rows import Range, TableRows
from pgwal_pipeline.postgres import catalog, copy, slot
from pgwal_pipeline.postgres.catalog import PublishedTable
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.storage import storages
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName

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

    LSN and snapshot come from a temporary slot: its exported snapshot sees exactly the transactions with a commit LSN below its consistent
    point. Creating it waits for open transactions, PGWAL_BLOCKED_TIMEOUT at most. Without `tables` all published ones are compared; the
    report's `publish` names those in error. A table that cannot be compared by its own fault is in `errors`, and the others are compared.

    Raises SourceRefused for one of `tables` that has no published `current`, or if no table has one, and SourceUnavailable for a table that
    was truncated or rewritten meanwhile.
    """
    lake = Lake(settings.lake)
    with connect(settings.dsn) as conn:
        files = _files(conn, settings.publication, [relation.oid for relation in catalog.tables_of(conn, settings.publication)])
    probe = f"{settings.slot}_v_{secrets.token_hex(4)}"
    with slot.create_with_snapshot(settings.dsn, probe, blocked_timeout=settings.blocked_timeout, warn=progress.warn) as (lsn, exported):
        drained = drain(settings, end_lsn=lsn, progress=progress)
        published = publish(settings, spark_factory, progress=progress)
        with connect(settings.dsn) as conn:
            published_now = Published(conn, settings.publication, settings.protection).now()
        sources = {table.relation.table: table for table in published_now.values()}
        names = sorted(table for table, found in published.tables.items() if found.version is not None) if tables is None else list(tables)
        if sources and not names:
            raise SourceRefused("No table has been published yet, so there is nothing to compare; run `pgwal sync` first.")
        comparisons, errors, states = {}, {}, Ledger(lake).tables()
        for done, name in enumerate(names):
            pointer, source = published.tables.get(name), sources.get(name)
            if pointer is None or pointer.version is None or source is None:
                raise SourceRefused(f"Table {name} has no published current to compare with; `pgwal status` shows its state.")
            progress.stage("verify", done, len(names), "tables")
            try:
                with table_work(lake, name, "compare", oid=source.relation.oid, answers=lambda: spark_factory().sql("SELECT 1").collect()):
                    comparisons[name] = _compared(
                        settings, lake, source, states.get(name), exported, files, spark_factory, pointer.path, pointer.version
                    )
            except TableError as error:
                errors[name] = f"Table {name} could not be compared: {error} `pgwal resnapshot '{name}'` reads it again."
                progress.warn(errors[name])
        progress.stage("verify", len(names), len(names), "tables")
    return VerifyReport(
        lsn=lsn,
        equal=all(comparison.equal for comparison in comparisons.values()),
        tables=comparisons,
        drain=drained,
        publish=published,
        errors=errors,
    )


def _compared(
    settings: Settings,
    lake: Lake,
    source: PublishedTable,
    state: TableState | None,
    exported: str,
    files: Mapping[int, frozenset[tuple[int, int]]],
    spark_factory: Callable[[], "SparkSession"],
    path: str,
    version: int,
) -> TableComparison:
    """Compare one table of the source, as the exported snapshot shows it, with a version of its `current`."""
    relation = source.relation
    expected = _copy_source(settings, lake, source, exported)
    try:
        # TRUNCATE and rewriting DDL are not MVCC-safe: an older snapshot sees such a table empty.
        with connect(settings.dsn) as conn:
            now = _files(conn, settings.publication, [relation.oid])
        if now.get(relation.oid) != files.get(relation.oid):
            raise SourceUnavailable(f"Table {relation.table} was truncated or rewritten while it was compared; run the comparison again.")
        found = None if state is None else taken(replace(state, relation=relation))
        kept = relation if found is None else found.relation
        arriving = None if found is None or found.arriving is None else schema_json(copy_schema(found.arriving))
        kept_json = schema_json(copy_schema(kept))
        compared = [name for name in kept.column_names if name in relation.column_names]
        result = compare.compare(
            spark_factory(), expected, path, version, key=kept.key, columns=compared, kept_json=kept_json, arriving_json=arriving
        )
    finally:
        compare.remove(expected)
    return TableComparison(
        equal=not (result.missing or result.extra or result.different),
        rows=result.rows,
        missing=result.missing,
        extra=result.extra,
        different=result.different,
    )


def _files(conn: Connection, publication: str, oids: Collection[int]) -> dict[int, frozenset[tuple[int, int]]]:
    """Return the files in which the published tables `oids` are stored, by the table's oid."""
    found = storages(conn, publication, oids)
    return {oid: frozenset((file.oid, file.node) for file in storage.files) for oid, storage in found.items()}


def _copy_source(settings: Settings, lake: Lake, table: PublishedTable, exported: str) -> str:
    """Copy the table, as the exported snapshot shows it, into a new Delta table in the lake, and return its path."""
    path = f"{lake.ledger('verify')}/{uuid.uuid4().hex}"
    whole = Range(table.relation, copy.ChunkBounds(None, None), table.row_filter)
    with TableRows(settings.dsn, [whole], exported, settings.largest_row, key=settings.protection.key) as rows:
        pieces = rows.pieces(0)
        first = next(pieces, copy_schema(table.relation).empty_table())
        compare.write(path, pa.RecordBatchReader.from_batches(first.schema, _batches(chain([first], pieces))))
    return path


def _batches(pieces: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        yield from piece.to_batches()

"""Verify that `current` equals the source: read both at one LSN and compare them value by value."""

import secrets
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pgwal_pipeline.decode.copy import copy_schema
from pgwal_pipeline.lake import compare, current
from pgwal_pipeline.lake.changed_keys import changed_keys
from pgwal_pipeline.lake.delta import side_by_side
from pgwal_pipeline.lake.faults import table_work
from pgwal_pipeline.lake.fold import Shape
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger, TableState
from pgwal_pipeline.lake.records import Proof
from pgwal_pipeline.lake.standing import written_rows
from pgwal_pipeline.messages.errors import LakeError, SourceRefused, SourceUnavailable, TableError
from pgwal_pipeline.messages.progress import Progress
from pgwal_pipeline.pipeline.drain import drain
from pgwal_pipeline.pipeline.proving import Candidate, Choice, choose, proven_part
from pgwal_pipeline.pipeline.publish import publish
from pgwal_pipeline.pipeline.published import Published
from pgwal_pipeline.pipeline.reports import PublishReport, TableComparison, TableProof, VerifyReport
from pgwal_pipeline.pipeline.schema_policy import Taken, taken
from pgwal_pipeline.pipeline.table_rows import Range, TableRows
from pgwal_pipeline.postgres import catalog, copy, parts, slot
from pgwal_pipeline.postgres.catalog import PublishedTable
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.storage import storages
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import Relation, TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OVER = 1.5
"""After so many times the budget what is left waits for another run: the estimates were wrong."""
_DUE = 0.5
"""A table that can only be compared whole, and takes longer than the budget, is compared after this part of PGWAL_VERIFY_EVERY."""
_MOST_CHANGED = 50_000
"""So many changed keys are compared one by one at most."""
_EXAMPLES = 10


def verify(
    settings: Settings,
    spark_factory: Callable[[], "SparkSession"],
    tables: Collection[TableName] | None = None,
    *,
    progress: Progress,
) -> VerifyReport:
    """Bring `current` to the LSN of a snapshot of the source, and compare the two there.

    LSN and snapshot come from a temporary slot: its exported snapshot sees exactly the transactions with a commit LSN below its consistent
    point. Creating it waits for open transactions, PGWAL_BLOCKED_TIMEOUT at most. `tables` are compared whole. Without them all published
    ones are compared as `proving.choose` says, for about PGWAL_VERIFY_BUDGET; the report's `publish` names those in error. A table that
    cannot be compared by its own fault is in `errors`, and the others are compared.

    Raises SourceRefused for one of `tables` that has no published `current`, or if no table has one, and SourceUnavailable for a table that
    was truncated or rewritten meanwhile.
    """
    lake = Lake(settings.lake)
    ledger = Ledger(lake)
    with connect(settings.dsn) as conn:
        files = _files(conn, settings.publication, [relation.oid for relation in catalog.tables_of(conn, settings.publication)])
    probe = f"{settings.slot}_v_{secrets.token_hex(4)}"
    with slot.create_with_snapshot(settings.dsn, probe, blocked_timeout=settings.blocked_timeout, warn=progress.warn) as (lsn, exported):
        drained = drain(settings, end_lsn=lsn, progress=progress)
        published = publish(settings, spark_factory, progress=progress)
        with connect(settings.dsn) as conn:
            published_now = Published(conn, settings.publication, settings.protection).now()
        sources = {table.relation.table: table for table in published_now.values()}
        found = sorted(table for table, found in published.tables.items() if found.version is not None)
        names = found if tables is None else list(tables)
        if sources and not names:
            raise SourceRefused("No table has been published yet, so there is nothing to compare; run `pgwal sync` first.")
        for name in names:
            pointer = published.tables.get(name)
            if pointer is None or pointer.version is None or name not in sources:
                raise SourceRefused(f"Table {name} has no published current to compare with; `pgwal status` shows its state.")
        comparing = Comparing(settings, lake, ledger, ledger.tables(), spark_factory, exported, lsn, files, published)
        candidates = comparing.candidates(names)
        choice = Choice(tuple(names), {})
        if tables is None:
            choice = choose(candidates.values(), settings.verify_budget, settings.verify_every, datetime.now(UTC))
        chosen = [*choice.whole, *choice.parts]
        comparisons: dict[TableName, TableComparison] = {}
        shown: dict[TableName, TableProof] = {}
        proofs: list[Proof] = []
        errors = {}
        left = list(choice.left)
        began = time.monotonic()
        for done, name in enumerate(chosen):
            progress.stage("verify", done, len(chosen), "tables")
            if tables is None and comparisons and time.monotonic() - began > settings.verify_budget * _OVER:
                left += chosen[done:]
                break
            try:
                with table_work(
                    lake, name, "compare", oid=sources[name].relation.oid, answers=lambda: spark_factory().sql("SELECT 1").collect()
                ):
                    compared = comparing.table(sources[name], candidates[name], choice.parts.get(name))
                if compared is None:
                    left.append(name)
                    continue
                comparisons[name], shown[name], proof = compared
                proofs += [proof] if proof is not None else []
            except TableError as error:
                errors[name] = f"Table {name} could not be compared: {error} `pgwal resnapshot '{name}'` reads it again."
                progress.warn(errors[name])
        progress.stage("verify", len(chosen), len(chosen), "tables")
    if proofs:
        ledger.record_proofs(proofs)
    return VerifyReport(
        lsn=lsn,
        equal=all(comparison.equal for comparison in comparisons.values()),
        tables=comparisons,
        drain=drained,
        publish=published,
        errors=errors,
        left=tuple(sorted(left)),
        proofs=shown,
    )


@dataclass(frozen=True)
class Comparing:
    """The comparison of tables at one LSN, as the exported snapshot shows them, with the versions that a publish brought there."""

    settings: Settings
    lake: Lake
    ledger: Ledger
    states: Mapping[TableName, TableState]
    spark_factory: Callable[[], "SparkSession"]
    exported: str
    lsn: int
    files: Mapping[int, frozenset[tuple[int, int]]]
    published: PublishReport

    def candidates(self, names: Iterable[TableName]) -> dict[TableName, Candidate]:
        """Return the tables with how large they are and how far they are proven."""
        states, proofs = self.states, self.ledger.proofs()

        def of(name: TableName) -> Candidate:
            location = states[name].location if name in states else name
            try:
                rows = written_rows(self.published.tables[name].path)
            except LakeError:  # damaged: the comparison says so
                rows = 0
            return Candidate(name, rows, proofs.get(location, Proof(location)))

        return {one.table: one for one in side_by_side(of, list(names))}

    def table(
        self, source: PublishedTable, candidate: Candidate, rows: int | None
    ) -> tuple[TableComparison, TableProof, Proof | None] | None:
        """Compare a table, about `rows` rows of it or with None the whole; return also how far it is proven now, None if it differs.

        A table that cannot be compared in parts is compared whole if that is due, else not at all, which gives None.
        """
        began, now = time.monotonic(), datetime.now(UTC)
        relation, path = source.relation, self.published.tables[candidate.table].path
        generation = current.generation(path)
        proof = candidate.proof if candidate.proof.generation == generation else Proof(candidate.proof.location, generation)
        if rows is not None and not parts.has_order(self.settings.dsn, relation):
            if proof.proven_at is not None and (now - proof.proven_at).total_seconds() < self.settings.verify_every * _DUE:
                return None
            rows = None
        if rows is None:
            found = self._compared(source, copy.ChunkBounds(None, None))
            seconds = time.monotonic() - began
            after = Proof(proof.location, generation, self.lsn, now, rows=found.rows, seconds=seconds)
        else:
            end = parts.part_end(self.settings.dsn, relation, proof.cursor, rows)
            ranged = self._compared(source, copy.ChunkBounds(proof.cursor, end), in_part=True)
            changed = self._changed(source, proof)
            found = self._counted(source, _both(ranged, changed))
            seconds = time.monotonic() - began
            after = proven_part(proof, self.lsn, end, changed is not None, ranged.rows, seconds, now)
        known = after if found.equal else proof
        differences = _differences(relation, found.examples)
        shown = TableProof(rows is None, seconds, known.verified_through, known.proven_at, differences)
        comparison = TableComparison(found.equal, found.rows, found.missing, found.extra, found.different)
        return comparison, shown, after if found.equal else None

    def _compared(
        self, source: PublishedTable, bounds: copy.ChunkBounds, *, in_part: bool = False, keys: str | None = None, only_keys: bool = False
    ) -> compare.Comparison:
        """Compare rows of one table of the source, as the exported snapshot shows it, with a version of its `current`.

        `in_part`: only rows of `current` with a key that the source has in the range. `keys` is the path of the keys that are compared.
        """
        relation = source.relation
        if only_keys:
            chosen = tuple(column for column in relation.columns if column.name in relation.key)
            source = replace(source, relation=replace(relation, columns=chosen))
        expected = _copy_source(self.settings, self.lake, source, self.exported, bounds)
        try:
            # TRUNCATE and rewriting DDL are not MVCC-safe: an older snapshot sees such a table empty.
            with connect(self.settings.dsn) as conn:
                now = _files(conn, self.settings.publication, [relation.oid])
            if now.get(relation.oid) != self.files.get(relation.oid):
                raise SourceUnavailable(
                    f"Table {relation.table} was truncated or rewritten while it was compared; run the comparison again."
                )
            pointer = self.published.tables[relation.table]
            found = self._taken(source)
            kept = {column.name for column in found.relation.columns}
            return compare.compare(
                self.spark_factory(),
                expected,
                pointer.path,
                pointer.version,
                key=relation.key,
                columns=[name for name in source.relation.column_names if name in kept],
                kept_json=found.schema_json,
                arriving_json=found.arriving_json,
                keys=expected if in_part else keys,
            )
        finally:
            compare.remove(expected)

    def _taken(self, source: PublishedTable) -> Taken:
        """What `current` takes of a table."""
        relation = source.relation
        state = self.states.get(relation.table)
        return Taken(relation, ()) if state is None else taken(replace(state, relation=relation))

    def _changed(self, source: PublishedTable, proof: Proof) -> compare.Comparison | None:
        """Compare the keys that changed since a proof; None if they are not known, or too many."""
        relation, since = source.relation, proof.verified_through
        if since is None or any(window.state == "pruned" for window in self.ledger.windows(since)):
            return None
        keys = f"{self.lake.ledger('verify')}/{uuid.uuid4().hex}"
        try:
            shape = Shape(relation.table, relation.key, self._taken(source).relation.column_names)
            path = self.published.tables[relation.table].path
            raw = self.lake.raw(proof.location)
            found = changed_keys(self.spark_factory(), raw, path, shape, since, self.lsn, _MOST_CHANGED, keys)
            if not found:
                return None if found is None else compare.Comparison(0, 0, 0, 0)
            return self._compared(source, copy.ChunkBounds(None, None, tuple(found)), keys=keys)
        finally:
            compare.remove(keys)

    def _counted(self, source: PublishedTable, found: compare.Comparison) -> compare.Comparison:
        """Count the rows too: a range of the source does not show rows that only `current` has. If there are such all keys are compared."""
        pointer = self.published.tables[source.relation.table]
        assert pointer.version is not None
        ours = compare.count(self.spark_factory(), pointer.path, pointer.version, source.relation.key)
        theirs = parts.count_rows(self.settings.dsn, self.exported, source.relation, source.row_filter)
        if theirs - ours == found.missing - found.extra:
            return found
        keyed = self._compared(source, copy.ChunkBounds(None, None), only_keys=True)
        return replace(found, missing=keyed.missing, extra=keyed.extra, examples=(*keyed.examples, *found.examples)[:_EXAMPLES])


def _both(one: compare.Comparison, other: compare.Comparison | None) -> compare.Comparison:
    if other is None:
        return one
    counts = (getattr(one, name) + getattr(other, name) for name in ("rows", "missing", "extra", "different"))
    return compare.Comparison(*counts, examples=tuple(dict.fromkeys((*one.examples, *other.examples))))


def _differences(relation: Relation, examples: Iterable[compare.Example]) -> tuple[Mapping[str, Any], ...]:
    """Rows that differ, as reports name them: without the values of protected columns."""
    protected = {column.name for column in relation.columns if column.protection is not None}
    return tuple(
        {
            "key": {name: None if name in protected else value for name, value in zip(relation.key, example.key, strict=True)},
            "kind": example.kind,
            "columns": list(example.columns),
        }
        for example in examples
    )


def _files(conn: Connection, publication: str, oids: Collection[int]) -> dict[int, frozenset[tuple[int, int]]]:
    """Return the files in which the published tables `oids` are stored, by the table's oid."""
    found = storages(conn, publication, oids)
    return {oid: frozenset((file.oid, file.node) for file in storage.files) for oid, storage in found.items()}


def _copy_source(settings: Settings, lake: Lake, table: PublishedTable, exported: str, bounds: copy.ChunkBounds) -> str:
    """Copy a range of the table, as the exported snapshot shows it, into a new Delta table in the lake, and return its path."""
    path = f"{lake.ledger('verify')}/{uuid.uuid4().hex}"
    whole = Range(table.relation, bounds, table.row_filter)
    with TableRows(settings.dsn, [whole], exported, settings.largest_row, key=settings.protection.key) as rows:
        pieces = rows.pieces(0)
        first = next(pieces, copy_schema(table.relation).empty_table())
        compare.write(path, pa.RecordBatchReader.from_batches(first.schema, _batches(chain([first], pieces))))
    return path


def _batches(pieces: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        yield from piece.to_batches()

"""Say before a migration what it would cost: which tables would be read again, and which columns would lose their source.

It is run in a copy of the source's structure, and the catalogs before and after it are compared as a drain compares them. The source is
only asked for its catalog.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pgwal_pipeline.lake.ledger import TableState
from pgwal_pipeline.lake.stream_facts import StreamFacts
from pgwal_pipeline.pipeline import scratch
from pgwal_pipeline.pipeline.alterations import AGAIN, CatalogEntry
from pgwal_pipeline.pipeline.schema_policy import differences, summary
from pgwal_pipeline.pipeline.table_review import catalog_entries, foreseen
from pgwal_pipeline.postgres.candidates import candidate_tables
from pgwal_pipeline.postgres.catalog import fetch, running_transactions
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.followed import followed_tables
from pgwal_pipeline.postgres.publication import COMMENT, is_ours_to_make
from pgwal_pipeline.postgres.sizes import table_sizes
from pgwal_pipeline.postgres.structure import structure
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import Relation, TableName
from pgwal_pipeline.values.table_options import EXCLUDED, FREEZE, STOP
from pgwal_pipeline.values.xid import Snapshot


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a migration means for one table: whether it would be read again, or no longer followed, and why; None if nothing would change.

    `bytes` is the table's size at the source. `lost` are its columns that would be gone.
    """

    read_again: bool
    why: str | None
    bytes: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preview:
    """What a migration means for each table that is followed, and what the copy in which it was tried lacks."""

    tables: Mapping[TableName, Outcome]
    warnings: tuple[str, ...]

    def to_json(self, columns_lost: Iterable[Mapping[str, str]], warnings: Iterable[str] = ()) -> dict[str, Any]:
        """Return the object that `pgwal preview --json` prints."""
        return {
            "tables": {
                str(table): {"read_again": found.read_again, "why": found.why, "bytes": found.bytes}
                for table, found in sorted(self.tables.items())
            },
            "columns_lost": [dict(column) for column in columns_lost],
            "warnings": [*self.warnings, *warnings],
        }


def preview(settings: Settings, file: Path) -> Preview:
    """Run the statements of `file` in a copy of the source's structure, and say what would come of them.

    Raises PgwalError with Postgres's own message if a statement fails there, and as `connect` does if the source cannot be reached.
    """
    text = scratch.read_file(file)
    with connect(settings.dsn) as conn:
        published = _published(conn, settings)
        copied, through_root, ours = structure(conn), _through_root(conn, settings), is_ours_to_make(conn, settings.publication)
        sizes = table_sizes(conn, list(published))
    with scratch.scratch_copy(copied) as copy:
        scratch.publish(copy, settings.publication, list(published.values()), through_root=through_root, comment=COMMENT if ours else None)
        scratch.note_truncates(copy, [table.name for table in copied.tables])
        before = catalog_entries(copy.conn, settings.publication, settings.protection)
        scratch.run(copy, str(file), text)
        after = catalog_entries(copy.conn, settings.publication, settings.protection)
        followed = {found.table: settings.protection.relation(found) for found in _followed(copy.conn, settings)}
        facts = StreamFacts(truncated=scratch.truncated(copy))
        ended = Snapshot.parse(running_transactions(copy.conn))
        refused = {found.oid: found.reason for found in candidate_tables(copy.conn, settings.tables) if found.reason is not None}
        warnings = tuple(copy.lacking)
    by_oid = {entry.relation.oid: entry for entry in after.values()}
    listed = {table for table, named in published.items() if " (" in named}
    return Preview(
        {
            table: replace(
                _outcome(settings, entry, by_oid.get(entry.relation.oid), followed.get(table), refused, facts, ended, table in listed),
                bytes=sizes[table].bytes if table in sizes else 0,
            )
            for table, entry in before.items()
        },
        warnings,
    )


def _outcome(
    settings: Settings,
    before: CatalogEntry,
    now: CatalogEntry | None,
    namesake: Relation | None,
    refused: Mapping[int, str],
    facts: StreamFacts,
    ended: Snapshot,
    listed: bool,
) -> Outcome:
    """Compare a table's catalog entries. `namesake` is the followed table that has its name afterwards."""
    had = before.relation.column_names
    if now is None:
        if namesake is not None:
            lost = tuple(name for name in had if name not in namesake.column_names)
            return Outcome(True, "it would be dropped and made again", 0, lost)
        return Outcome(False, "it would be dropped, or would leave the publication", 0, had)
    if (reason := refused.get(now.relation.oid)) is not None:
        return Outcome(True, f"it would be left out: {reason}", 0)
    lost = tuple(name for name in had if name not in now.relation.column_names)
    state = TableState(
        table=before.relation.table,
        oid=before.relation.oid,
        state="ready",
        key=before.relation.key,
        relation=before.relation,
        storage=before.storage,
        generation="-",
        published="-",
        options=before.options.to_text(),
    )
    found = foreseen(state, before, now, facts, ended, rewrites=settings.on_rewrite == "resnapshot")
    again = found.state == "pending"
    why = (found.reason or "").removeprefix(AGAIN) or None
    if not again and listed and _wanted(now) - _wanted(before):
        again, why = True, "its list of published columns would change"
    changed = differences(before.relation, now.relation)
    if changed and before.options.on_schema_change == STOP:
        held = f"it would wait for `pgwal accept '{now.relation.table}'` ({summary(changed)})"
        why = f"{held}, and then be read again: {why}" if again else held
    elif found.held is not None:
        why = found.held
    elif changed and before.options.on_schema_change == FREEZE and not again:
        why = f"its columns are frozen ({summary(changed)})"
    return Outcome(again, why, 0, lost)


def _wanted(entry: CatalogEntry) -> set[str]:
    """The columns that are not excluded."""
    return {column.name for column in entry.storage.columns if entry.options.treatment(column.name) != EXCLUDED}


def _published(conn: Connection, settings: Settings) -> dict[TableName, str]:
    """The tables that are followed, or would be, each as ALTER PUBLICATION takes it, with its column list and row filter."""
    relations = _followed(conn, settings)
    shapes: dict[int, str] = {}
    if conn.info.server_version >= 150000:
        rows = fetch(
            conn,
            """SELECT r.prrelid::int8,
                   coalesce(' (' || (SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY a.attnum)
                       FROM pg_catalog.pg_attribute a WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs)) || ')', '')
                   || coalesce(' WHERE (' || pg_catalog.pg_get_expr(r.prqual, r.prrelid) || ')', '')
               FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s""",
            settings.publication,
        )
        shapes = dict(rows)
    return {relation.table: f"{relation.table}{shapes.get(relation.oid, '')}" for relation in relations}


def _followed(conn: Connection, settings: Settings) -> list[Relation]:
    return followed_tables(conn, settings.publication, settings.tables)


def _through_root(conn: Connection, settings: Settings) -> bool:
    rows = fetch(conn, "SELECT pubviaroot FROM pg_catalog.pg_publication WHERE pubname = %s", settings.publication)
    return bool(rows[0][0]) if rows else True


def lost_columns(found: Preview) -> Collection[tuple[TableName, str]]:
    """Return the columns of tables that a migration takes away."""
    return [(table, name) for table, outcome in sorted(found.tables.items()) for name in outcome.lost]

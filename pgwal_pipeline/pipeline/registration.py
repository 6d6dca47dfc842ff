"""Register published tables in the catalog of PGWAL_SPARK_CATALOG, under the names and with the comments that they have in Postgres.

The ledger remembers what was registered, so a publish asks the catalog only about tables that are new, renamed, read again or commented on
otherwise. A catalog that fails stops neither the publish nor another table: the ledger keeps the reason, and later publishes try it again.

A table that is gone from the source keeps its entry, as its `current` table stays; a table that now has its name gets the entry.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import Publish, Registration, TableState, pause_after
from pgwal_pipeline.messages.errors import LakeError, PgwalError, SettingError, SourceRefused, SourceUnavailable
from pgwal_pipeline.messages.printable import printable
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.followed import comments
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.catalog_name import CatalogName, CatalogPattern
from pgwal_pipeline.values.own_columns import DELETED_LSN
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LONGEST_PAUSE = timedelta(minutes=10)
_SIDE_BY_SIDE = 4  # tables registered at once
_NAMED = 5  # tables that a warning names

Comments = Mapping[str | None, str]


@dataclass(frozen=True)
class Wanted:
    """A table that is to be in the catalog. `comments` is None while the source cannot be asked for them."""

    table: TableName
    location: TableName
    path: str
    name: CatalogName
    tried: str
    comments: Comments | None = None

    @property
    def digest(self) -> str | None:
        """A digest of the comments."""
        return None if self.comments is None else _digest(sorted((name or "", text) for name, text in self.comments.items()))


@dataclass(frozen=True)
class Plan:
    """What is to be done for `tables`: first the entries `drop` are removed, which these or gone tables have under other names.

    Then the tables are put into the catalog, but for those `refused`, by location, with the reasons.
    """

    tables: tuple[Wanted, ...] = ()
    drop: Mapping[TableName, CatalogName] = field(default_factory=dict)
    refused: Mapping[TableName, str] = field(default_factory=dict)


def register(
    settings: Settings, ledger: Ledger, publish: Publish, spark_factory: "Callable[[], SparkSession]"
) -> tuple[dict[TableName, str], list[str]]:
    """Bring the catalog in step with `publish`; return why tables are not in it, and warnings. Nothing is done without the setting.

    Spark is started only if there is something to do. Errors of the lake's ledger pass through.
    """
    if settings.spark_catalog is None:
        return {}, []
    known, target = ledger.registrations(), _target(settings)
    wanted = _wanted(settings, ledger, publish, target)
    now = datetime.now(UTC)
    work = plan(wanted, known, target, now)
    done: dict[TableName, Registration] = {}
    if work.tables:
        done = _carried_out(ledger, work, known, target, spark_factory, CatalogPattern.parse(settings.spark_catalog).catalog, now)
        ledger.record_registrations(done.values())
    standing = {**known, **done}
    failed = {one.table: found.error for one in wanted if (found := standing.get(one.location)) is not None and found.error is not None}
    return failed, _warnings(failed)


def failing(settings: Settings, ledger: Ledger) -> dict[TableName, str]:
    """Return why tables are not in the catalog, as the last publishes found it; by location."""
    target = _target(settings)
    return {found.location: found.error for found in ledger.registrations().values() if found.error and found.target == target}


def plan(wanted: Collection[Wanted], known: Mapping[TableName, Registration], target: str, now: datetime) -> Plan:
    """Return what is to be done for the tables that are not in the catalog as they should be, or whose next try is due."""
    ours = {at: CatalogName.parse(found.name) for at, found in known.items() if found.name is not None and found.target == target}
    holders: dict[CatalogName, Wanted] = {}
    # Of two tables with one name the one that has it already keeps it.
    for one in sorted(wanted, key=lambda one: (ours.get(one.location) != one.name, one.table)):
        holders.setdefault(one.name, one)
    living = {one.location for one in wanted}
    tables, drop, refused = [], {}, {}
    for one in wanted:
        found = known.get(one.location)
        if found is not None and not _is_due(one, found, now):
            continue
        tables.append(one)
        if holders[one.name] is not one:
            refused[one.location] = f"{one.name} is the entry of table {holders[one.name].table} already."
        else:
            drop |= {at: name for at, name in ours.items() if name == one.name and at not in living}
        if one.location in ours and ours[one.location] != one.name:
            drop[one.location] = ours[one.location]
    return Plan(tuple(tables), drop, refused)


def _is_due(one: Wanted, found: Registration, now: datetime) -> bool:
    same = found.tried == one.tried and one.digest in (None, found.comments)
    if found.error is not None and same:
        return found.retry_at is None or found.retry_at <= now
    return not same


def _wanted(settings: Settings, ledger: Ledger, publish: Publish, target: str) -> list[Wanted]:
    assert settings.spark_catalog is not None
    pattern, states = CatalogPattern.parse(settings.spark_catalog), ledger.tables()
    tables = [(states[table], at.path) for table, at in publish.tables.items() if table in states]
    said = _comments(settings, [state for state, _ in tables])
    return [
        Wanted(
            state.table,
            state.location,
            path,
            pattern.of(state.table),
            # What was read again has been made anew, and columns come and go: both lose comments.
            _digest([target, str(pattern.of(state.table)), state.published, _column_names(settings, state)]),
            None if said is None else said.get(state.oid, {}),
        )
        for state, path in tables
    ]


def _column_names(settings: Settings, state: TableState) -> list[str]:
    kept = settings.table_options.of(state.table).keeps_deleted
    return [*(() if state.relation is None else state.relation.column_names), *([DELETED_LSN] if kept else [])]


def _comments(settings: Settings, states: Iterable[TableState]) -> dict[int, dict[str | None, str]] | None:
    """The comments of tables by their oids; None while the source cannot be asked."""
    try:
        with connect(settings.dsn) as conn:
            return comments(conn, [state.oid for state in states])
    except (SourceUnavailable, SourceRefused, SettingError):
        return None


def _carried_out(
    ledger: Ledger,
    work: Plan,
    known: Mapping[TableName, Registration],
    target: str,
    spark_factory: "Callable[[], SparkSession]",
    catalog: str,
    now: datetime,
) -> dict[TableName, Registration]:
    """Do the work; return the new records of all tables that it was done or tried for."""
    errors, dropped = dict(work.refused), set()
    try:
        if work.drop or len(work.refused) < len(work.tables):
            dropped, failed = _changed(ledger, work, spark_factory, catalog)
            errors |= failed
    except PgwalError as error:  # the catalog as a whole, or Spark
        errors = {one.location: str(error) for one in work.tables} | errors
    done = {}
    for one in work.tables:
        before, error = known.get(one.location), errors.get(one.location)
        if error is None:
            told = one.digest if one.digest is not None or before is None else before.comments
            done[one.location] = Registration(one.location, str(one.name), target, one.tried, told)
            continue
        name = None if before is None or one.location in dropped or before.target != target else before.name
        again = before is not None and before.error is not None and before.tried == one.tried
        failures = before.failures + 1 if again and before is not None else 1
        retry_at = now + min(pause_after(failures), _LONGEST_PAUSE)
        done[one.location] = Registration(one.location, name, target, one.tried, one.digest, printable(error), failures, retry_at)
    return done | {at: replace(known[at], name=None, at=None) for at in dropped if at not in done}


def _changed(
    ledger: Ledger, work: Plan, spark_factory: "Callable[[], SparkSession]", catalog: str
) -> tuple[set[TableName], dict[TableName, str]]:
    """Change the catalog; return the locations whose entries were removed, and why others failed. Raises PgwalError if all fails."""
    from pgwal_pipeline.lake import catalog_entries as entries

    dropped: set[TableName] = set()
    errors: dict[TableName, str] = {}
    with entries.opened(spark_factory(), catalog) as session:
        for location, name in work.drop.items():
            try:
                entries.remove_entry(session, name, ledger.lake.current(location))
                dropped.add(location)
            except LakeError as error:
                errors[location] = str(error)
        to_put = [one for one in work.tables if one.location not in errors and one.location not in work.refused]
        if to_put:
            errors |= _put(session, to_put)
    return dropped, errors


def _put(session: "SparkSession", tables: Collection[Wanted]) -> dict[TableName, str]:
    """Put the tables into the catalog; return the reasons of those for which it failed."""
    from pgwal_pipeline.lake import catalog_entries as entries

    errors: dict[TableName, str] = {}
    schemas: dict[tuple[str, str], Wanted] = {(one.name.catalog, one.name.schema): one for one in tables}
    without: dict[tuple[str, str], str] = {}
    for schema, one in schemas.items():
        try:
            entries.ensure_schema(session, one.name)
        except LakeError as error:
            without[schema] = str(error)

    def put(one: Wanted) -> str | None:
        if (reason := without.get((one.name.catalog, one.name.schema))) is not None:
            return reason
        try:
            if one.comments is not None:
                entries.set_comments(session, one.path, one.comments)
            entries.ensure_entry(session, one.name, one.path)
        except LakeError as error:
            _ask_again(partial(entries.ensure_schema, session, one.name), (one.name.catalog, one.name.schema), without)
            return str(error)
        return None

    with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(tables)), "pgwal-register") as pool:
        for one, error in zip(tables, pool.map(put, tables), strict=True):
            if error is not None:
                errors[one.location] = error
    return errors


def _ask_again(ask: Callable[[], None], schema: tuple[str, str], without: dict[tuple[str, str], str]) -> None:
    """Note that the catalog has failed as a whole, if it has: each further table would wait for it as long."""
    try:
        ask()
    except LakeError as error:
        without[schema] = str(error)


def _warnings(failed: Mapping[TableName, str]) -> list[str]:
    """One warning for each reason, with the tables that it keeps out of the catalog."""
    tables: dict[str, list[TableName]] = {}
    for table, reason in sorted(failed.items()):
        tables.setdefault(reason, []).append(table)
    return [
        f"{'Table' if len(found) == 1 else f'{len(found)} tables:'} {', '.join(map(str, found[:_NAMED]))}"
        f"{', …' if len(found) > _NAMED else ''}: not registered in the catalog. {reason} Later publishes try it again."
        for reason, found in tables.items()
    ]


def _target(settings: Settings) -> str:
    """What tells the catalog that the settings describe from any other, and the lake too, whose paths are in it."""
    where = [settings.spark_catalog, settings.lake, settings.spark_remote, sorted(settings.spark_conf.items())]
    return _digest(where)[:8]  # short, for there may be passwords in the settings


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]

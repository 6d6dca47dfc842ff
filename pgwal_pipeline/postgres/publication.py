"""Create the publication if there is none, keep it in step with the globs if it is ours, and use it as it is if it is not.

Ours is recognized by its comment. It names its tables one by one, so that it never holds a table whose own writes would then fail.
"""

from dataclasses import dataclass

import psycopg2
from psycopg2 import errors

from pgwal_pipeline.messages.errors import SettingError, SourceRefused
from pgwal_pipeline.postgres.candidates import Candidate, candidate_tables
from pgwal_pipeline.postgres.catalog import Connection, tables_of
from pgwal_pipeline.postgres.dsn import translate
from pgwal_pipeline.postgres.publication_shape import EVERYTHING, Shapes, Wanted, reshaped, shapes
from pgwal_pipeline.values.relation import TableName, quote_ident

COMMENT = "managed by pgwal_pipeline"

_LOCK_TIMEOUT = "5s"
_LOCK_TIMEOUT_EACH = "2s"  # for each table added or dropped singly because one was locked; longer than autovacuum takes to give way
_TABLES_SHOWN = 20
_OF_EXPRESSIONS = ("42", "22", "0A")  # classes of errors that a row filter meets; that a right is lacking is found before


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as `ensure` leaves it.

    `tables` are those that it holds, `added` those that this call added, `skipped` those that the globs match but that it must leave out,
    with the reason (always empty if it is not ours). `unshaped` are tables of ours that were locked, so that what is sent of them could not
    be altered as their options have it. `joined_xid` is set if `added` is not empty: transactions that wrote to an added
    table before it was published have a lower xid, so once no transaction below it runs, all of them have ended.
    """

    name: str
    oid: int
    ours: bool
    tables: tuple[TableName, ...]
    added: tuple[TableName, ...]
    skipped: dict[TableName, str]
    joined_xid: int | None = None
    unshaped: frozenset[TableName] = frozenset()


@dataclass(frozen=True, slots=True)
class _Found:
    """A publication in the catalog, and our rights to it; `in_step`: whether it has the options that ours must have."""

    oid: int
    ours: bool
    owner: str
    owned: bool
    in_step: bool


def ensure(conn: Connection, name: str, globs: str, wanted: Wanted = EVERYTHING) -> Publication:
    """Create the publication, or bring ours in step with `globs` (as in PGWAL_TABLES); leave one that is not ours as it is.

    `wanted` says what is sent of each table.

    A failure leaves the source as it was. A table that the role does not own, and so may not add, is an error when the publication is
    created; later it is skipped with that reason, so that somebody's new table does not stop the others. A table that stays locked for some
    seconds is skipped too, and added the next time.

    Raises SourceRefused, with the SQL for the owner, if the role's rights do not suffice, and on a standby if there is something to do.
    `conn` must not be inside a transaction.
    """
    try:
        return _ensure(conn, name, globs, wanted)
    except psycopg2.Error as error:
        filtered = [glob for glob, given in wanted.options.rules if dict(given).get("rows")]
        if filtered and (error.pgcode or "")[:2] in _OF_EXPRESSIONS and not isinstance(error, errors.InsufficientPrivilege):
            said = (error.diag.message_primary or "").rstrip(".")
            raise SettingError(
                f"PGWAL_TABLE_OPTIONS has an option rows (of {', '.join(filtered)}) that the source does not take as a row filter: {said}."
            ) from error
        raise translate(error, f"bringing publication {name} in step with PGWAL_TABLES") from error


def is_ours_to_make(conn: Connection, name: str) -> bool:
    """Return whether the publication is ours, or there is none yet."""
    found = _find(conn, name)
    return found is None or found.ours


def oid(conn: Connection, name: str) -> int | None:
    """Return the publication's oid, None if there is none. A publication that was dropped and created again has another oid."""
    try:
        rows = conn.execute("SELECT oid::int8 FROM pg_catalog.pg_publication WHERE pubname = %s", [name]).fetchall()
    except psycopg2.Error as error:
        raise translate(error, f"reading publication {name}") from error
    return rows[0][0] if rows else None


def drop(conn: Connection, name: str) -> bool:
    """Drop the publication if it is ours, and return whether it did. Raises SourceRefused if the role does not own it."""
    try:
        found = _find(conn, name)
        if found is None or not found.ours:
            return False
        conn.execute(f"DROP PUBLICATION {quote_ident(name)}".encode())
    except psycopg2.Error as error:
        raise translate(error, f"dropping publication {name}") from error
    return True


def creation_sql(conn: Connection, name: str, globs: str, wanted: Wanted = EVERYTHING) -> str:
    """Return the statement with which an owner of all tables, or a superuser, creates the publication as `ensure` would (for `doctor`)."""
    found = [candidate for candidate in candidate_tables(conn, globs) if candidate.reason is None]
    return _create(name, [candidate.table for candidate in found], conn.info.server_version, shapes(conn, found, wanted))


def refusal(conn: Connection, name: str, globs: str, wanted: Wanted = EVERYTHING) -> str | None:
    """Return why `ensure` would refuse to bring ours in step, with the SQL for its owner; None if it would not. Changes nothing."""
    found = _find(conn, name)
    if found is None or not found.ours:
        return None
    candidates = {candidate.oid: candidate for candidate in candidate_tables(conn, globs) if candidate.reason is None}
    _, _, statements = _alterations(conn, name, found, candidates, shapes(conn, candidates.values(), wanted), wanted)
    return _refusal(conn, name, found, "; ".join(statements))


def _ensure(conn: Connection, name: str, globs: str, wanted: Wanted) -> Publication:
    with conn.transaction():
        if not _standby(conn):
            # Without the lock, two runs at once would both create it. The lock is per database, as the publication is.
            _run(conn, f"SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
            conn.execute("SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%s, 0))", [f"pgwal publication {name}"])
        found = _find(conn, name)
        if found is not None and not found.ours:
            return Publication(name, found.oid, False, tuple(relation.table for relation in tables_of(conn, name)), (), {})
        candidates = candidate_tables(conn, globs)
        skipped = {
            candidate.table: reason
            for candidate in candidates
            if (reason := candidate.reason or wanted.barred.get(candidate.table)) is not None
        }
        joinable = {candidate.oid: candidate for candidate in candidates if candidate.table not in skipped}
        shaped = shapes(conn, joinable.values(), wanted)
        unshaped: list[TableName] = []
        if found is None:
            _require_creation(conn, name, list(joinable.values()), shaped)
            tables = _made(conn, name, [candidate.table for candidate in joinable.values()], skipped, shaped)
            _run(conn, f"COMMENT ON PUBLICATION {quote_ident(name)} IS '{COMMENT}'")
            found = _find(conn, name)
            assert found is not None
            added = tables
        else:
            added = _alter(conn, name, found, joinable, skipped, shaped, wanted, unshaped)
            tables = tuple(sorted(_held(conn, found.oid).values()))
        barred = _drop_unsound(conn, name, found.oid, joinable, skipped) if shaped else frozenset()
        added, tables = (tuple(table for table in some if table not in barred) for some in (added, tables))
    joined_xid = None
    if added:
        # Read after the commit: transactions that ran at that moment have a lower xid.
        joined_xid = conn.execute("SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint").fetchall()[0][0]
    return Publication(name, found.oid, True, tables, added, skipped, joined_xid, frozenset(unshaped))


def _alter(
    conn: Connection,
    name: str,
    found: _Found,
    joinable: dict[int, Candidate],
    skipped: dict[TableName, str],
    shaped: Shapes,
    wanted: Wanted,
    unshaped: list[TableName],
) -> tuple[TableName, ...]:
    """Bring ours in step, and return the tables added. Those that cannot be added go into `skipped`, those not altered into `unshaped`."""
    joining, reshaping, statements = _alterations(conn, name, found, joinable, shaped, wanted)
    refused = _refusal(conn, name, found, _shown("; ".join(statements)))
    if refused is not None:
        raise SourceRefused(refused)
    role = _role(conn)
    for candidate in joining:
        if not candidate.owned:
            skipped[candidate.table] = (
                f"role {role} does not own it, so it cannot be published; run GRANT {quote_ident(candidate.owner)} TO {quote_ident(role)}"
            )
    owned = [candidate.table for candidate in joining if candidate.owned]
    try:
        with conn.transaction():
            for statement in statements:
                _run(conn, statement)
    except errors.LockNotAvailable:
        leaving = [table for oid, table in _held(conn, found.oid).items() if oid not in joinable]
        _one_by_one(conn, [(table, [_dropping(name, [table])]) for table in leaving], {})  # one that stays is still followed
        if not found.in_step:
            _run(conn, _in_step(name, conn.info.server_version))
        again = [(table, [_dropping(name, [table]), _adding(name, [table], shaped)]) for table in reshaping]
        unshaped += set(reshaping).difference(_one_by_one(conn, again, {}))
        return _one_by_one(conn, [(table, [_adding(name, [table], shaped)]) for table in owned], skipped)
    return tuple(owned)


def _made(conn: Connection, name: str, tables: list[TableName], skipped: dict[TableName, str], shaped: Shapes) -> tuple[TableName, ...]:
    """Create the publication, and return the tables that it holds. Tables that are locked are put in `skipped`."""
    try:
        with conn.transaction():
            _run(conn, _create(name, tables, conn.info.server_version, shaped))
    except errors.LockNotAvailable:
        _run(conn, _create(name, (), conn.info.server_version, {}))
        return _one_by_one(conn, [(table, [_adding(name, [table], shaped)]) for table in tables], skipped)
    return tuple(tables)


def _one_by_one(conn: Connection, work: list[tuple[TableName, list[str]]], skipped: dict[TableName, str]) -> tuple[TableName, ...]:
    """Run the statements of each table by themselves, and return the tables. Those that stay locked are put in `skipped`."""
    _run(conn, f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_EACH}'")
    done = []
    for table, statements in work:
        try:
            with conn.transaction():
                for statement in statements:
                    _run(conn, statement)
            done.append(table)
        except errors.LockNotAvailable:
            skipped[table] = f"{_holders(conn, table)} a lock on it, so it could not be published yet; the next run tries again"
    return tuple(done)


def _drop_unsound(
    conn: Connection, name: str, oid: int, joinable: dict[int, Candidate], skipped: dict[TableName, str]
) -> frozenset[TableName]:
    """Take out tables whose row filter would make their own UPDATE and DELETE fail, and put them in `skipped`.

    Nobody else has seen them in the publication yet, or their writes fail already.
    """
    rows = conn.execute(
        """SELECT f.relid, pg_catalog.array_agg(DISTINCT a.attname::text) FROM (
               SELECT r.prrelid AS relid, (pg_catalog.regexp_matches(r.prqual::text, ':varattno ([0-9]+)', 'g'))[1]::int2 AS number
               FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = %s AND r.prqual IS NOT NULL) f
           JOIN pg_catalog.pg_attribute a ON a.attrelid = f.relid AND a.attnum = f.number
           GROUP BY 1""",
        [oid],
    ).fetchall()
    gone = []
    for relid, columns in rows:
        candidate = joinable.get(relid)
        lacking = (
            set()
            if candidate is None
            else {column for identity in candidate.identities if identity is not None for column in columns if column not in identity}
        )
        if candidate is not None and lacking:
            gone.append(candidate.table)
            skipped[candidate.table] = (
                f"its option rows uses column {quote_ident(min(lacking))}, which is not part of its replica identity: once published, its "
                f"UPDATE and DELETE would fail; run ALTER TABLE {candidate.table} REPLICA IDENTITY FULL"
            )
    if gone:
        _run(conn, _dropping(name, gone))
    return frozenset(gone)


def _holders(conn: Connection, table: TableName) -> str:
    """Return who holds a lock on a table, as the start of a sentence that goes on with `a lock on it`."""
    pids = conn.execute(
        "SELECT DISTINCT l.pid FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_class c ON c.oid = l.relation "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE l.granted AND l.pid <> pg_catalog.pg_backend_pid() "
        "AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()) "
        "AND n.nspname = %s AND c.relname = %s AND l.mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')",
        [table.schema, table.name],
    ).fetchall()
    return f"pid {', '.join(str(pid) for (pid,) in pids)} holds" if pids else "somebody holds"


def _alterations(
    conn: Connection, name: str, found: _Found, joinable: dict[int, Candidate], shaped: Shapes, wanted: Wanted
) -> tuple[list[Candidate], list[TableName], list[str]]:
    """Return the tables that ours lacks, those of which something else is to be sent, and the statements to bring it in step.

    The statements leave out tables that the role does not own.
    """
    held = _held(conn, found.oid)
    leaving = [table for oid, table in held.items() if oid not in joinable]
    joining = [candidate for oid, candidate in joinable.items() if oid not in held]
    reshaping = reshaped(conn, found.oid, [candidate for oid, candidate in joinable.items() if oid in held], shaped, wanted)
    foreign = {candidate.table: candidate.owner for candidate in joinable.values() if not candidate.owned}
    for table in reshaping:
        if table in foreign and wanted.options.of(table).rows is not None:
            role = _role(conn)
            raise SourceRefused(
                f"Role {role} does not own {table}, so what publication {name} sends of it cannot be altered to its option rows; "
                f"run GRANT {quote_ident(foreign[table])} TO {quote_ident(role)}."
            )
    reshaping = [table for table in reshaping if table not in foreign]  # an excluded column that is sent is dropped where it arrives
    statements = []
    if leaving or reshaping:
        statements.append(_dropping(name, [*leaving, *reshaping]))
    if not found.in_step:
        statements.append(_in_step(name, conn.info.server_version))
    adding = [*reshaping, *(candidate.table for candidate in joining if candidate.owned)]
    if adding:
        statements.append(_adding(name, adding, shaped))
    return joining, reshaping, statements


def _refusal(conn: Connection, name: str, found: _Found, statements: str) -> str | None:
    """Return why `statements` cannot be run here; None if they can, or if they are empty."""
    if statements and _standby(conn):
        return (
            f"Publication {name} is not in step with PGWAL_TABLES, and the source is a standby, where it cannot be altered; "
            f"on its primary run {statements}."
        )
    if statements and not found.owned:
        role = _role(conn)
        return (
            f"Publication {name} is not in step with PGWAL_TABLES, and role {role} does not own it; "
            f"have {found.owner} run {statements}, or GRANT {quote_ident(found.owner)} TO {quote_ident(role)}."
        )
    return None


def _require_creation(conn: Connection, name: str, wanted: list[Candidate], shaped: Shapes) -> None:
    statement = _create(name, [candidate.table for candidate in wanted], conn.info.server_version, shaped)
    if _standby(conn):
        raise SourceRefused(
            f"There is no publication {name}, and the source is a standby, where none can be made; on its primary run {_shown(statement)}."
        )
    role = _role(conn)
    database, may_create = conn.execute(
        "SELECT current_database()::text, pg_catalog.has_database_privilege(current_database(), 'CREATE')"
    ).fetchall()[0]
    barred = [candidate for candidate in wanted if not candidate.owned]
    if may_create and not barred:
        return
    lacks = []
    if not may_create:
        lacks.append(f"may not create a publication in database {database}")
    if barred:
        more = f" and {len(barred) - 1} more of the tables" if len(barred) > 1 else ""
        lacks.append(f"does not own {barred[0].table}{more}")
    raise SourceRefused(
        f"Role {role} {' and '.join(lacks)}, so publication {name} cannot be made; have a superuser, or an owner of the tables with "
        f"CREATE on the database, run {_shown(statement)}, or set PGWAL_TABLES to tables that {role} owns."
    )


def _create(name: str, tables: list[TableName] | tuple[TableName, ...], server_version: int, shaped: Shapes) -> str:
    listed = f" FOR TABLE {_table_list(tables, shaped)}" if tables else ""
    return f"CREATE PUBLICATION {quote_ident(name)}{listed} WITH ({_options(server_version)})"


def _adding(name: str, tables: list[TableName], shaped: Shapes) -> str:
    return f"ALTER PUBLICATION {quote_ident(name)} ADD TABLE {_table_list(tables, shaped)}"


def _dropping(name: str, tables: list[TableName]) -> str:
    return f"ALTER PUBLICATION {quote_ident(name)} DROP TABLE {_table_list(tables, {})}"


def _in_step(name: str, server_version: int) -> str:
    return f"ALTER PUBLICATION {quote_ident(name)} SET ({_options(server_version)})"


def _options(server_version: int) -> str:
    generated = ", publish_generated_columns = stored" if server_version >= 180000 else ""
    return f"publish = 'insert, update, delete, truncate', publish_via_partition_root = true{generated}"


def _table_list(tables: list[TableName] | tuple[TableName, ...], shaped: Shapes) -> str:
    # ONLY: tables that inherit from one of these are separate tables. For a partitioned table it changes nothing.
    return ", ".join(f"ONLY {table}{shaped[table].sql if table in shaped else ''}" for table in tables)


def _shown(statement: str) -> str:
    """Shorten a statement for a message if it names many tables."""
    tables = statement.split(", ONLY ")
    if len(tables) <= _TABLES_SHOWN:
        return statement
    return f"{', ONLY '.join(tables[:_TABLES_SHOWN])}, … (`pgwal doctor` shows all of it)"


def _find(conn: Connection, name: str) -> _Found | None:
    generated = "p.pubgencols = 's'" if conn.info.server_version >= 180000 else "true"
    rows = conn.execute(
        f"""SELECT p.oid, coalesce(pg_catalog.obj_description(p.oid, 'pg_publication') = %s, false),
                pg_catalog.pg_get_userbyid(p.pubowner)::text, pg_catalog.pg_has_role(p.pubowner, 'USAGE'),
                p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate AND p.pubviaroot AND {generated}
            FROM pg_catalog.pg_publication p WHERE p.pubname = %s""".encode(),
        [COMMENT, name],
    ).fetchall()
    return _Found(*rows[0]) if rows else None


def _held(conn: Connection, oid: int) -> dict[int, TableName]:
    """Return the tables that a publication lists, by oid."""
    rows = conn.execute(
        """SELECT c.oid, n.nspname::text, c.relname::text
           FROM pg_catalog.pg_publication_rel r
           JOIN pg_catalog.pg_class c ON c.oid = r.prrelid
           JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
           WHERE r.prpubid = %s""",
        [oid],
    ).fetchall()
    return {row[0]: TableName(row[1], row[2]) for row in rows}


def _run(conn: Connection, statement: str) -> None:
    conn.execute(statement.encode())


def _standby(conn: Connection) -> bool:
    return conn.execute("SELECT pg_catalog.pg_is_in_recovery()").fetchall()[0][0]


def _role(conn: Connection) -> str:
    return conn.execute("SELECT current_user::text").fetchall()[0][0]

"""Check whether a source is set up as the pipeline needs it. Each check reports what it found and how to fix it; nothing is changed."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg2

from pgwal_pipeline.messages.amounts import duration, size
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.postgres import blockers, positions, publication
from pgwal_pipeline.postgres.candidates import candidate_tables
from pgwal_pipeline.postgres.catalog import tables_of
from pgwal_pipeline.postgres.connection import default_of
from pgwal_pipeline.postgres.dsn import connect, describe_dsn, parse_dsn, replication_connection, translate
from pgwal_pipeline.postgres.publication_shape import EVERYTHING, Wanted
from pgwal_pipeline.postgres.slot_state import Connection, SlotState, inspect, require_usable
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.relation import Relation, TableName, quote_ident
from pgwal_pipeline.values.source_dsn import way_of

OLDEST_VERSION = 140000
_OLD_TRANSACTION = 300.0  # seconds
_SHORTEST_SENDER_TIMEOUT = 5.0  # seconds; with less, a busy machine may answer too late
_SHOWN = 5
_DO_AS_IT_SAYS = "Do what the message says, then run `pgwal doctor` again."


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: what was found, and how to fix it. If `ok` is false, the pipeline cannot run; if true, `mend` is advice."""

    name: str
    ok: bool
    found: str
    mend: str | None = None


def doctor_checks(dsn: str, *, slot: str, publication: str, globs: str, wanted: Wanted = EVERYTHING) -> list[Check]:
    """Check everything that the pipeline needs of this source. Raises nothing for what it finds; stops if the source cannot be reached.

    `slot` and `publication` are names and need not exist yet; `globs` is as in PGWAL_TABLES, `wanted` what is
    wanted of the tables.
    """
    try:
        with closing(connect(dsn)) as conn:
            source = _Source(conn, dsn, slot, publication, globs, wanted)
            version = conn.info.server_version
            found = f"{describe_dsn(dsn)}, Postgres {version // 10000}.{version % 10000}"
            if version < OLDEST_VERSION:
                return [Check("source", False, found, f"Upgrade it: the pipeline reads Postgres {OLDEST_VERSION // 10000} and newer.")]
            return [Check("source", True, found), *_all_checks(source)]
    except PgwalError as error:
        return [Check("source", False, str(error), "Do what the message says, then run `pgwal doctor` again: it checks the rest.")]


@dataclass(frozen=True)
class _Source:
    conn: Connection
    dsn: str
    slot: str
    publication: str
    globs: str
    wanted: Wanted

    def value(self, expression: str, *params: Any) -> Any:
        rows = self.conn.execute(f"SELECT {expression}".encode(), params or None).fetchall()
        return rows[0][0]

    def setting(self, name: str) -> int:
        """Return a numeric setting, in its unit in pg_settings."""
        return int(self.value("(SELECT setting FROM pg_catalog.pg_settings WHERE name = %s)", name))

    @property
    def standby(self) -> bool:
        return self.value("pg_catalog.pg_is_in_recovery()")


def _all_checks(source: _Source) -> Iterator[Check]:
    for name, check_source in _CHECKS:
        try:
            check = check_source(source)
        except psycopg2.Error as error:
            check = Check(
                name, False, str(translate(error, f"checking {name}")), "Fix what the source reports, then run `pgwal doctor` again."
            )
        except PgwalError as error:
            check = Check(name, False, str(error), _DO_AS_IT_SAYS)
        if check is not None:
            yield check


def _password(source: _Source) -> Check:
    """Tell where the password comes from, so that nobody searches for one that stands elsewhere."""
    if way_of(source.dsn).password_command is not None:
        found = "PGWAL_PASSWORD_COMMAND prints it for each connection"
        return Check("password", True, found if source.conn.info.used_password else f"{found}; the server asked for none")
    if not source.conn.info.used_password:
        return Check("password", True, "the server asked for none")
    given = parse_dsn(source.dsn)
    if given.get("password"):
        return Check("password", True, "it is in PGWAL_SOURCE_DSN")
    service = "the service file, else " if given.get("service") or default_of("service") else ""
    return Check("password", True, f"it is in {service}{'PGPASSWORD' if default_of('password') else 'the password file'}")


def _tunnel(source: _Source) -> Check | None:
    tunnel = way_of(source.dsn).tunnel
    return None if tunnel is None else Check("tunnel", True, f"every connection goes through {tunnel}, whose host key is known")


def _wal_level(source: _Source) -> Check:
    found = source.value("current_setting('wal_level')")
    mend = "Run ALTER SYSTEM SET wal_level = 'logical' and restart the server (on a managed service: its logical replication parameter)."
    return Check("wal_level", found == "logical", found, None if found == "logical" else mend)


def _standby(source: _Source) -> Check | None:
    if not source.standby:
        return None
    if source.conn.info.server_version < 160000:
        found = "the source is a standby older than 16, which cannot decode WAL"
        return Check("standby", False, found, "Set PGWAL_SOURCE_DSN to its primary.")
    if source.value("current_setting('hot_standby_feedback')") != "on":
        found = "a standby with hot_standby_feedback off: its primary may remove rows of the catalog that the slot needs"
        return Check("standby", True, found, "Set hot_standby_feedback = on on the standby.")
    return Check("standby", True, "a standby with hot_standby_feedback on")


def _replication(source: _Source) -> Check:
    role, rights = source.conn.execute(
        """SELECT current_user::text, ARRAY(
               SELECT a.name FROM (VALUES ('SUPERUSER', r.rolsuper), ('REPLICATION', r.rolreplication)) AS a (name, held) WHERE a.held
               UNION ALL
               SELECT g.rolname::text FROM pg_catalog.pg_roles g WHERE g.rolname = ANY (%s) AND pg_catalog.pg_has_role(g.oid, 'MEMBER'))
           FROM pg_catalog.pg_roles r WHERE r.rolname = current_user""",
        [["rds_replication", "rds_superuser", "cloudsqlsuperuser", "azure_pg_admin", "alloydbsuperuser"]],
    ).fetchall()[0]
    held = f"role {role} has {', '.join(rights)}" if rights else f"role {role} has no REPLICATION"
    try:
        replication_connection(source.dsn).close()
    except PgwalError as error:
        mend = (
            f"Run ALTER ROLE {quote_ident(role)} REPLICATION (on a managed service grant its replication role), and connect to the server "
            f"itself, not to a pooler."
        )
        return Check("replication", False, f"{held}; {error}", mend)
    return Check("replication", True, f"{held}; a replication connection was made")


def _slots(source: _Source) -> Check:
    limit = source.setting("max_replication_slots")
    used, there = source.conn.execute(
        "SELECT count(*), coalesce(bool_or(slot_name = %s), false) FROM pg_catalog.pg_replication_slots", [source.slot]
    ).fetchall()[0]
    found = f"{used} of {limit} replication slots are taken"
    mend = "Raise max_replication_slots and restart the server, or drop a slot that nobody reads."
    if used < limit:
        return Check("max_replication_slots", True, found)
    if there:
        return Check("max_replication_slots", True, f"{found}, ours among them: none is left for catching up or `pgwal verify`", mend)
    return Check("max_replication_slots", False, found, mend)


def _walsenders(source: _Source) -> Check:
    limit = source.setting("max_wal_senders")
    used = source.value("count(*) FROM pg_catalog.pg_stat_replication")
    found = f"{used} of {limit} walsenders are taken"
    if used < limit:
        return Check("max_wal_senders", True, found)
    return Check("max_wal_senders", False, found, "Raise max_wal_senders and restart the server, or end a walsender that is not needed.")


def _positions(source: _Source) -> Check | None:
    """Check whether the stream reaches the LSNs that SQL reports: a drain runs up to such an LSN."""
    try:
        found = positions.compare(source.conn)
    except PgwalError:
        return None  # the replication check says why there is no walsender
    read, sent = format_lsn(found.before), format_lsn(found.stream)
    if found.agree:
        return Check("positions", True, f"a flush position read by SQL ({read}) is one that the stream reaches")
    return Check(
        "positions",
        True,
        f"the flush position read by SQL ({read} to {format_lsn(found.after)}) is not one of the stream, whose walsender is at {sent}",
        "Nothing has to be done: runs use the walsender's position. Do not rely on the server's own figures of how far a slot is behind "
        "(pg_current_wal_lsn() - confirmed_flush_lsn).",
    )


def _publication(source: _Source) -> Check:
    name = source.publication
    rows = source.conn.execute(
        "SELECT coalesce(pg_catalog.obj_description(p.oid, 'pg_publication') = %s, false), p.pubviaroot, "
        "p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate FROM pg_catalog.pg_publication p WHERE p.pubname = %s",
        [publication.COMMENT, name],
    ).fetchall()
    if not rows:
        return _publication_to_make(source)
    ours, via_root, everything = rows[0]
    count = len(tables_of(source.conn, name))
    found = f"publication {name} is {'ours' if ours else 'not ours and used as it is'}, with {_counted(count, 'table')}"
    if ours:
        refusal = publication.refusal(source.conn, name, source.globs, source.wanted)
        if refusal is not None:
            return Check("publication", False, refusal, _DO_AS_IT_SAYS)
        return Check("publication", True, found)
    lacks = [text for text, there in (("some of insert, update, delete, truncate", everything), ("partition roots", via_root)) if not there]
    if not lacks:
        return Check("publication", True, found)
    return Check(
        "publication",
        True,
        f"{found}; it does not publish {' nor '.join(lacks)}",
        f"Have its owner run ALTER PUBLICATION {quote_ident(name)} SET (publish = 'insert, update, delete, truncate', "
        f"publish_via_partition_root = true), unless this is intended.",
    )


def _publication_to_make(source: _Source) -> Check:
    name = source.publication
    role, database, may_create = source.conn.execute(
        "SELECT current_user::text, current_database()::text, pg_catalog.has_database_privilege(current_database(), 'CREATE')"
    ).fetchall()[0]
    barred = [candidate for candidate in candidate_tables(source.conn, source.globs) if candidate.reason is None and not candidate.owned]
    lacks = [] if may_create else [f"has no CREATE on database {database}"]
    if barred:
        lacks.append(f"does not own {_listed([candidate.table for candidate in barred])}")
    statement = publication.creation_sql(source.conn, name, source.globs, source.wanted)
    if source.standby:
        return Check(
            "publication", False, f"there is no publication {name}, and none can be made on a standby", f"Run on the primary: {statement}"
        )
    if lacks:
        return Check(
            "publication",
            False,
            f"there is no publication {name}, and role {role} {' and '.join(lacks)}",
            f"Have a superuser run: {statement}",
        )
    return Check("publication", True, f"there is no publication {name} yet; role {role} may make it")


def _tables(source: _Source) -> Check:
    """Check the tables of the publication, or those that ours would hold or leave out if there is none yet."""
    if source.value("EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = %s)", source.publication):
        tables = tables_of(source.conn, source.publication)
        bad = [relation.table for relation in tables if not any(column.identity for column in relation.columns)]
        if bad:
            found = (
                f"{_counted(len(tables), 'table')} published; without a replica identity, so that UPDATE and DELETE fail: {_listed(bad)}"
            )
            return Check("tables", True, found, "Give each a primary key and REPLICA IDENTITY DEFAULT, or REPLICA IDENTITY FULL.")
        return Check("tables", True, f"{_counted(len(tables), 'table')} published")
    candidates = candidate_tables(source.conn, source.globs)
    skipped = [candidate for candidate in candidates if candidate.reason is not None]
    found = f"{_counted(len(candidates) - len(skipped), 'table')} to follow"
    if not candidates:
        return Check("tables", True, f"no table matches PGWAL_TABLES={source.globs}", "Set PGWAL_TABLES, unless the tables are made later.")
    if not skipped:
        return Check("tables", True, found)
    reasons = "; ".join(f"{candidate.table}: {candidate.reason}" for candidate in skipped[:_SHOWN])
    more = f"; and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
    return Check(
        "tables", True, f"{found}; left out: {reasons}{more}", "Do what each reason says, or leave the tables out of PGWAL_TABLES."
    )


def _select(source: _Source) -> Check:
    role = quote_ident(source.value("current_user::text"))
    if source.value("EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = %s)", source.publication):
        relations = tables_of(source.conn, source.publication)
        tables = [relation.table for relation in relations]
        closed = _unreadable(source.conn, relations)
        if closed:
            schemas = ", ".join(sorted({quote_ident(table.schema) for table in closed}))
            mend = f"Run GRANT USAGE ON SCHEMA {schemas} TO {role} and GRANT SELECT ON {', '.join(map(str, closed))} TO {role}."
            return Check("select", False, f"role {role} may not read {_listed(closed)}", mend)
    else:
        # A table that the role may not read is left out of the publication; the check of the tables reports it.
        tables = [candidate.table for candidate in candidate_tables(source.conn, source.globs) if candidate.reason is None]
    filtered = _filtered(source.conn, tables)
    if filtered:
        found = f"row-level security hides rows of {_listed(filtered)} from role {role}, so a snapshot would lack them"
        return Check("select", False, found, f"Run ALTER ROLE {role} BYPASSRLS.")
    return Check("select", True, f"role {role} may read every table that is followed")


def _unreadable(conn: Connection, relations: list[Relation]) -> list[TableName]:
    columns = [(relation.oid, name) for relation in relations for name in relation.column_names]
    rows = conn.execute(
        """SELECT DISTINCT t.oid FROM unnest(%s::oid[], %s::text[]) AS t (oid, name)
           JOIN pg_catalog.pg_class c ON c.oid = t.oid
           JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attname = t.name
           WHERE NOT (pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
               AND pg_catalog.has_column_privilege(t.oid, a.attnum, 'SELECT'))""",
        [[oid for oid, _ in columns], [name for _, name in columns]],
    ).fetchall()
    oids = {row[0] for row in rows}
    return [relation.table for relation in relations if relation.oid in oids]


def _filtered(conn: Connection, tables: list[TableName]) -> list[TableName]:
    rows = conn.execute(
        """SELECT t.schema, t.name FROM unnest(%s::text[], %s::text[]) AS t (schema, name)
           JOIN pg_catalog.pg_namespace n ON n.nspname = t.schema
           JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.name
           WHERE pg_catalog.row_security_active(c.oid) ORDER BY 1, 2""",
        [[table.schema for table in tables], [table.name for table in tables]],
    ).fetchall()
    return [TableName(*row) for row in rows]


def _slot(source: _Source) -> Check:
    state = inspect(source.conn, source.slot)
    if state is None:
        return Check("slot", True, f"there is no slot {source.slot} yet; the first run makes it")
    require_usable(state, source.conn.info.dbname)
    read = f", read by pid {state.active_pid}" if state.active else ""
    found = f"slot {state.name} is {size(state.lag_bytes)} behind{_room(state)}{read}"
    urgent = "Run `pgwal drain` now, and run it more often." if state.wal_status == "unreserved" else None
    return Check("slot", True, found, urgent)


def _room(state: SlotState) -> str:
    """Return, as text, how much WAL the source may still write before a slot that nobody reads is lost."""
    if state.wal_status == "unreserved":
        return " and may be lost at the next checkpoint"
    if state.safe_wal_size is None:
        return "; nothing limits the WAL that is kept for it"
    return f"; the source may write {size(max(0, state.safe_wal_size))} more before it is lost"


def _sender_timeout(source: _Source) -> Check:
    seconds = source.setting("wal_sender_timeout") / 1000
    mend = "Run ALTER SYSTEM SET wal_sender_timeout = '60s' and SELECT pg_reload_conf()."
    if seconds == 0:
        found = "off: if the reader's connection is lost without notice, the slot stays in use for a long time"
        return Check("wal_sender_timeout", True, found, mend)
    if seconds < _SHORTEST_SENDER_TIMEOUT:
        return Check("wal_sender_timeout", True, f"{seconds:g} s: a reader on a busy machine may answer too late", mend)
    return Check("wal_sender_timeout", True, f"{seconds:g} s")


def _kept_wal(source: _Source) -> Check:
    megabytes = source.setting("max_slot_wal_keep_size")
    idle = source.setting("idle_replication_slot_timeout") if source.conn.info.server_version >= 180000 else 0
    timeout = f"; a slot unread for {duration(idle)} is invalidated (idle_replication_slot_timeout)" if idle else ""
    if megabytes < 0:
        return Check(
            "max_slot_wal_keep_size",
            True,
            f"unlimited: a slot that nobody reads fills the server's disk{timeout}",
            "Set max_slot_wal_keep_size to what the disk can spare, and watch the slot's health.",
        )
    return Check("max_slot_wal_keep_size", True, f"a slot more than {size(megabytes << 20)} behind is invalidated{timeout}")


def _transactions(source: _Source) -> Check:
    old = blockers.older_than(source.conn, _OLD_TRANSACTION)
    if not old:
        return Check("transactions", True, f"no transaction that wrote is open for longer than {duration(_OLD_TRANSACTION)}")
    found = f"open for long: {blockers.describe(old)}"
    mend = "End them (SELECT pg_terminate_backend(PID), or ROLLBACK PREPARED) unless they are needed: "
    if inspect(source.conn, source.slot) is None:
        return Check("transactions", False, found, f"{mend}the slot can only be made once they have ended.")
    return Check(
        "transactions", True, found, f"{mend}their changes come only when they end, and the source keeps the WAL since they began."
    )


_CHECKS: tuple[tuple[str, Callable[[_Source], Check | None]], ...] = (
    ("password", _password),
    ("tunnel", _tunnel),
    ("wal_level", _wal_level),
    ("standby", _standby),
    ("max_replication_slots", _slots),
    ("max_wal_senders", _walsenders),
    # After the checks above: it takes a walsender, which the server may still count for a moment afterwards.
    ("replication", _replication),
    ("positions", _positions),
    ("publication", _publication),
    ("tables", _tables),
    ("select", _select),
    ("slot", _slot),
    ("wal_sender_timeout", _sender_timeout),
    ("max_slot_wal_keep_size", _kept_wal),
    ("transactions", _transactions),
)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listed(tables: list[TableName]) -> str:
    more = f" and {len(tables) - _SHOWN} more" if len(tables) > _SHOWN else ""
    return ", ".join(map(str, tables[:_SHOWN])) + more

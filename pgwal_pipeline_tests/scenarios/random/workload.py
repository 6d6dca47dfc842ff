"""A random workload: writers whose transactions overlap, and tables that are altered under them.

Everything follows from the seed but what the server itself decides. A statement that the source refuses is taken back; that is part of it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors

from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.values.relation import quote_ident
from pgwal_pipeline_tests.support import Source

_LOCK_TIMEOUT = "100ms"
_SCHEMAS = ("public", "other")
_TYPES = (
    "int", "bigint", "smallint", "text", "numeric(10,2)", "numeric", "float8", "bool", "bytea", "jsonb", "date", "timestamptz",
    "int[]", "text[]", "mood",
)  # fmt: skip
_KEY_TYPES = ("int", "bigint", "text", "numeric(10,2)", "uuid", "timestamptz")
_KEYS = 40  # so few that writers meet
_NAMES = (*"abcdefgh", "Odd", "ü")


@dataclass
class Column:
    name: str
    type: str
    generated: bool

    @property
    def quoted(self) -> str:
        return quote_ident(self.name)


@dataclass
class Table:
    """A table as it is at the moment."""

    oid: int
    schema: str
    name: str
    kind: str
    identity: str
    columns: list[Column]
    key: list[str]
    index_key: bool
    leaves: list[str]

    @property
    def quoted(self) -> str:
        return f"{quote_ident(self.schema)}.{quote_ident(self.name)}"

    @property
    def usable(self) -> bool:
        """Whether its UPDATE and DELETE can be published."""
        if self.kind == "p":
            return bool(self.key)
        return self.identity == "f" or (self.identity == "d" and bool(self.key)) or (self.identity == "i" and self.index_key)


@dataclass
class Writer:
    connection: Connection
    open: bool = False
    exclusive: bool = False  # its transaction holds a lock that keeps readers out


@dataclass
class Workload:
    """`step` does one thing; `log` has every statement with the writer that ran it and whether the source took it."""

    source: Source
    rng: random.Random
    publication: str
    log: list[tuple[int, str, bool]] = field(default_factory=list)
    writers: list[Writer] = field(default_factory=list)
    _born: int = 0

    def begin(self, tables: int, writers: int) -> None:
        self.source.sql("CREATE SCHEMA other; CREATE TYPE mood AS ENUM ('sad', 'ok')")
        for _ in range(writers):
            connection = self.source.connect()
            connection.execute(f"SET lock_timeout = '{_LOCK_TIMEOUT}'; SET statement_timeout = '20s'".encode())
            self.writers.append(Writer(connection))
        for _ in range(tables):
            self._run(0, self._new_table())
        self._run(0, "CREATE TABLE parts (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)")
        self._run(0, "CREATE TABLE parts_0 PARTITION OF parts FOR VALUES FROM (0) TO (20)")
        self._run(0, "CREATE TABLE parts_1 PARTITION OF parts DEFAULT")

    def step(self, *, ddl: float = 0.06) -> None:
        """One statement, or one transaction's end, of one writer."""
        number = self.rng.randrange(len(self.writers))
        writer = self.writers[number]
        if self.rng.random() < (0.25 if writer.open else 0.0):
            return self._end(number, commit=self.rng.random() < 0.85)
        table = self.rng.choice(self.tables())
        if self.rng.random() < ddl:
            return self._alter(number, table)
        if not writer.open and self.rng.random() < 0.6:
            self._run(number, "BEGIN")
            writer.open = True
        statement = self._truncate(table) if self.rng.random() < 0.02 else self._change(table)
        if self.rng.random() < 0.1 and writer.open:
            # What is rolled back to a savepoint was never there, though its WAL is.
            self._run(number, "SAVEPOINT undone")
            self._statement(number, statement)
            self._run(number, "ROLLBACK TO undone")
            return None
        return self._statement(number, statement)

    def settle(self, *, leave_open: bool) -> None:
        """End the transactions, but those that only hold rows where `leave_open`."""
        for number, writer in enumerate(self.writers):
            if writer.open and (writer.exclusive or not leave_open):
                self._end(number, commit=self.rng.random() < 0.85)

    def tables(self) -> list[Table]:
        """The tables as they are for a reader of what is committed."""
        rows = self.source.sql(
            """SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relkind::text, c.relreplident::text,
                   ARRAY(SELECT ARRAY[a.attname::text, format_type(a.atttypid, a.atttypmod), a.attgenerated::text] FROM pg_attribute a
                         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum),
                   ARRAY(SELECT a.attname::text FROM pg_index i, unnest(i.indkey::int[]) WITH ORDINALITY k(number, place)
                         JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
                         WHERE i.indrelid = c.oid AND i.indisprimary ORDER BY k.place),
                   EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident),
                   ARRAY(SELECT i.inhrelid::regclass::text FROM pg_inherits i WHERE i.inhparent = c.oid ORDER BY 1)
               FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname IN ('public', 'other') AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY c.oid"""
        )
        return [
            Table(oid, schema, name, kind, identity, [Column(n, t, g != "") for n, t, g in columns], key, index_key, leaves)
            for oid, schema, name, kind, identity, columns, key, index_key, leaves in rows
        ]

    def history(self, name: str, last: int = 60) -> str:
        """The statements of the log that name a table, the last ones."""
        found = [
            f"  writer {who}{'' if took else ' (refused)'}: {text[:300]}"
            for who, text, took in self.log
            if name in text or "COMMIT" in text
        ]
        return "\n".join(found[-last:])

    # --- statements

    def _statement(self, number: int, statement: str) -> None:
        """Run a statement of a transaction or alone; one that fails does not end the transaction."""
        writer = self.writers[number]
        if writer.open:
            self._run(number, "SAVEPOINT s")
        took = self._run(number, statement)
        if writer.open:
            self._run(number, "RELEASE s" if took else "ROLLBACK TO s")
            writer.exclusive = writer.exclusive or (took and statement.startswith(("TRUNCATE", "ALTER", "DROP")))

    def _end(self, number: int, *, commit: bool) -> None:
        self._run(number, "COMMIT" if commit else "ROLLBACK")
        self.writers[number].open = self.writers[number].exclusive = False

    def _run(self, number: int, statement: str) -> bool:
        took = True
        try:
            self.writers[number].connection.execute(statement.encode())
        except psycopg2.errors.DatabaseError:
            took = False
        self.log.append((number, statement, took))
        return took

    # --- rows

    def _change(self, table: Table) -> str:
        columns = [column for column in table.columns if not column.generated]
        if not columns:
            return f"INSERT INTO {table.quoted} DEFAULT VALUES"
        names = ", ".join(column.quoted for column in columns)
        kind = self.rng.choice(("insert", "insert", "update", "update", "update", "delete", "key", "anew"))
        if kind == "insert":
            rows = ", ".join(f"({', '.join(self._value(table, column) for column in columns)})" for _ in range(self.rng.randint(1, 12)))
            return f"INSERT INTO {table.quoted} ({names}) VALUES {rows} ON CONFLICT DO NOTHING"
        where = self._where(table)
        if kind == "delete":
            return f"DELETE FROM {table.quoted} WHERE {where}"
        if kind == "key" and table.key:
            column = next((column for column in columns if column.name in table.key), columns[0])
            return f"UPDATE {table.quoted} SET {column.quoted} = {self._value(table, column)} WHERE {where}"
        others = [column for column in columns if column.name not in table.key] or columns
        chosen = self.rng.sample(others, self.rng.randint(1, min(2, len(others))))
        if kind == "anew":
            values = ", ".join(self._value(table, column) for column in columns)
            return (
                f"WITH gone AS (DELETE FROM {table.quoted} WHERE {where}) SELECT 1; INSERT INTO {table.quoted} ({names}) VALUES ({values})"
            )
        changes = ", ".join(f"{column.quoted} = {self._value(table, column)}" for column in chosen)
        return f"UPDATE {table.quoted} SET {changes} WHERE {where}"

    def _where(self, table: Table) -> str:
        if not table.key or self.rng.random() < 0.2:
            return f"ctid IN (SELECT ctid FROM {table.quoted} ORDER BY ctid LIMIT {self.rng.randint(1, 3)})"
        column = next(column for column in table.columns if column.name == table.key[0])
        return f"{column.quoted} = {self._value(table, column)}"

    def _truncate(self, table: Table) -> str:
        return f"TRUNCATE {table.quoted}" if self.rng.random() < 0.7 else f"TRUNCATE {table.quoted} CASCADE"

    def _value(self, table: Table, column: Column) -> str:
        key = column.name in table.key
        if not key and self.rng.random() < 0.08:
            return "NULL"
        number = self.rng.randrange(_KEYS if key else 10_000)
        base = column.type.split("(")[0]
        match base:
            case "smallint" | "integer" | "bigint" | "double precision":
                return str(number)
            case "numeric":
                return f"{number}.{self.rng.choice(('0', '25', '5'))}" if not key else str(number)
            case "text" if key:
                return f"'k{number}'"
            case "text":
                # Long ones are stored apart, and not sent again where they did not change.
                return self.rng.choice((f"'t{number}'", f"repeat('{number}-', 900)", "''"))
            case "boolean":
                return self.rng.choice(("true", "false"))
            case "bytea":
                return self.rng.choice((f"'\\x{number:04x}'", f"decode(repeat('{number:04x}', 1500), 'hex')"))
            case "jsonb":
                return f"""jsonb_build_object('n', {number}, 'long', repeat('x', {self.rng.choice((1, 4000))}))"""
            case "date":
                return f"date '2000-01-01' + {number}"
            case "timestamp with time zone":
                return f"timestamptz '2001-01-01 00:00:00+00' + {number} * interval '1 hour'"
            case "uuid":
                return f"'00000000-0000-0000-0000-{number:012d}'::uuid"
            case "integer[]":
                return f"ARRAY[{number}, NULL, {number + 1}]" if self.rng.random() < 0.7 else f"array_fill({number}, ARRAY[1200])"
            case "text[]":
                return f"ARRAY['a{number}', NULL, '{{\"\"}}']"
            case "mood":
                return self.rng.choice(("'sad'", "'ok'"))
        return "NULL"

    # --- tables

    def _new_table(self, name: str | None = None, schema: str = "public") -> str:
        if name is None:
            self._born += 1
            name = f"t{self._born}"
        kind = self.rng.random()
        key_types = self.rng.choices(_KEY_TYPES, k=2 if kind < 0.3 else 1)
        keys = [f"k{place} {key_type}" for place, key_type in enumerate(key_types)]
        others = [
            f"{quote_ident(column)} {type_name}{' DEFAULT NULL' if self.rng.random() < 0.2 else ''}"
            for column, type_name in zip(self.rng.sample(_NAMES, 4), self.rng.choices(_TYPES, k=4), strict=True)
        ]
        primary = [f"PRIMARY KEY ({', '.join(key.split()[0] for key in keys)})"] if kind < 0.85 else []
        quoted = f"{schema}.{quote_ident(name)}"
        text = f"CREATE TABLE {quoted} ({', '.join([*keys, *others, *primary])})"
        if not primary or self.rng.random() < 0.2:
            text += f"; ALTER TABLE {quoted} REPLICA IDENTITY FULL"
        return text

    def _alter(self, number: int, table: Table) -> None:
        change = self.rng.choice(_PARTITIONED if table.kind == "p" else _ALTERATIONS)(self, table)
        if change is None:
            return
        if self.rng.random() < 0.3 and not change.startswith(("VACUUM", "CREATE INDEX")):
            # In one transaction with rows before it and after.
            if not self.writers[number].open:
                self._run(number, "BEGIN")
                self.writers[number].open = True
            self._statement(number, self._change(table))
            for part in change.split("; "):
                self._statement(number, part)
            self.writers[number].exclusive = True
            return
        if self.writers[number].open:
            self._end(number, commit=True)
        for part in change.split("; "):
            self._run(number, part)

    def _other(self, table: Table) -> Column | None:
        return self.rng.choice([column for column in table.columns if column.name not in table.key] or [None])

    def _free_name(self, table: Table) -> str:
        taken = {column.name.lower() for column in table.columns}
        return quote_ident(self.rng.choice([name for name in (*_NAMES, *(f"x{n}" for n in range(9))) if name.lower() not in taken]))


Alteration = Callable[[Workload, Table], str | None]


def _add(work: Workload, table: Table) -> str:
    kind = work.rng.choice(_TYPES)
    default = {"int": " NOT NULL DEFAULT 7", "text": " DEFAULT 'old'", "float8": " DEFAULT random()", "int[]": " DEFAULT '{1,2}'"}.get(
        kind, ""
    )
    return f"ALTER TABLE {table.quoted} ADD {work._free_name(table)} {kind}{default if work.rng.random() < 0.6 else ''}"


def _add_generated(work: Workload, table: Table) -> str | None:
    numbers = [column for column in table.columns if column.type == "integer" and not column.generated]
    if not numbers:
        return None
    return f"ALTER TABLE {table.quoted} ADD {work._free_name(table)} bigint GENERATED ALWAYS AS ({numbers[0].quoted}::bigint * 2) STORED"


def _drop_column(work: Workload, table: Table) -> str | None:
    column = work._other(table)
    return None if column is None else f"ALTER TABLE {table.quoted} DROP {column.quoted}"


def _drop_and_add(work: Workload, table: Table) -> str | None:
    column = work._other(table)
    if column is None:
        return None
    return f"ALTER TABLE {table.quoted} DROP {column.quoted}; ALTER TABLE {table.quoted} ADD {column.quoted} {work.rng.choice(_TYPES)}"


def _rename_column(work: Workload, table: Table) -> str | None:
    column = work._other(table) if work.rng.random() < 0.8 else work.rng.choice(table.columns)
    return None if column is None else f"ALTER TABLE {table.quoted} RENAME {column.quoted} TO {work._free_name(table)}"


def _swap_columns(work: Workload, table: Table) -> str | None:
    plain = [column for column in table.columns if column.name not in table.key and not column.generated]
    if len(plain) < 2:
        return None
    one, other = (column.quoted for column in work.rng.sample(plain, 2))
    alter = f"ALTER TABLE {table.quoted} RENAME"
    return f"{alter} {one} TO swapping; {alter} {other} TO {one}; {alter} swapping TO {other}"


def _retype(work: Workload, table: Table) -> str | None:
    column = work.rng.choice(table.columns)
    target = {
        "integer": work.rng.choice(("bigint", "text", "numeric", "smallint")),
        "smallint": "integer",
        "bigint": work.rng.choice(("integer", "text")),
        "numeric(10,2)": work.rng.choice(("numeric(12,2)", "numeric(10,1)", "text", "numeric")),
        "text": work.rng.choice(
            ("int USING length({c})", "bytea USING convert_to({c}, 'UTF8')", "text USING {c} || '!'", 'text COLLATE "C"')
        ),
        "boolean": "int USING {c}::int",
        "date": "timestamptz",
    }.get(column.type)
    if target is None:
        return None
    return f"ALTER TABLE {table.quoted} ALTER {column.quoted} TYPE {target.replace('{c}', column.quoted)}"


def _key(work: Workload, table: Table) -> str | None:
    alter = f"ALTER TABLE {table.quoted}"
    constraint = work.source.sql(f"SELECT quote_ident(conname) FROM pg_constraint WHERE conrelid = {table.oid} AND contype = 'p'")
    drop = f"{alter} DROP CONSTRAINT {constraint[0][0]}" if constraint else ""
    if table.key and work.rng.random() < 0.5:
        return f"{alter} REPLICA IDENTITY FULL; {drop}" if work.rng.random() < 0.8 else drop
    if table.key:
        extra = work._other(table)
        return None if extra is None else f"{drop}; {alter} ADD PRIMARY KEY ({quote_ident(table.key[0])}, {extra.quoted})"
    return f"{alter} ADD PRIMARY KEY ({work.rng.choice(table.columns).quoted})" if table.columns else None


def _identity(work: Workload, table: Table) -> str | None:
    kind = work.rng.choice(("FULL", "DEFAULT", "INDEX", "NOTHING"))
    if kind != "INDEX":
        return f"ALTER TABLE {table.quoted} REPLICA IDENTITY {kind}"
    column = work.rng.choice(table.columns) if table.columns else None
    if column is None:
        return None
    work._born += 1
    index = f"unique_{work._born}"
    return (
        f"ALTER TABLE {table.quoted} ALTER {column.quoted} SET NOT NULL; CREATE UNIQUE INDEX {index} ON {table.quoted} ({column.quoted}); "
        f"ALTER TABLE {table.quoted} REPLICA IDENTITY USING INDEX {index}"
    )


def _rename_table(work: Workload, table: Table) -> str:
    work._born += 1
    renamed = f"ALTER TABLE {table.quoted} RENAME TO r{work._born}"
    return f"{renamed}; {work._new_table(table.name, table.schema)}" if work.rng.random() < 0.5 else renamed


def _swap_tables(work: Workload, table: Table) -> str | None:
    others = [other for other in work.tables() if other.schema == table.schema and other.name not in (table.name, "parts")]
    if not others:
        return None
    other = work.rng.choice(others)
    work._born += 1
    between = f"r{work._born}"
    return (
        f"ALTER TABLE {table.quoted} RENAME TO {between}; ALTER TABLE {other.quoted} RENAME TO {quote_ident(table.name)}; "
        f"ALTER TABLE {table.schema}.{between} RENAME TO {quote_ident(other.name)}"
    )


def _lend_name(work: Workload, table: Table) -> str:
    work._born += 1
    away = f"r{work._born}"
    return (
        f"ALTER TABLE {table.quoted} RENAME TO {away}; CREATE TABLE {table.quoted} (k0 int PRIMARY KEY, v text); "
        f"INSERT INTO {table.quoted} VALUES (1, 'other'), (2, 'other'); DROP TABLE {table.quoted}; "
        f"ALTER TABLE {table.schema}.{away} RENAME TO {quote_ident(table.name)}"
    )


def _move(work: Workload, table: Table) -> str:
    return f"ALTER TABLE {table.quoted} SET SCHEMA {'other' if table.schema == 'public' else 'public'}"


def _make_anew(work: Workload, table: Table) -> str:
    return f"DROP TABLE {table.quoted}; {work._new_table(table.name, table.schema)}"


def _new(work: Workload, table: Table) -> str | None:
    return work._new_table() if len(work.tables()) < 7 else f"DROP TABLE {table.quoted}"


def _republish(work: Workload, table: Table) -> str:
    return f"ALTER PUBLICATION {work.publication} DROP TABLE {table.quoted}"


def _rewrite(work: Workload, table: Table) -> str:
    return f"VACUUM FULL {table.quoted}"


def _leaf(work: Workload, table: Table) -> str | None:
    work._born += 1
    leaf = f"leaf_{work._born}"
    low = 40 + 10 * work._born
    extra = [name for name in table.leaves if "leaf" in name]
    return work.rng.choice(
        [
            f"CREATE TABLE {leaf} PARTITION OF parts FOR VALUES FROM ({low}) TO ({low + 10})",
            f"CREATE TABLE {leaf} (id int NOT NULL PRIMARY KEY, v text); INSERT INTO {leaf} VALUES ({low + 1}, 'brought'); "
            f"ALTER TABLE parts ATTACH PARTITION {leaf} FOR VALUES FROM ({low}) TO ({low + 10})",
            f"ALTER TABLE parts DETACH PARTITION {work.rng.choice(extra)}" if extra else None,
            f"TRUNCATE {work.rng.choice(table.leaves)}" if table.leaves else None,
        ]
    )


def _enum(work: Workload, table: Table) -> str:
    work._born += 1
    return f"ALTER TYPE mood ADD VALUE 'm{work._born}'"


_ALTERATIONS: tuple[Alteration, ...] = (
    _add, _add, _add_generated, _drop_column, _drop_and_add, _rename_column, _swap_columns, _retype, _retype, _key, _identity,
    _rename_table, _swap_tables, _lend_name, _move, _make_anew, _new, _new, _republish, _rewrite, _enum,
)  # fmt: skip
_PARTITIONED: tuple[Alteration, ...] = (_leaf, _leaf, _leaf, _add, _drop_column)

"""A scratch copy of a database's structure on an embedded Postgres, in which statements are tried."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg2
from psycopg2 import extensions

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.messages.printable import printable
from pgwal_pipeline.postgres.connection import Connection
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.structure import Structure, Table
from pgwal_pipeline.values.relation import TableName, quote_ident

_SETTINGS = {"fsync": "off", "shared_buffers": "16MB", "max_connections": "8", "wal_level": "logical", "max_wal_size": "64MB"}
_PARTS = re.compile(
    r"""(?P<space>\s+|--[^\n]*)|(?P<comment>/\*)|(?P<dollar>\$(?:[A-Za-z_\x80-\uffff][\w\x80-\uffff]*)?\$)
        |(?P<text>[eE]'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'|"(?:[^"]|"")*")|(?P<end>;)|(?P<word>[\w\x80-\uffff$]+)|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_COMMENT = re.compile(r"/\*|\*/")


class Refused(PgwalError):
    """A statement that fails in the copy."""


@dataclass
class Scratch:
    """The copy, by a connection of its superuser. `lacking` says what it lacks of the structure and why that may matter."""

    conn: Connection
    lacking: list[str] = field(default_factory=list)


@contextmanager
def scratch_copy(structure: Structure) -> Iterator[Scratch]:
    """Yield a copy of a structure, on a server of its own that ends with the block. Raises PgwalError if the server does not start."""
    folder = Path(tempfile.mkdtemp(prefix="pgwal-preview-"))
    folder.chmod(0o711)  # the server runs as another user where this process is root
    server = Postgres(folder / "data", settings=_SETTINGS)
    try:
        server.start()
        with connect(server.dsn(), application="pgwal preview") as conn:
            scratch = Scratch(conn)
            _build(scratch, structure)
            yield scratch
    finally:
        server.destroy()
        shutil.rmtree(folder, ignore_errors=True)


def _build(scratch: Scratch, structure: Structure) -> None:
    scratch.conn.execute(b"SET check_function_bodies = off")
    for name, schema in structure.extensions.items():
        _tried(scratch, f"CREATE SCHEMA IF NOT EXISTS {quote_ident(schema)}")
        if not _tried(scratch, f"CREATE EXTENSION IF NOT EXISTS {quote_ident(name)} SCHEMA {quote_ident(schema)}"):
            scratch.lacking.append(f"The copy lacks extension {name}, which the server here does not have: columns of its types are text.")
    _in_rounds(scratch, structure.before)
    for table in structure.tables:
        if not any(_tried(scratch, made) for made in _ways(scratch, table)):
            scratch.lacking.append(f"The copy lacks table {table.name}, which the server here does not take.")
    _in_rounds(scratch, [text for table in structure.tables for text in table.defaults()])
    _in_rounds(scratch, structure.after)
    scratch.conn.execute(b"SELECT pg_catalog.set_config('search_path', %s, false)", [structure.search_path])


def _ways(scratch: Scratch, table: Table) -> Iterator[str]:
    """The statements that make a table: as it is, with text for types that are not there, and with plain columns for generated ones."""
    yield table.create()
    types = sorted({column.type for column in table.columns})
    found = scratch.conn.execute(b"SELECT t FROM unnest(%s::text[]) t WHERE pg_catalog.to_regtype(t) IS NOT NULL", [types]).fetchall()
    known = frozenset(row[0] for row in found)
    yield table.create(known)
    yield table.without_generated().create(known)


def _in_rounds(scratch: Scratch, statements: Iterable[str]) -> None:
    """Run statements, and those that failed once more for as long as any of them succeeds: they may need one another."""
    left = list(statements)
    while left and len(again := [text for text in left if not _tried(scratch, text)]) < len(left):
        left = again


def _tried(scratch: Scratch, statement: str) -> bool:
    try:
        scratch.conn.execute(statement.encode())
    except psycopg2.Error:
        return False
    return True


def publish(scratch: Scratch, publication: str, tables: Sequence[str], *, through_root: bool, comment: str | None) -> None:
    """Make a publication of `tables`, each with its column list and row filter as SQL has them, and with a comment."""
    conn = scratch.conn
    conn.execute(f"CREATE PUBLICATION {quote_ident(publication)} WITH (publish_via_partition_root = {str(through_root).lower()})".encode())
    conn.execute(f"COMMENT ON PUBLICATION {quote_ident(publication)} IS ".encode() + b"%s", [comment])
    for table in tables:
        if not _tried(scratch, f"ALTER PUBLICATION {quote_ident(publication)} ADD TABLE {table}"):
            _tried(scratch, f"ALTER PUBLICATION {quote_ident(publication)} ADD TABLE {table.split(' (')[0]}")


def note_truncates(scratch: Scratch, tables: Iterable[TableName]) -> None:
    """Let the copy note which transactions truncate `tables`: the stream tells of these, so they cost no reading."""
    conn = scratch.conn
    conn.execute(b"CREATE SCHEMA _pgwal_preview; CREATE TABLE _pgwal_preview.truncated (oid oid, xid int8)")
    conn.execute(
        b"""CREATE FUNCTION _pgwal_preview.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                INSERT INTO _pgwal_preview.truncated
                SELECT relid::oid, pg_catalog.txid_current() & 4294967295 FROM pg_catalog.pg_partition_ancestors(TG_RELID)
                UNION SELECT TG_RELID, pg_catalog.txid_current() & 4294967295; RETURN NULL; END $$"""
    )
    for table in tables:
        _tried(scratch, f"CREATE TRIGGER _pgwal_preview AFTER TRUNCATE ON {table} EXECUTE FUNCTION _pgwal_preview.note()")


def truncated(scratch: Scratch) -> dict[int, frozenset[int]]:
    """Return the 32-bit xids of the transactions that truncated a table, by its oid."""
    found: dict[int, frozenset[int]] = {}
    with suppress(psycopg2.Error):  # the statements may have dropped it
        for oid, xid in scratch.conn.execute(b"SELECT oid::int8, xid FROM _pgwal_preview.truncated").fetchall():
            found[oid] = found.get(oid, frozenset()) | {xid}
    return found


def run(scratch: Scratch, file: str, text: str) -> None:
    """Run the statements of a file one after the other, as psql does. Raises Refused with Postgres's message for one that fails."""
    for line, statement in statements(text):
        if statement.startswith("\\"):
            raise Refused(f"{file}, line {line}: {statement.split()[0]} is a command of psql; give a file of SQL alone.")
        try:
            scratch.conn.execute(statement.encode())
        except psycopg2.Error as error:
            said = printable(" ".join((error.diag.message_primary or str(error)).split())).rstrip(".")
            raise Refused(f"{file}, line {line} fails in a copy of the source's structure: {said}.") from None
    if scratch.conn.info.transaction_status != extensions.TRANSACTION_STATUS_IDLE:
        scratch.conn.execute(b"ROLLBACK")
        scratch.lacking.append(f"{file} leaves a transaction open, which psql would roll back at the end, as was done here.")


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the statements of SQL with the lines on which they begin, from 1."""
    begin, at, atomic, depth, before = None, 0, False, 0, ""
    while at < len(text):
        found = _PARTS.match(text, at)
        assert found is not None
        kind, end = found.lastgroup, found.end()
        if kind == "comment":
            at = _after_comment(text, at)
            continue
        if kind == "dollar":
            closed = text.find(found.group(), end)
            end = len(text) if closed < 0 else closed + len(found.group())
        if kind != "space":
            if begin is None and kind != "end":
                begin, atomic, depth = at, False, 0
            if kind == "other" and found.group() == "\\" and begin == at:  # a command of psql ends with its line
                end = len(text) if (newline := text.find("\n", at)) < 0 else newline
                yield text.count("\n", 0, at) + 1, text[at:end].strip()
                begin = None
            word = found.group().upper() if kind == "word" else ""
            atomic = atomic or (before == "BEGIN" and word == "ATOMIC")
            depth += atomic and word in ("ATOMIC", "CASE")
            depth -= atomic and word == "END"
            if kind == "end" and begin is not None and depth <= 0:
                yield text.count("\n", 0, begin) + 1, text[begin:at].strip()
                begin = None
            before = word
        at = end
    if begin is not None:
        yield text.count("\n", 0, begin) + 1, text[begin:].strip()


def _after_comment(text: str, at: int) -> int:
    """The end of the comment that begins at `at`; comments may be nested."""
    depth = 0
    for mark in _COMMENT.finditer(text, at):
        depth += 1 if mark.group() == "/*" else -1
        if depth == 0:
            return mark.end()
    return len(text)


def read_file(path: Path) -> str:
    """Return the text of a file of SQL. Raises PgwalError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PgwalError(f"{os.fspath(path)} cannot be read ({reason}); give a file of SQL statements.") from None

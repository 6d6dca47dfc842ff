"""The entries of `current` tables in a catalog of Spark's, and the comments of their columns.

An entry only names a table that is in the lake: making, moving and removing it leaves the table's files alone. An entry that names
something else is never touched. Comments are in the table's own Delta log, where every catalog and every reader finds them; a catalog that
keeps a copy takes it when the entry is made.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pgwal_pipeline.lake.columns import literal, quote
from pgwal_pipeline.lake.isolation import failures, isolated
from pgwal_pipeline.lake.standing import open_current
from pgwal_pipeline.lake.statements import table_at
from pgwal_pipeline.messages.errors import LakeError
from pgwal_pipeline.values.catalog_name import CatalogName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SESSION_CATALOG = "spark_catalog"
_IMPLEMENTATION = "spark.sql.catalogImplementation"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a catalog says of a name: where the table is (None for a view), and whether dropping the entry leaves its files alone."""

    location: str | None
    external: bool


@contextmanager
def opened(spark: "SparkSession", catalog: str) -> "Iterator[SparkSession]":
    """Give a session for the statements on `catalog`. Raises LakeError if that catalog would forget everything with Spark's end."""
    with failures(f"Catalog {catalog}"), isolated(spark, {}) as session:
        if catalog == _SESSION_CATALOG and session.conf.get(_IMPLEMENTATION, "in-memory") == "in-memory":
            raise LakeError(
                f"Spark keeps {catalog} in memory only; configure a lasting one in PGWAL_SPARK_CONF, such as a Hive metastore "
                f"({_IMPLEMENTATION}=hive)."
            )
        yield session


def ensure_schema(session: "SparkSession", name: CatalogName) -> None:
    """Make the schema of `name` if the catalog lacks it. Raises LakeError."""
    with failures(f"Schema {name.catalog}.{name.schema}"):
        if not _has_schema(session, name):
            session.sql(f"CREATE SCHEMA IF NOT EXISTS {name.schema_sql}").collect()


def ensure_entry(session: "SparkSession", name: CatalogName, path: str) -> None:
    """Let `name` be the Delta table at `path`; its schema exists. Raises LakeError, also if the name is something else's."""
    with failures(str(name)):
        session.sql(f"CREATE TABLE IF NOT EXISTS {name.sql} USING DELTA LOCATION {literal(path)}").collect()
        found = _described(session, name)
    if not _same_place(found.location, path):
        is_there = "a view" if found.location is None else f"a table at {found.location}"
        raise LakeError(f"{name} is {is_there} already, and stays; drop or rename that, or name another schema in PGWAL_SPARK_CATALOG.")


def remove_entry(session: "SparkSession", name: CatalogName, path: str) -> None:
    """Remove the entry `name` if it is the table at `path`, whose files stay. Raises LakeError."""
    with failures(str(name)):
        if not _has_schema(session, name) or not session.sql(f"SHOW TABLES IN {name.schema_sql} LIKE {literal(name.table)}").collect():
            return
        found = _described(session, name)
        if not _same_place(found.location, path):
            return
        if not found.external:
            raise LakeError(f"{name} owns the files of its table, so it is not dropped here; move it by hand.")
        session.sql(f"DROP TABLE IF EXISTS {name.sql}").collect()


def set_comments(session: "SparkSession", path: str, comments: Mapping[str | None, str]) -> None:
    """Bring the comments of the table at `path` in step: by column, and its own under None. Columns of ours have none. Raises LakeError."""
    table = open_current(path)
    if table is None:
        return
    has = {field.name: str(field.metadata.get("comment") or "") for field in table.schema().fields}
    changed = {name: comments.get(name, "") for name, comment in has.items() if comments.get(name, "") != comment}
    about = comments.get(None, "")
    with failures(path):
        if changed:
            columns = ", ".join(f"{quote(name)} COMMENT {literal(comment)}" for name, comment in changed.items())
            session.sql(f"ALTER TABLE {table_at(path)} ALTER COLUMN {columns}").collect()
        if about != (table.metadata().description or ""):
            session.sql(f"COMMENT ON TABLE {table_at(path)} IS {literal(about)}").collect()


def _has_schema(session: "SparkSession", name: CatalogName) -> bool:
    return bool(session.sql(f"SHOW SCHEMAS IN {quote(name.catalog)} LIKE {literal(name.schema)}").collect())


def _described(session: "SparkSession", name: CatalogName) -> Entry:
    rows = session.sql(f"DESCRIBE TABLE EXTENDED {name.sql}").collect()
    # Below the columns, whose names may be the same as these.
    first = next((number for number, row in enumerate(rows) if row[0].startswith("# Detailed")), len(rows))
    said = {row[0]: row[1] for row in rows[first:]}
    return Entry(said.get("Location") or None, said.get("Type") == "EXTERNAL")


def _same_place(location: str | None, path: str) -> bool:
    if location is None:
        return False
    wanted = _place(path)
    return wanted in (_place(location), _place(unquote(location)))


def _place(path: str) -> str:
    """A path in one form: Hadoop writes `file:/a` for `/a`, and reads `s3://` as `s3a://`."""
    scheme, separator, rest = path.partition(":/")
    if not separator:
        return path.rstrip("/")
    plain = "/" + rest.strip("/")
    return plain if scheme == "file" else f"{scheme.replace('s3a', 's3')}:{plain}"

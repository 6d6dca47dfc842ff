"""The SQL of net changes by key: one text for Spark and for DuckDB, which differ only in how they write names and literals.

`{newer}` and `{older}` are `current` at the two publishes, `{raw}` is raw; `older` is read only if the table was truncated between them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgwal_pipeline.published import quoting
from pgwal_pipeline.values.own_columns import CHANGE, COMMIT_LSN, DELETED_LSN, FIRST_LSN, LAST_LSN, OP, ORDINAL, RESERVED, TEXT, WINDOW

_KINDS = pa.types


@dataclass(frozen=True)
class Dialect:
    """How an engine writes a column's name and a text."""

    name: Callable[[str], str]
    text: Callable[[str], str]


def _braces(written: str) -> str:
    """`written` in a text whose `{…}` are filled in later."""
    return written.replace("{", "{{").replace("}", "}}")


SPARK = Dialect(
    lambda name: _braces("`" + name.replace("`", "``") + "`"),
    lambda text: _braces("'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"),
)
DUCKDB = Dialect(lambda name: _braces(quoting.name(name)), lambda text: _braces(quoting.text(text)))


@dataclass(frozen=True)
class Span:
    """The changes from `since` up to `until` (LSNs), in the windows after `first_window` up to `last_window` (keys).

    `truncates` are the commit LSNs of the first and the last TRUNCATE among them, None if there is none.
    """

    since: int
    until: int
    first_window: str
    last_window: str
    truncates: tuple[int, int] | None = None

    @property
    def rows(self) -> str:
        """The condition of raw's rows that belong to it."""
        windows = f"{WINDOW} > '{self.first_window}' AND {WINDOW} <= '{self.last_window}'"
        return f"{windows} AND {COMMIT_LSN} >= {self.since} AND {COMMIT_LSN} < {self.until}"


def living(schema: pa.Schema) -> str:
    """Return the condition of the rows that the source had: those of a table that keeps deleted rows are not all such."""
    return f"{DELETED_LSN} IS NULL" if DELETED_LSN in schema.names else "true"


def net_changes(
    dialect: Dialect, schema: pa.Schema, key: Sequence[str], in_raw: Mapping[str, str], span: Span, older: pa.Schema | None = None
) -> str:
    """Return the query. `schema` is that of `newer`, `in_raw` the name that each column of the key has in raw.

    `older` is the schema of `older`, where the span has a TRUNCATE.

    The steps' own columns have names that no column of the source may have.
    """
    name = dialect.name
    parts = key_parts(dialect, schema, key)
    numbers = [f"{RESERVED}k{number}" for number in range(len(parts))]
    numbered = ", ".join(f"{part} AS {number}" for part, number in zip(parts, numbers, strict=True))
    of_key, columns = ", ".join(numbers), ", ".join(map(name, key))

    def same(one: str, other: str) -> str:
        return " AND ".join(f"{one}.{number} IS NOT DISTINCT FROM {other}.{number}" for number in numbers)

    held = ", ".join(f"{name(in_raw[column])} AS {name(column)}" for column in key)
    events = (
        f"SELECT {held}, {TEXT}, {OP}, {COMMIT_LSN}, {ORDINAL}, CASE WHEN {OP} = 'K' THEN 0 ELSE 1 END AS _pgwal_turn,"
        f" max(CASE WHEN {OP} = 'K' THEN 1 ELSE 0 END) OVER (PARTITION BY {COMMIT_LSN}, {ORDINAL}) AS _pgwal_moved"
        f" FROM {{raw}} WHERE {span.rows} AND {OP} <> 'T'"
    )
    # A row was there before if the first that is said of its key is not that it comes: by an insert, or from another key.
    was_there = f"{OP} IN ('D', 'K') OR {OP} = 'U' AND _pgwal_moved = 0"
    ranked = (
        f"SELECT *, row_number() OVER (PARTITION BY {of_key} ORDER BY {COMMIT_LSN}, {ORDINAL}, _pgwal_turn) AS _pgwal_nth,"
        f" max({COMMIT_LSN}) OVER (PARTITION BY {of_key}) AS _pgwal_last_lsn FROM (SELECT *, {numbered} FROM events) e"
    )
    first = (
        f"SELECT {of_key}, {columns}, {TEXT}, {COMMIT_LSN} AS _pgwal_first_lsn, _pgwal_last_lsn,"
        f" CASE WHEN {was_there} THEN true ELSE false END AS _pgwal_there FROM ranked WHERE _pgwal_nth = 1"
    )
    steps = [("events", events), ("ranked", ranked), ("seen", first)]
    if span.truncates is None:
        steps.append(("touched", "SELECT * FROM seen"))
    else:
        steps += _with_emptied(name, key, numbers, numbered, same, span.truncates, living(older or schema))
    steps.append(("now_there", f"SELECT *, {numbered} FROM {{newer}} WHERE {COMMIT_LSN} >= {span.since} AND {living(schema)}"))
    order = [field.name for field in schema]
    whole = ", ".join(f"n.{name(column)} AS {name(column)}" for column in order)
    gone = ", ".join(
        f"t.{name(column)} AS {name(column)}"
        if column in key or column == TEXT
        else f"t._pgwal_last_lsn AS {COMMIT_LSN}"
        if column == COMMIT_LSN
        else f"NULL AS {name(column)}"
        for column in order
    )
    with_text = ", ".join(f"{step} AS ({query})" for step, query in steps)
    return (
        f"WITH {with_text}"
        f" SELECT {whole}, CASE WHEN coalesce(t._pgwal_there, true) THEN 'update' ELSE 'insert' END AS {CHANGE},"
        f" coalesce(t._pgwal_first_lsn, n.{COMMIT_LSN}) AS {FIRST_LSN}, coalesce(t._pgwal_last_lsn, n.{COMMIT_LSN}) AS {LAST_LSN}"
        f" FROM now_there n LEFT JOIN touched t ON {same('n', 't')}"
        f" UNION ALL SELECT {gone}, 'delete' AS {CHANGE}, t._pgwal_first_lsn AS {FIRST_LSN}, t._pgwal_last_lsn AS {LAST_LSN}"
        f" FROM touched t WHERE t._pgwal_there AND NOT EXISTS (SELECT 1 FROM now_there n WHERE {same('n', 't')})"
    )


def _with_emptied(
    name: Callable[[str], str],
    key: Sequence[str],
    numbers: Sequence[str],
    numbered: str,
    same: Callable[[str, str], str],
    truncates: tuple[int, int],
    there: str,
) -> list[tuple[str, str]]:
    """The steps that add the rows which a TRUNCATE removed; what was there before is what `older` has."""
    first, last = truncates
    either = ", ".join(f"coalesce(o.{column}, s.{column}) AS {column}" for column in (*numbers, *map(name, key), TEXT))
    before = f"SELECT {', '.join(map(name, key))}, {TEXT}, {numbered}, true AS _pgwal_there FROM {{older}} WHERE {there}"
    joined = (
        f"SELECT {either}, coalesce(o._pgwal_there, false) AS _pgwal_there,"
        f" CASE WHEN o._pgwal_there THEN least(coalesce(s._pgwal_first_lsn, {first}), {first})"
        f" ELSE s._pgwal_first_lsn END AS _pgwal_first_lsn,"
        f" CASE WHEN o._pgwal_there THEN greatest(coalesce(s._pgwal_last_lsn, {last}), {last})"
        f" ELSE s._pgwal_last_lsn END AS _pgwal_last_lsn"
        f" FROM seen s FULL JOIN before o ON {same('s', 'o')}"
    )
    return [("before", before), ("touched", joined)]


def key_parts(dialect: Dialect, schema: pa.Schema, key: Sequence[str]) -> list[str]:
    """Return expressions that are equal, nulls too, for rows with the same key; `lake.columns.key_parts` explains them."""
    parts = []
    for column in key:
        kind, value, text = schema.field(column).type, dialect.name(column), f"{TEXT}[{dialect.text(column)}]"
        if _KINDS.is_string(kind):
            parts.append(f"coalesce({value}, chr(0) || {text})")
            continue
        parts.append(value)
        if _KINDS.is_date(kind) or _KINDS.is_timestamp(kind) or _KINDS.is_decimal(kind) or _KINDS.is_list(kind):
            parts.append(text)
    return parts

"""Fold the events of a table without a key, a bag of rows: only the number of copies of each row counts. Pure DataFrame logic.

Events change the number of copies: `I` and `U` (the new row) add one, `D` and `K` (the whole old row of an update) remove one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from pgwal_pipeline.lake.columns import exact_row, literal, quote
from pgwal_pipeline.lake.fold import Shape
from pgwal_pipeline.values.own_columns import COMMIT_LSN, COMMITTED_AT, DELETED_AT, DELETED_LSN, OP, TEXT
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROW = "_pgwal_row"
"""The column with a struct that is equal for equal rows (all columns and their texts in `_pgwal_text`)."""
TAKEN = "_pgwal_taken"
"""The column of `renewed` that is true for an order to delete all copies of the row, false for a copy to insert."""


def row_identity(schema: StructType, shape: Shape, alias: str = "") -> str:
    """Return the expression of `ROW` over a relation of that schema."""
    return with_texts(schema, shape.columns, alias)


def with_texts(schema: StructType, names: Sequence[str], alias: str = "") -> str:
    """Return `exact_row` with the texts of `names` too. Texts of other columns, such as one that the source dropped, do not count."""
    if not names:
        return "named_struct('c0', 0)"
    texts = f"map_filter({quote(TEXT, alias)}, (k, v) -> k IN ({', '.join(map(literal, names))}))"
    return f"named_struct('row', {exact_row(schema, names, alias)}, 'texts', coalesce(sort_array(map_entries({texts})), array()))"


def counted(events: "DataFrame", shape: Shape) -> "DataFrame":
    """Return each row that gains or loses copies: its columns, `_pgwal_text`, `_pgwal_commit_lsn`, ROW, and `_pgwal_change` (not 0)."""
    weight = f"sum(CASE WHEN {OP} IN ('I', 'U') THEN 1 ELSE -1 END) AS _pgwal_change"
    values = [*(f"first({quote(name)}) AS {quote(name)}" for name in (*shape.columns, TEXT)), f"max({COMMIT_LSN}) AS {COMMIT_LSN}"]
    if shape.keeps:
        values.append(f"max(CASE WHEN {OP} IN ('D', 'K') THEN struct({COMMIT_LSN} AS lsn, {COMMITTED_AT} AS at) END) AS _pgwal_removed")
    rows = _with_identity(events, shape)
    return rows.groupBy(ROW).agg(*map(F.expr, values), F.expr(weight)).where("_pgwal_change != 0")


def renewed(changes: "DataFrame", base: "DataFrame", shape: Shape) -> "DataFrame":
    """Return the rows, with ROW and TAKEN, that bring the bag `base` up to date with `changes`.

    For each row that loses copies there is one order to delete all of its copies; every other row is a copy to insert after that.

    Where deleted rows stay, each copy that is removed is inserted as one of them; `base` is the living rows.

    Reading the result fails with `missing_marker` if `base` has fewer copies of a row than are to be removed.
    """
    fewer = changes.where("_pgwal_change < 0").selectExpr(f"{ROW} AS _pgwal_wanted")
    found = _with_identity(base, shape).join(fewer, F.expr(f"{ROW} = _pgwal_wanted"), "left_semi")
    copies = found.groupBy(F.expr(f"{ROW} AS _pgwal_found")).agg(
        F.expr("count(*) AS _pgwal_copies"), F.expr(f"max({COMMIT_LSN}) AS _pgwal_newest")
    )
    more = "_pgwal_change > 0"
    left = "coalesce(_pgwal_copies, 0L) + _pgwal_change"
    failure = f"CAST(raise_error({literal(missing_marker(shape.table))}) AS bigint)"
    wanted = f"CASE WHEN {more} THEN _pgwal_change WHEN {left} >= 0 THEN {left} ELSE {failure} END"
    orders = "CASE WHEN _pgwal_change < 0 THEN array('taken') ELSE CAST(array() AS array<string>) END"
    fates = [orders, f"array_repeat('living', CAST({wanted} AS int))"]
    if shape.keeps:
        fates.append("array_repeat('deleted', CAST(greatest(-_pgwal_change, 0L) AS int))")
    one = changes.join(copies, F.expr(f"{ROW} = _pgwal_found"), "left").selectExpr(
        "*", f"explode(concat({', '.join(fates)})) AS _pgwal_fate"
    )
    newest = f"CASE WHEN {more} THEN {COMMIT_LSN} ELSE coalesce(_pgwal_newest, {COMMIT_LSN}) END"
    deleted = "CASE WHEN _pgwal_fate = 'deleted' THEN _pgwal_removed"
    marks = [f"{deleted}.at END AS {DELETED_AT}", f"{deleted}.lsn END AS {DELETED_LSN}"] if shape.keeps else []
    return one.selectExpr(
        *map(quote, shape.columns),
        f"{f'coalesce({deleted}.lsn END, {newest})' if shape.keeps else newest} AS {COMMIT_LSN}",
        TEXT,
        ROW,
        f"_pgwal_fate = 'taken' AS {TAKEN}",
        *marks,
    )


def applied(changes: "DataFrame", base: "DataFrame", shape: Shape) -> "DataFrame":
    """Return the bag `base` after `changes`: the columns, `_pgwal_commit_lsn`, `_pgwal_text`, and where deleted rows stay, their marks."""
    output = [*map(quote, shape.columns), COMMIT_LSN, TEXT, *([DELETED_AT, DELETED_LSN] if shape.keeps else [])]
    fewer = changes.where("_pgwal_change < 0").selectExpr(f"{ROW} AS _pgwal_wanted")
    kept = _with_identity(base, shape).join(fewer, F.expr(f"{ROW} = _pgwal_wanted"), "left_anti")
    return kept.selectExpr(*output).unionByName(renewed(changes, base, shape).where(f"NOT {TAKEN}").selectExpr(*output))


def _with_identity(rows: "DataFrame", shape: Shape) -> "DataFrame":
    return rows.selectExpr("*", f"{row_identity(rows.schema, shape)} AS {ROW}")


def missing_marker(table: TableName) -> str:
    """Return what a failing query's message contains when a row to be deleted is missing."""
    return f"pgwal: a row that {table} lost is not there"

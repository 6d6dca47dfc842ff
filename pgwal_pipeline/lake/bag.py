"""A table without a key is a bag of rows: what counts is how many copies of each row there are. Pure DataFrame logic.

Events change the count of copies: `I` and `U` (the new row) add one, `D` and `K` (the whole old row of an update) take one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from pgwal_pipeline.lake.columns import COMMIT_LSN, OP, TEXT, exact_row, literal, quote
from pgwal_pipeline.lake.fold import Shape
from pgwal_pipeline.relation import TableName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROW = "_pgwal_row"
"""A struct that is equal for equal rows (all columns and their texts in `_pgwal_text`)."""
TAKEN = "_pgwal_taken"
"""Of the rows that `renewed` gives: whether this is an order to take all copies of the row, rather than a copy."""


def row_identity(schema: StructType, shape: Shape, alias: str = "") -> str:
    """The expression of `ROW` over a relation of that schema."""
    return with_texts(schema, shape.columns, alias)


def with_texts(schema: StructType, names: Sequence[str], alias: str = "") -> str:
    """As `exact_row`, and with the texts of `names` too: those of other columns, as of one that the source dropped, do not count."""
    if not names:
        return "named_struct('c0', 0)"
    texts = f"map_filter({quote(TEXT, alias)}, (k, v) -> k IN ({', '.join(map(literal, names))}))"
    return f"named_struct('row', {exact_row(schema, names, alias)}, 'texts', coalesce(sort_array(map_entries({texts})), array()))"


def counted(events: "DataFrame", shape: Shape) -> "DataFrame":
    """Each row that gets more or fewer copies: columns, `_pgwal_text`, `_pgwal_commit_lsn`, ROW, and `_pgwal_change`, which is not 0."""
    weight = F.when(F.col(OP).isin("I", "U"), 1).otherwise(-1)
    values = [*(F.first(quote(name)).alias(name) for name in shape.columns), F.first(TEXT).alias(TEXT), F.max(COMMIT_LSN).alias(COMMIT_LSN)]
    rows = events.withColumn(ROW, F.expr(row_identity(events.schema, shape)))
    return rows.groupBy(ROW).agg(*values, F.sum(weight).alias("_pgwal_change")).where(F.col("_pgwal_change") != 0)


def renewed(changes: "DataFrame", base: "DataFrame", shape: Shape) -> "DataFrame":
    """What makes `base` into the bag after `changes`, as rows with ROW and TAKEN.

    First all copies of each row that lost some are to be taken (one order each), then every row that is no order is to be put in.

    Reading it fails with `missing_marker` if a row has fewer copies in `base` than are to go.
    """
    fewer = changes.where("_pgwal_change < 0").select(F.col(ROW).alias("_pgwal_wanted"))
    there = base.withColumn(ROW, F.expr(row_identity(base.schema, shape)))
    found = there.join(fewer, F.col(ROW) == F.col("_pgwal_wanted"), "left_semi")
    copies = found.groupBy(F.col(ROW).alias("_pgwal_found")).agg(
        F.count("*").alias("_pgwal_copies"), F.max(COMMIT_LSN).alias("_pgwal_newest")
    )
    left = F.coalesce("_pgwal_copies", F.lit(0)) + F.col("_pgwal_change")
    wanted = (
        F.when(F.col("_pgwal_change") > 0, F.col("_pgwal_change"))
        .when(left >= 0, left)
        .otherwise(F.raise_error(F.lit(missing_marker(shape.table))).cast("long"))
    )
    orders = F.when(F.col("_pgwal_change") < 0, F.array(F.lit(True))).otherwise(F.array().cast("array<boolean>"))
    each = F.explode(F.concat(orders, F.array_repeat(F.lit(False), wanted.cast("int"))))
    lsn = F.when(F.col("_pgwal_change") > 0, F.col(COMMIT_LSN)).otherwise(F.coalesce("_pgwal_newest", COMMIT_LSN))
    return changes.join(copies, F.col(ROW) == F.col("_pgwal_found"), "left").select(
        *(F.col(quote(name)) for name in shape.columns), lsn.alias(COMMIT_LSN), TEXT, ROW, each.alias(TAKEN)
    )


def applied(changes: "DataFrame", base: "DataFrame", shape: Shape) -> "DataFrame":
    """The bag `base` after `changes`: the columns, `_pgwal_commit_lsn` and `_pgwal_text`."""
    output = [*(F.col(quote(name)) for name in shape.columns), F.col(COMMIT_LSN), F.col(TEXT)]
    fewer = changes.where("_pgwal_change < 0").select(F.col(ROW).alias("_pgwal_wanted"))
    there = base.withColumn(ROW, F.expr(row_identity(base.schema, shape)))
    kept = there.join(fewer, F.col(ROW) == F.col("_pgwal_wanted"), "left_anti")
    return kept.select(*output).unionByName(renewed(changes, base, shape).where(~F.col(TAKEN)).select(*output))


def missing_marker(table: TableName) -> str:
    """What a failing query's message contains when a row that was deleted is not there."""
    return f"pgwal: a row that {table} lost is not there"

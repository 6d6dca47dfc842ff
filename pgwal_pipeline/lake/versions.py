"""Make the versions of a table's rows out of its events: from which commit on a row was as it is, and up to which.

This is pure DataFrame logic on the steps of `fold`. The results are rows of a history, some of them orders to the MERGE that brings it up
to date: an order says which versions of the history end, or are replaced.

A table with a key has at most one open version a key, and the next change of the key ends it. A table without one is a bag: of equal rows
it does not matter which one ends, so the oldest does.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from pgwal_pipeline.lake import bag, fold
from pgwal_pipeline.lake.bag import ROW, TAKEN
from pgwal_pipeline.lake.columns import key_parts, literal, quote
from pgwal_pipeline.lake.fold import AT_LSN, AT_ORDINAL, Shape, Traits, Truncate
from pgwal_pipeline.values.own_columns import (
    COMMIT_LSN,
    COMMITTED_AT,
    END_OP,
    OLD_KEY,
    OP,
    OPEN,
    TEXT,
    UNSEEN,
    VALID_FROM,
    VALID_FROM_LSN,
    VALID_TO,
    VALID_TO_LSN,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLOSES = "_pgwal_closes"
"""Of the rows of `of_keys`: true for an order to end the open version of the key, false for a version to insert."""

OWN = {
    VALID_FROM_LSN: "bigint",
    VALID_FROM: "timestamp",
    VALID_TO_LSN: "bigint",
    VALID_TO: "timestamp",
    OP: "string",
    END_OP: "string",
    OLD_KEY: "string",
    UNSEEN: "boolean",
    TEXT: "map<string,string>",
    OPEN: "boolean",
}
"""The columns that a history has besides the source's, in their order, with their types."""

_END = "struct<lsn:bigint,ordinal:bigint,at:timestamp,op:string>"


def of_keys(
    events: "DataFrame",
    present: "DataFrame",
    types: StructType,
    shape: Shape,
    traits: Traits,
    ended: Sequence[Truncate],
    *,
    every_change: bool,
) -> "DataFrame":
    """Return the versions that `events` begin in a table with a key, and orders to end those that are open in it before.

    `events` are steps with `_pgwal_committed_at`, `present` the open rows of the history, `ended` all TRUNCATEs among the events. Without
    `every_change` a transaction counts as one change: its last one. The rows have the columns of a history and CLOSES. Reading them fails
    with `fold.unsent_marker` if a value was not sent and no version has it.
    """
    key = ", ".join(key_parts(types, shape.key))
    whole = _filled(events, present, types, shape, moving=traits.key_changes) if traits.unchanged else events
    whole = _with_old_keys(whole, events, shape) if traits.key_changes else whole.withColumn(OLD_KEY, F.expr("CAST(NULL AS string)"))
    order = ", ".join(fold.ORDER)
    if not every_change:
        backwards = ", ".join(f"{part} DESC" for part in fold.ORDER)
        transaction = f"PARTITION BY {key}, {AT_LSN}"
        all_of_it = f"({transaction} ORDER BY {order} ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)"
        whole = whole.selectExpr(
            *(quote(name) for name in whole.columns if name != OLD_KEY),
            f"last({OLD_KEY}, true) OVER {all_of_it} AS {OLD_KEY}",
            f"first({OP}) OVER {all_of_it} AS _pgwal_first_op",
            f"row_number() OVER ({transaction} ORDER BY {backwards}) AS _pgwal_nth",
        ).where("_pgwal_nth = 1")
        began = (
            f"CASE WHEN {OP} = 'U' AND _pgwal_first_op = 'I' THEN 'I' "
            f"WHEN {OP} = 'I' AND _pgwal_first_op IN ('U', 'D', 'K') THEN 'U' ELSE {OP} END"
        )
        alive = f"(NOT {fold.ends(OP)} AND NOT coalesce(_pgwal_cut.lsn = {AT_LSN}, false))"
        ending = f"CASE WHEN {alive} THEN 'U' WHEN {fold.ends(OP)} THEN {OP} ELSE 'T' END"
    else:
        began, alive = OP, f"(NOT {fold.ends(OP)})"
        ending = f"CASE WHEN {fold.ends(OP)} THEN {OP} ELSE 'U' END"
    changes = whole.selectExpr("*", f"{_cut(ended)} AS _pgwal_cut").selectExpr(
        "*",
        f"{alive} AS _pgwal_alive",
        f"struct({AT_LSN} AS lsn, {AT_ORDINAL} AS ordinal, {COMMITTED_AT} AS at, {ending} AS op) AS _pgwal_here",
    )
    in_order = f"OVER (PARTITION BY {key} ORDER BY {order})"
    numbered = changes.selectExpr("*", f"lead(_pgwal_here) {in_order} AS _pgwal_next", f"row_number() {in_order} AS _pgwal_number")
    first = f"explode(CASE WHEN _pgwal_number = 1 THEN array(true, false) ELSE array(false) END) AS {CLOSES}"
    both = numbered.selectExpr("*", first).where(f"{CLOSES} OR _pgwal_alive")
    to = both.selectExpr(
        "*", f"CASE WHEN {CLOSES} THEN {_earlier('_pgwal_here', ended)} ELSE {_sooner('_pgwal_cut', '_pgwal_next')} END AS _pgwal_to"
    )
    found = to.selectExpr(*_row(shape, began), CLOSES)
    if not ended:
        return found
    untouched = fold.matching(present, events, shape.key, "left_anti").selectExpr("*", f"{_end_by(ended[0])} AS _pgwal_to")
    return found.unionByName(untouched.selectExpr(*_of_present(shape), f"true AS {CLOSES}"))


def _row(shape: Shape, began: str) -> list[str]:
    """The columns of a version out of a change with its end, `_pgwal_to`."""
    values = {
        VALID_FROM_LSN: AT_LSN,
        VALID_FROM: COMMITTED_AT,
        VALID_TO_LSN: "_pgwal_to.lsn",
        VALID_TO: "_pgwal_to.at",
        OP: began,
        END_OP: "_pgwal_to.op",
        OLD_KEY: OLD_KEY,
        UNSEEN: "false",
        TEXT: TEXT,
        OPEN: "_pgwal_to IS NULL",
    }
    return [*map(quote, shape.columns), *(f"{values[name]} AS {name}" for name in OWN)]


def _of_present(shape: Shape) -> list[str]:
    """The columns of an open version of the history with its end, `_pgwal_to`."""
    values = {VALID_TO_LSN: "_pgwal_to.lsn", VALID_TO: "_pgwal_to.at", END_OP: "_pgwal_to.op", OPEN: "_pgwal_to IS NULL"}
    return [*map(quote, shape.columns), *(f"{values.get(name, name)} AS {name}" for name in OWN)]


def _cut(ended: Sequence[Truncate]) -> str:
    """The end by the next TRUNCATE after a change, null if there is none."""
    if not ended:
        return f"CAST(NULL AS {_END})"
    after = f"t -> t.lsn > {AT_LSN} OR t.lsn = {AT_LSN} AND t.ordinal > {AT_ORDINAL}"
    return f"array_min(filter({_listed(ended)}, {after}))"


def _listed(ended: Sequence[Truncate]) -> str:
    return f"array({', '.join(map(_end_by, ended))})"


def _end_by(truncate: Truncate) -> str:
    """A TRUNCATE as the end of a version."""
    return f"struct({truncate.lsn}L AS lsn, {truncate.ordinal}L AS ordinal, {truncate.moment} AS at, 'T' AS op)"


def _sooner(one: str, other: str) -> str:
    """The earlier one of two ends, each of which may be null."""
    sooner = f"{one}.lsn < {other}.lsn OR {one}.lsn = {other}.lsn AND {one}.ordinal < {other}.ordinal"
    return f"CASE WHEN {other} IS NULL THEN {one} WHEN {one} IS NOT NULL AND ({sooner}) THEN {one} ELSE {other} END"


def _earlier(end: str, ended: Sequence[Truncate]) -> str:
    """The end `end`, or the first TRUNCATE if that was earlier."""
    return _sooner(_end_by(ended[0]), end) if ended else end


def _filled(events: "DataFrame", present: "DataFrame", types: StructType, shape: Shape, *, moving: bool = False) -> "DataFrame":
    """The events with the values that were not sent: of the last step of the same row that has them, or of its open version.

    With `moving` rows may change their key.
    """
    known = fold.matching(present, events, shape.key).selectExpr("*", f"{VALID_FROM_LSN} AS {COMMIT_LSN}")
    both = events.unionByName(fold.whole_rows(known, shape, f"CAST(NULL AS timestamp) AS {COMMITTED_AT}"))
    parts = key_parts(types, shape.key)
    if moving:
        both, parts = fold.with_lives(both, types, shape), fold.of_life(types, shape)
    so_far = f"OVER (PARTITION BY {', '.join(parts)} ORDER BY {', '.join(fold.ORDER)} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    movable = fold.may_be_unsent(types, shape)
    sent = [f"last({one}, true) {so_far} AS _pgwal_v{number}" for number, one in enumerate(map(fold.sent_value, movable))]
    values = {name: f"_pgwal_v{number}.v AS {quote(name)}" for number, name in enumerate(movable)}
    unsent = f"{OP} IN ('I', 'U') AND {fold.unsent_names(movable)} IS NOT NULL"
    failure = f"CAST(raise_error({literal(fold.unsent_marker(shape.table))}) AS bigint)"
    return (
        both.selectExpr("*", *sent)
        .where(f"{OP} != 'S'")
        .selectExpr(
            *(values.get(name, quote(name)) for name in shape.columns),
            OP,
            fold.merged_text(movable, TEXT),
            f"CASE WHEN {unsent} THEN {failure} ELSE {AT_LSN} END AS {AT_LSN}",
            AT_ORDINAL,
            COMMITTED_AT,
        )
    )


def _with_old_keys(whole: "DataFrame", events: "DataFrame", shape: Shape) -> "DataFrame":
    """The changes with `_pgwal_old_key` where a row came from another key."""
    key = f"to_json(struct({', '.join(map(quote, shape.key))}), map('ignoreNullFields', 'false'))"
    moves = events.where(f"{OP} = 'K'").selectExpr(
        f"{AT_LSN} AS _pgwal_move_lsn", f"{AT_ORDINAL} AS _pgwal_move_ordinal", f"{key} AS {OLD_KEY}"
    )
    beside = F.expr(f"{AT_LSN} = _pgwal_move_lsn AND {AT_ORDINAL} = _pgwal_move_ordinal AND {OP} = 'U'")
    return whole.join(moves, beside, "left").drop("_pgwal_move_lsn", "_pgwal_move_ordinal")


def of_bag(events: "DataFrame", present: "DataFrame", shape: Shape, ended: Sequence[Truncate], *, every_change: bool) -> "DataFrame":
    """Return the versions that `events` begin or end in a table without a key, and orders to remove the open ones that they replace.

    The arguments are those of `of_keys`. The rows have the columns of a history, ROW, and TAKEN, which is true for an order: every open
    version that equals ROW goes, and each of those that remain is among the rows. Reading them fails with `bag.missing_marker` if a row
    ends that is not there.
    """
    columns = [*map(quote, shape.columns), TEXT]
    before = "0" if not ended else f"size(filter({_listed(ended)}, t -> t.lsn < {AT_LSN} OR t.lsn = {AT_LSN} AND t.ordinal < {AT_ORDINAL}))"
    weight = f"CASE WHEN {OP} IN ('I', 'U') THEN 1 ELSE -1 END"
    identity = f"{bag.row_identity(events.schema, shape)} AS {ROW}"
    changes = events.selectExpr(
        *columns, OP, AT_LSN, AT_ORDINAL, COMMITTED_AT, identity, f"{before} AS _pgwal_part", f"{weight} AS _pgwal_weight"
    )
    if not every_change:
        last = f"max_by(CASE WHEN _pgwal_weight > 0 THEN {OP} END, CASE WHEN _pgwal_weight > 0 THEN {AT_ORDINAL} END)"
        end = f"max_by(CASE WHEN _pgwal_weight < 0 THEN {OP} END, CASE WHEN _pgwal_weight < 0 THEN {AT_ORDINAL} END)"
        grouped = changes.groupBy(ROW, "_pgwal_part", AT_LSN).agg(
            *(F.expr(f"first({name}) AS {name}") for name in columns),
            F.expr(f"max({AT_ORDINAL}) AS {AT_ORDINAL}"),
            F.expr(f"max({COMMITTED_AT}) AS {COMMITTED_AT}"),
            F.expr(f"CASE WHEN sum(_pgwal_weight) > 0 THEN {last} ELSE {end} END AS {OP}"),
            F.expr("sum(_pgwal_weight) AS _pgwal_weight"),
        )
        changes = grouped.where("_pgwal_weight != 0")
    copies = "explode(array_repeat(0, CAST(abs(_pgwal_weight) AS int))) AS _pgwal_copy"
    more = changes.where("_pgwal_weight > 0").selectExpr(
        *columns, ROW, "_pgwal_part", f"{AT_LSN} AS {VALID_FROM_LSN}", f"{COMMITTED_AT} AS {VALID_FROM}",
        OP, f"false AS {UNSEEN}", f"{AT_ORDINAL} AS _pgwal_place", "false AS _pgwal_was", copies,
    )  # fmt: skip
    fewer = changes.where("_pgwal_weight < 0").selectExpr(
        f"{ROW} AS _pgwal_wanted", "_pgwal_part AS _pgwal_in", f"struct({AT_LSN} AS lsn, {AT_ORDINAL} AS ordinal, {COMMITTED_AT} AS at, "
        f"CASE WHEN {OP} = 'K' THEN 'U' ELSE {OP} END AS op) AS _pgwal_end", copies,
    )  # fmt: skip
    known = present.selectExpr(
        *columns, f"{bag.row_identity(present.schema, shape)} AS {ROW}", "0 AS _pgwal_part", VALID_FROM_LSN, VALID_FROM,
        OP, UNSEEN, "-1L AS _pgwal_place", "true AS _pgwal_was", "0 AS _pgwal_copy",
    )  # fmt: skip
    if not ended:
        known = known.join(fewer.select("_pgwal_wanted"), F.expr(f"{ROW} = _pgwal_wanted"), "left_semi")
    begun = known.unionByName(more).selectExpr(
        "*", f"row_number() OVER (PARTITION BY {ROW}, _pgwal_part ORDER BY {VALID_FROM_LSN}, _pgwal_place) AS _pgwal_number"
    )
    over = fewer.selectExpr(
        "*", "row_number() OVER (PARTITION BY _pgwal_wanted, _pgwal_in ORDER BY _pgwal_end.lsn, _pgwal_end.ordinal) AS _pgwal_nth"
    ).drop("_pgwal_copy")
    pairs = F.expr(f"{ROW} = _pgwal_wanted AND _pgwal_part = _pgwal_in AND _pgwal_number = _pgwal_nth")
    cut = f"get({_listed(ended)}, _pgwal_part)" if ended else f"CAST(NULL AS {_END})"
    failure = f"CAST(raise_error({literal(bag.missing_marker(shape.table))}) AS {_END})"
    joined = begun.join(over, pairs, "full").selectExpr(
        "*",
        f"CASE WHEN _pgwal_number IS NULL THEN {failure} WHEN _pgwal_end IS NOT NULL THEN _pgwal_end ELSE {cut} END AS _pgwal_to",
        f"CAST(NULL AS string) AS {OLD_KEY}",
        f"explode(CASE WHEN _pgwal_was AND _pgwal_number = 1 THEN array(true, false) ELSE array(false) END) AS {TAKEN}",
    )
    found = joined.selectExpr(*_of_present(shape), ROW, TAKEN)
    return found if every_change else found.where(f"{TAKEN} OR {VALID_TO_LSN} IS NULL OR {VALID_TO_LSN} > {VALID_FROM_LSN}")


def begun(rows: "DataFrame", shape: Shape, lsn: int, at: str, *, unseen: bool) -> "DataFrame":
    """Return rows of `current` as versions that begin at `lsn`; `at` is the expression of the time."""
    values = {VALID_FROM_LSN: f"{lsn}L", VALID_FROM: at, OP: "'S'", UNSEEN: str(unseen).lower(), TEXT: TEXT, OPEN: "true"}
    null = {name: f"CAST(NULL AS {kind})" for name, kind in OWN.items()}
    return rows.selectExpr(*map(quote, shape.columns), *(f"{values.get(name, null[name])} AS {name}" for name in OWN))


def compared(present: "DataFrame", rows: "DataFrame", shape: Shape, lsn: int, at: str) -> "DataFrame":
    """Return what the open versions `present` become if the table has the `rows`, as read at `lsn`, instead of them.

    A version that equals a row goes on. What differs ends, or begins, at `lsn`, and is marked as unseen.
    """
    columns = present.columns
    left = _numbered_copies(present, shape).selectExpr("*", "true AS _pgwal_was")
    new = _numbered_copies(begun(rows, shape, lsn, at, unseen=True), shape)
    right = new.selectExpr(*(f"{quote(name)} AS {quote(f'_pgwal_new_{number}')}" for number, name in enumerate(new.columns)))
    number = {name: quote(f"_pgwal_new_{place}") for place, name in enumerate(new.columns)}
    same = F.expr(f"{ROW} = {number[ROW]} AND _pgwal_number = {number['_pgwal_number']}")
    there, ends = f"{number[VALID_FROM_LSN]} IS NOT NULL", {
        VALID_TO_LSN: f"{lsn}L", VALID_TO: at, END_OP: "'S'", UNSEEN: "true", OPEN: "false",
    }  # fmt: skip
    chosen = [
        f"CASE WHEN _pgwal_was IS NULL THEN {number.get(name, 'NULL')} "
        + (f"WHEN NOT {there} THEN {ends[name]} " if name in ends else "")
        + f"ELSE {quote(name)} END AS {quote(name)}"
        for name in columns
    ]
    found = left.join(right, same, "full").selectExpr(*chosen)
    return found.where(f"{VALID_TO_LSN} IS NULL OR {VALID_TO_LSN} > {VALID_FROM_LSN}")


def _numbered_copies(rows: "DataFrame", shape: Shape) -> "DataFrame":
    """The rows with ROW and the number of each among its equals."""
    known = rows.selectExpr("*", f"{bag.row_identity(rows.schema, shape)} AS {ROW}")
    return known.selectExpr("*", f"row_number() OVER (PARTITION BY {ROW} ORDER BY {VALID_FROM_LSN}) AS _pgwal_number")

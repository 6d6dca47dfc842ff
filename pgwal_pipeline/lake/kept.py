"""Keep the rows that a table has lost, each with when it was deleted: the option `deletes: keep`.

A kept row has its last values, and as `_pgwal_commit_lsn` the LSN of its deletion. It does not matter how often is published: a row that
came and went between two publishes is kept too. A change (`fold`) has two more columns here: `_pgwal_committed_at`, when the key lost its
row, and `_pgwal_known`, whether the change has the values of the row; without them those of the target stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ByteType, IntegerType, LongType, ShortType, StructType

from pgwal_pipeline.lake import bag, fold
from pgwal_pipeline.lake.columns import key_parts, null_of, quote, same_types, text_of
from pgwal_pipeline.lake.fold import AT, AT_LSN, AT_ORDINAL, GONE, KEPT, KNOWN, LOST, NO_NAMES, ORDER, Shape, Traits, Truncate
from pgwal_pipeline.values.own_columns import COMMIT_LSN, COMMITTED_AT, DELETED_AT, DELETED_LSN, OP, ORDINAL, TEXT, UNCHANGED, XID

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = {DELETED_AT: "timestamp", DELETED_LSN: "bigint"}
"""The columns of a `current` table that keeps deleted rows, with their Delta types."""

LIVING = f"{DELETED_LSN} IS NULL"
"""The condition of the rows that the source has."""

_INTEGRAL = (ByteType, ShortType, IntegerType, LongType)


def living(rows: "DataFrame", columns: Sequence[str]) -> "DataFrame":
    """Return those rows of a `current` table, with the column names `columns`, that the source has."""
    return rows.where(LIVING) if DELETED_LSN in columns else rows


def net(steps: "DataFrame", types: StructType, shape: Shape, traits: Traits) -> "DataFrame":
    """Return the final change of each key, as `fold.net` does."""
    if traits.unchanged and traits.key_changes:
        return _followed(steps, types, shape)
    return _newest(steps, types, shape, fold.may_be_unsent(types, shape) if traits.unchanged else [], judged=traits.unchanged)


def _newest(steps: "DataFrame", types: StructType, shape: Shape, movable: Sequence[str], *, judged: bool) -> "DataFrame":
    """The changes where no row changes its key, or every value is sent: the newest row of a key, and its newest step."""
    has_row = f"NOT {fold.ends(OP)}"
    row = f"CASE WHEN {has_row} THEN {_row(shape)} END"
    last = f"struct({', '.join([OP, COMMIT_LSN, TEXT, COMMITTED_AT, *map(quote, shape.key)])})"
    of_key = map(F.expr, fold.numbered(key_parts(types, shape.key)))
    folded = steps.groupBy(*of_key).agg(
        F.expr(f"max_by({last}, {AT}) AS _pgwal_last"),
        F.expr(f"max_by({row}, CASE WHEN {has_row} THEN {AT} END) AS _pgwal_row"),
        *map(F.expr, fold.sent_values(movable)),
    )
    known = "_pgwal_row IS NOT NULL"
    unsent = f"CASE WHEN {known} THEN {fold.unsent_names(movable)} END"
    return folded.selectExpr(
        *_values(shape, movable, "_pgwal_last."),
        f"_pgwal_last.{COMMIT_LSN} AS {COMMIT_LSN}",
        _text(known, movable, f"_pgwal_last.{TEXT}"),
        f"{fold.ends(f'_pgwal_last.{OP}')} AS {GONE}",
        f"_pgwal_last.{COMMITTED_AT} AS {COMMITTED_AT}",
        f"{known} AS {KNOWN}",
        *([f"{unsent} AS {KEPT}", f"{NO_NAMES} AS {LOST}"] if judged else []),
    )


def _followed(steps: "DataFrame", types: StructType, shape: Shape) -> "DataFrame":
    """The changes where rows change their keys and values may be unsent: a row that left a key had the values of its life until then."""
    lives = fold.with_lives(steps, types, shape)
    movable = fold.may_be_unsent(types, shape)
    so_far = f"PARTITION BY {', '.join(fold.of_life(types, shape))} ORDER BY {', '.join(ORDER)}"
    over = f"OVER ({so_far} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    sent = [f"last({fold.sent_value(name)}, true) {over} AS _pgwal_v{number}" for number, name in enumerate(movable)]
    row = f"last(CASE WHEN NOT {fold.ends(OP)} THEN {_row(shape)} END, true) {over} AS _pgwal_row"
    left = lives.selectExpr("*", row, *sent).where(f"_pgwal_is_last AND {fold.ends(OP)}")
    unsent = fold.unsent_names(movable)
    stayed = "_pgwal_life IS NULL AND _pgwal_birth_number = 0"
    # A value that is nowhere: the row was in no table of the lake, and it is gone from the source.
    known = f"(_pgwal_row IS NOT NULL AND ({stayed} OR {unsent} IS NULL))"
    gone = left.selectExpr(
        *_values(shape, movable, ""),
        COMMIT_LSN,
        _text(known, movable, TEXT),
        f"true AS {GONE}",
        COMMITTED_AT,
        f"{known} AS {KNOWN}",
        f"CASE WHEN {known} THEN {unsent} END AS {KEPT}",
        f"{NO_NAMES} AS {LOST}",
    )
    there = fold.living(lives, types, shape).selectExpr("*", f"CAST(NULL AS timestamp) AS {COMMITTED_AT}", f"true AS {KNOWN}")
    return there.unionByName(gone)


def _row(shape: Shape) -> str:
    return f"struct({', '.join([TEXT, *map(quote, shape.columns)])})"


def _values(shape: Shape, movable: Sequence[str], last: str) -> list[str]:
    """The columns: the key as the last step has it, others as the row had them, or as they were sent last."""
    sent = {name: f"_pgwal_v{number}.v" for number, name in enumerate(movable)}
    held = {name: f"{last}{quote(name)}" if name in shape.key else sent.get(name, f"_pgwal_row.{quote(name)}") for name in shape.columns}
    return [f"{value} AS {quote(name)}" for name, value in held.items()]


def _text(known: str, movable: Sequence[str], last: str) -> str:
    merged = fold.merged_text(movable, f"_pgwal_row.{TEXT}").removesuffix(f" AS {TEXT}")
    return f"CASE WHEN {known} THEN {merged} ELSE {last} END AS {TEXT}"


def emptied(steps: "DataFrame", events: "DataFrame", types: StructType, shape: Shape) -> "DataFrame":
    """Return `steps` with one more for each row that a TRUNCATE among `events`, rows of raw, removed: its deletion."""
    place = f"struct({COMMIT_LSN} AS lsn, {ORDINAL} AS ordinal, {XID} AS xid, {COMMITTED_AT} AS at)"
    truncates = events.where(f"{OP} = 'T'").selectExpr(f"sort_array(collect_list({place})) AS _pgwal_truncates")
    of_key = f"PARTITION BY {', '.join(key_parts(types, shape.key))} ORDER BY {', '.join(ORDER)}"
    after = f"t -> t.lsn > {AT_LSN} OR t.lsn = {AT_LSN} AND t.ordinal > {AT_ORDINAL}"
    placed = steps.selectExpr("*", f"lead({AT_LSN}) OVER ({of_key}) AS _pgwal_next", f"lead({AT_ORDINAL}) OVER ({of_key}) AS _pgwal_then")
    judged = placed.join(F.broadcast(truncates), how="cross").selectExpr("*", f"get(filter(_pgwal_truncates, {after}), 0) AS _pgwal_by")
    first = "_pgwal_by.lsn < _pgwal_next OR _pgwal_by.lsn = _pgwal_next AND _pgwal_by.ordinal < _pgwal_then"
    removed = judged.where(f"NOT {fold.ends(OP)} AND _pgwal_by IS NOT NULL AND (_pgwal_next IS NULL OR {first})")
    values = {name: quote(name) if name in shape.key else null_of(types[name].dataType) for name in shape.columns}
    deletions = removed.selectExpr(
        *(f"{value} AS {quote(name)}" for name, value in values.items()),
        f"'D' AS {OP}",
        f"_pgwal_by.lsn AS {COMMIT_LSN}",
        f"_pgwal_by.xid AS {XID}",
        TEXT,
        f"{NO_NAMES} AS {UNCHANGED}",
        f"_pgwal_by.at AS {COMMITTED_AT}",
        f"_pgwal_by.lsn AS {AT_LSN}",
        f"_pgwal_by.ordinal AS {AT_ORDINAL}",
    )
    return steps.unionByName(deletions)


@dataclass(frozen=True, slots=True)
class Moment:
    """A commit LSN, and the SQL of its time."""

    lsn: int
    at: str

    @classmethod
    def of(cls, lsn: int, at: datetime) -> "Moment":
        """Return the moment of an LSN and a time."""
        return cls(lsn, f"timestamp_micros({round(at.timestamp() * 1_000_000)}L)")


def emptied_bag(target: "DataFrame", steps: "DataFrame", truncate: Truncate, shape: Shape) -> "DataFrame":
    """Return the rows of `target`, a table without a key, after `steps`, the last TRUNCATE among which is `truncate`."""
    types, plain = target.schema, replace(shape, keeps=False)
    there = living(target, types.names)
    before = f"{AT_LSN} < {truncate.lsn}L OR {AT_LSN} = {truncate.lsn}L AND {AT_ORDINAL} < {truncate.ordinal}L"
    had = bag.applied(bag.counted(steps.where(before), shape), there, shape)
    now = bag.applied(bag.counted(steps.where(f"NOT ({before})"), plain), there.limit(0), plain)
    lost = _marked(had, Moment(truncate.lsn, truncate.moment))
    return target.where(f"NOT ({LIVING})").unionByName(_as(lost, types)).unionByName(_as(_unmarked(now), types))


def _marked(rows: "DataFrame", moment: Moment) -> "DataFrame":
    """`rows`, the living ones among them deleted at that moment."""
    marks = {COMMIT_LSN: f"{moment.lsn}L", DELETED_AT: moment.at, DELETED_LSN: f"{moment.lsn}L"}
    own = (f"CASE WHEN {LIVING} THEN {value} ELSE {name} END AS {name}" for name, value in marks.items())
    return rows.selectExpr(*(quote(name) for name in rows.columns if name not in marks), *own)


def _unmarked(rows: "DataFrame") -> "DataFrame":
    return rows.selectExpr("*", *(f"CAST(NULL AS {kind}) AS {name}" for name, kind in COLUMNS.items()))


def _as(rows: "DataFrame", types: StructType) -> "DataFrame":
    """`rows` with the columns of `types`, null where they lack one."""
    has = rows.columns
    return rows.selectExpr(*(quote(f.name) if f.name in has else f"{null_of(f.dataType)} AS {quote(f.name)}" for f in types.fields))


def with_deleted(rows: "DataFrame", present: "DataFrame | None", gone: "DataFrame | None", shape: Shape, moment: Moment) -> "DataFrame":
    """Return `rows`, which the source has, and those that it had: of the `present` table, and of the changes `gone` (`net`).

    A row of the present table of which no deletion is known was deleted at `moment`. Its values are null in columns that have another type
    now. Where the key cannot be compared nothing of the present table stays.
    """
    types = rows.schema
    old = None if present is None else _carried(present, types, shape)
    there = _unmarked(rows)
    if not shape.key:
        return there if old is None else there.unionByName(_lost_copies(old, rows, shape, moment))
    if old is not None:
        old = fold.matching(old, rows, shape.key, "left_anti")
        newest = f"ORDER BY {LIVING} DESC, {DELETED_LSN} DESC"
        of_key = ", ".join(key_parts(types, shape.key))
        old = old.selectExpr("*", f"row_number() OVER (PARTITION BY {of_key} {newest}) AS _pgwal_nth").where("_pgwal_nth = 1")
        old = old.drop("_pgwal_nth")
    if gone is None:
        return there if old is None else there.unionByName(_marked(old, moment).select(there.columns))
    if old is None:
        old = there.limit(0)
    gone = gone.where(_has_key(shape))  # not one of another type, from an earlier table of that name
    return there.unionByName(_joined(old, gone, types, shape, moment).select(there.columns))


def _joined(old: "DataFrame", gone: "DataFrame", types: StructType, shape: Shape, moment: Moment) -> "DataFrame":
    o, g = (frame.selectExpr("*", "true AS _pgwal_here").alias(name) for frame, name in ((old, "o"), (gone, "g")))
    pairs = zip(key_parts(types, shape.key, "o"), key_parts(types, shape.key, "g"), strict=True)
    joined = o.join(g, F.expr(" AND ".join(f"{ours} <=> {theirs}" for ours, theirs in pairs)), "full_outer")
    earlier = f"o.{DELETED_LSN} IS NOT NULL AND (g.{COMMITTED_AT} IS NULL OR o.{DELETED_LSN} >= g.{COMMIT_LSN})"
    own = earlier if KEPT not in gone.columns else f"{earlier} OR g.{KEPT} IS NOT NULL"
    theirs = f"coalesce(g.{KNOWN}, false) AND NOT coalesce({own}, false)"
    marks = {
        COMMIT_LSN: (f"o.{DELETED_LSN}", f"g.{COMMIT_LSN}", f"{moment.lsn}L"),
        DELETED_LSN: (f"o.{DELETED_LSN}", f"g.{COMMIT_LSN}", f"{moment.lsn}L"),
        DELETED_AT: (f"o.{DELETED_AT}", f"g.{COMMITTED_AT}", moment.at),
    }
    values = {name: f"CASE WHEN {theirs} THEN {quote(name, 'g')} ELSE {quote(name, 'o')} END" for name in (*shape.columns, TEXT)}
    values |= {field.name: quote(field.name, "o") for field in types.fields if field.name not in (*values, *marks)}
    values |= {
        name: f"CASE WHEN {earlier} THEN {before} WHEN g.{COMMITTED_AT} IS NOT NULL THEN {found} ELSE {else_} END"
        for name, (before, found, else_) in marks.items()
    }
    known = joined.where(f"o._pgwal_here OR ({theirs})")
    return known.selectExpr(*(f"{value} AS {quote(name)}" for name, value in values.items()))


def _carried(present: "DataFrame", types: StructType, shape: Shape) -> "DataFrame | None":
    """The rows of the present table with the columns of `types`; None if their key has another type now."""
    has, values = present.schema, {}
    for field in types.fields:
        was = has[field.name].dataType if field.name in has.names else None
        if was is not None and same_types(was, field.dataType):
            values[field.name] = quote(field.name)
        elif isinstance(was, _INTEGRAL) and isinstance(field.dataType, _INTEGRAL):
            values[field.name] = f"try_cast({quote(field.name)} AS {field.dataType.simpleString()})"
        elif field.name in shape.key or (not shape.key and field.name in shape.columns):
            return None
        else:
            values[field.name] = null_of(field.dataType)
    values |= {name: name if name in has.names else f"CAST(NULL AS {kind})" for name, kind in COLUMNS.items()}
    return present.selectExpr(*(f"{value} AS {quote(name)}" for name, value in values.items())).where(_has_key(shape))


def _has_key(shape: Shape) -> str:
    return " AND ".join(f"({quote(name)} IS NOT NULL OR {text_of(name)} IS NOT NULL)" for name in shape.key) or "true"


def _lost_copies(old: "DataFrame", rows: "DataFrame", shape: Shape, moment: Moment) -> "DataFrame":
    """The deleted rows of `old`, a table without a key, and the copies that it has more than `rows`."""
    row = bag.row_identity(rows.schema, shape)
    counts = rows.selectExpr(f"{row} AS _pgwal_found").groupBy("_pgwal_found").agg(F.expr("count(*) AS _pgwal_copies"))
    nth = f"row_number() OVER (PARTITION BY {row} ORDER BY {COMMIT_LSN}) AS _pgwal_nth"
    copies = old.where(LIVING).selectExpr("*", f"{row} AS {bag.ROW}", nth)
    fewer = copies.join(counts, F.expr(f"{bag.ROW} = _pgwal_found"), "left").where("_pgwal_nth > coalesce(_pgwal_copies, 0L)")
    lost = _marked(fewer.selectExpr(*map(quote, old.columns)), moment).select(old.columns)
    return old.where(f"NOT ({LIVING})").unionByName(lost)
